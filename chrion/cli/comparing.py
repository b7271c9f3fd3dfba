"""``chrion compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chrion.benchmark.comparison import is_this_machine, plan_policies, time_plans
from chrion.benchmark.feeds import read_feed
from chrion.cli.console import (
    AcceleratorOption,
    CoresOption,
    JsonOption,
    ModelArgument,
    ProfileOption,
    ShapeOption,
    StreamsOption,
    load_graph,
    progress_bar,
    show,
    show_json,
    stderr,
    stored_or_measured,
)
from chrion.cli.running import InputOption
from chrion.errors import OptionError
from chrion.profiler.measure import synthetic_inputs
from chrion.report import (
    check_picture,
    comparison_json,
    comparison_table,
    comparison_verdict,
    estimated_lines,
    plot_comparison,
)
from chrion.scheduler import POLICIES
from chrion.scheduler.planner import check_options


def compare(
    model: ModelArgument,
    policies: Annotated[
        str | None, typer.Option("--policies", metavar="A,B,...", help="Schedulers to compare.  [default: all]")
    ] = None,
    profile: ProfileOption = None,
    feed: InputOption = None,
    cycles: Annotated[int, typer.Option(min=1, help="Turns of each rival.")] = 5,
    cores: CoresOption = None,
    accelerator: AcceleratorOption = None,
    shape: ShapeOption = None,
    streams: StreamsOption = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="OUT.png", help="Draw bars.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan by several schedulers, run every plan, and set them beside plain onnxruntime.

    With a profile of another machine, plans are predicted only.
    """
    chosen = _chosen(policies, streams)
    if plot:
        check_picture("--plot", plot)
    graph = load_graph(model, shape)
    arrays = read_feed(feed, graph) if feed else None
    costs = stored_or_measured(graph, profile, cores, accelerator, policies=chosen)
    with progress_bar("plan") as progress:
        found = plan_policies(graph, costs, chosen, cores=cores, streams=streams, progress=progress)
    if is_this_machine(costs):
        with progress_bar("compare") as progress:
            request = arrays or synthetic_inputs(graph)
            found = time_plans(found, request, rounds=cycles, progress=progress)
    else:
        stderr.print(f"not measured: the profile is of another machine ({costs.machine})", highlight=False)
    if plot:
        plot_comparison(found, plot)
    if as_json:
        show_json(comparison_json(found))
    else:
        estimated = estimated_lines(found.estimated, len(graph.dag))
        show(comparison_table(found), comparison_verdict(found), *estimated, *([f"written: {plot}"] if plot else []))


def _chosen(policies: str | None, streams: int | None) -> list[str]:
    """The policies to compare, all options checked before anything is measured."""
    names = list(POLICIES) if policies is None else list(dict.fromkeys(name.strip() for name in policies.split(",")))
    if names == [""]:
        raise OptionError("--policies: no name in it", hint=f"some of {', '.join(POLICIES)}")
    for name in names:
        check_options(None, None, name, streams=streams)
    return names
