"""``chrion compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chrion.cli import outputs
from chrion.cli.console import note, show, show_json, step
from chrion.cli.option_groups import CostOptions, InputOptions
from chrion.cli.options import (
    PICTURE,
    ForceOption,
    GpuBudgetOption,
    JsonOption,
    RoundsOption,
    StreamsOption,
    complete_policies,
)
from chrion.common.units import format_count
from chrion.errors import OptionError
from chrion.profiler.machine import is_this_machine
from chrion.report.benchmark.comparison import plan_policies, time_plans
from chrion.report.comparison import (
    comparison_json,
    comparison_remarks,
    comparison_table,
    comparison_verdict,
    plot_comparison,
)
from chrion.scheduler import policy_names
from chrion.scheduler.plan_options import PlanOptions


def compare(
    model: InputOptions,
    *,
    policies: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            autocompletion=complete_policies,
            help=f"Schedulers to compare: {', '.join(policy_names())}.",
            show_default="all that find a plan",
        ),
    ] = None,
    costs: CostOptions,
    gpu_budget: GpuBudgetOption = None,
    streams: StreamsOption = None,
    rounds: RoundsOption = 5,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help=f"Draw bars: {PICTURE}")] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Plan with several schedulers, run every plan, and time them beside plain onnxruntime.

    With a profile of another machine, plans are only predicted.
    """
    chosen = _chosen_policies(policies)
    options = [
        PlanOptions(policy=policy, cores=costs.cores, streams=streams, gpu_budget=gpu_budget) for policy in chosen
    ]
    graph, arrays = model.load_with_feed()
    targets = outputs.check_outputs({}, pictures={"--plot": plot}, force=force)
    measured = costs.find_profile(graph, chosen)
    runs = is_this_machine(measured.machine)
    if runs:
        model.run_plain(arrays)
    with step(f"planning {graph.name} with {len(chosen)} policies") as update:
        comparison = plan_policies(graph, measured, options, update)
    if runs:
        with step(f"timing {len(chosen)} policies in {format_count(rounds, 'round')}", animated=False) as update:
            comparison = time_plans(comparison, arrays, rounds=rounds, progress=update)
    else:
        note(f"not measured: the profile is of another machine ({measured.machine})")
    if plot:
        plot_comparison(comparison, plot)
    if policies is None and not as_json:
        comparison = comparison.planned
    if as_json:
        show_json(comparison_json(comparison))
    else:
        messages = [target.message for target in targets]
        show(comparison_table(comparison), *comparison_remarks(comparison), comparison_verdict(comparison), *messages)


def _chosen_policies(policies: str | None) -> list[str]:
    """Return the policies to compare."""
    if policies is None:
        usable = list(filter(_is_usable, policy_names()))
        if missing := [name for name in policy_names() if name not in usable]:
            note(f"left out, as packages are missing: {', '.join(missing)}; --policies NAME says which")
        return usable
    names = list(dict.fromkeys(name.strip() for name in policies.split(",")))
    if names == [""]:
        raise OptionError("--policies: no policy given", hint=f"some of {', '.join(policy_names())}")
    return names


def _is_usable(policy: str) -> bool:
    """Return whether a policy can be loaded, and the packages that it needs are installed."""
    try:
        PlanOptions(policy=policy)
    except OptionError:
        return False
    return True
