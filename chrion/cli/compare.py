"""``chrion compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chrion.cli import outputs
from chrion.cli.completion import complete_policies
from chrion.cli.console import note, show, show_json, step
from chrion.cli.options import (
    AcceleratorOption,
    CoresOption,
    CorrectionsOption,
    ForceOption,
    GpuBudgetOption,
    HardwareOption,
    InputOption,
    JsonOption,
    ModelArgument,
    ProfileOption,
    RoundsOption,
    ShapeOption,
    StreamsOption,
)
from chrion.cli.steps import INTERFERENCE, HardwareOptions, load_graph_and_feed, load_or_measure_profile
from chrion.common.units import format_count
from chrion.errors import OptionError
from chrion.report import (
    comparison_json,
    comparison_remarks,
    comparison_table,
    comparison_verdict,
    estimated_lines,
    plot_comparison,
)
from chrion.report.benchmark.comparison import is_this_machine, plan_policies, time_plans
from chrion.scheduler import policy_names
from chrion.scheduler.planner import check_options


def compare(
    model: ModelArgument,
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies",
            metavar="A,B,...",
            autocompletion=complete_policies,
            help=f"Schedulers to compare: {', '.join(policy_names())}.",
            show_default="all",
        ),
    ] = None,
    profile: ProfileOption = None,
    hardware: HardwareOption = None,
    corrections: CorrectionsOption = None,
    gpu_budget: GpuBudgetOption = None,
    feed: InputOption = None,
    rounds: RoundsOption = 5,
    cores: CoresOption = None,
    accelerator: AcceleratorOption = None,
    shape: ShapeOption = None,
    streams: StreamsOption = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw bars: a PNG, SVG or PDF file.")] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Plan with several schedulers, run every plan, and time them beside plain onnxruntime.

    With a profile of another machine, plans are only predicted.
    """
    chosen = _chosen_policies(policies, gpu_budget, streams)
    machine = HardwareOptions(hardware, corrections)
    machine.check()
    targets = [outputs.check_picture_output("--plot", plot, force=force)] if plot else []
    graph, arrays = load_graph_and_feed(model, shape, feed)
    costs = load_or_measure_profile(graph, profile, cores, accelerator, policies=chosen, machine=machine)
    with step(f"planning {graph.name} with {len(chosen)} policies") as update:
        found = plan_policies(
            graph, costs, chosen, cores=cores, streams=streams, gpu_budget=gpu_budget, progress=update
        )
    if is_this_machine(costs):
        with step(f"timing {len(chosen)} policies in {format_count(rounds, 'round')}", animated=False) as update:
            found = time_plans(found, arrays, rounds=rounds, progress=update)
        if found.interference:
            note(INTERFERENCE)
    else:
        note(f"not measured: the profile is of another machine ({costs.machine})")
    if plot:
        plot_comparison(found, plot)
    if as_json:
        show_json(comparison_json(found))
    else:
        estimated = estimated_lines(found.estimated, len(graph.dag), costs.machine)
        lines = [*comparison_remarks(found), comparison_verdict(found), *estimated, *(t.message for t in targets)]
        show(comparison_table(found), *lines)


def _chosen_policies(policies: str | None, gpu_budget: str | None, streams: int | None) -> list[str]:
    """Return the policies to compare; all options are checked before anything is measured."""
    names = policy_names() if policies is None else list(dict.fromkeys(name.strip() for name in policies.split(",")))
    if names == [""]:
        raise OptionError("--policies: no policy given", hint=f"some of {', '.join(policy_names())}")
    for name in names:
        check_options(None, None, name, gpu_budget, streams=streams)
    return names
