"""``chrion demo``: LSTMs run on all cores, the paper's model planned for its machine, and a counterexample."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from chrion import zoo
from chrion.cli import outputs
from chrion.cli.console import show, step
from chrion.cli.option_groups import CostOptions
from chrion.cli.options import CoresOption, ForceOption
from chrion.cli.steps import time_sessions
from chrion.common.files import write_atomically
from chrion.common.units import format_count, format_mb, format_ms
from chrion.errors import ModelError
from chrion.graph import Graph, load
from chrion.machine.cores import physical_cores
from chrion.native import available
from chrion.profiler import Profile
from chrion.profiler.machine import this_machine
from chrion.profiler.synthetic_inputs import synthetic_inputs
from chrion.report.benchmark.accuracy import TOLERANCE, largest_difference
from chrion.report.benchmark.latency import Feed, Timing, hybrid_candidate, plain_baseline
from chrion.report.figure_table import Column, FigureTable, key
from chrion.report.lane_chart import LaneChart, measured_chart, predicted_chart
from chrion.report.tables import bench_table, bench_verdict, plan_table
from chrion.report.timeline_html import timeline_html
from chrion.runtime import HybridSession
from chrion.scheduler import Plan, partition
from chrion.scheduler.limits import Limits
from chrion.scheduler.plan_options import PlanOptions
from chrion.scheduler.planner import Planner
from chrion.scheduler.priced_memory import MEMORY_NAMES

_PLAN, _PAGE = "plan", Path("demo.html")
#: Traced runs, of which that of median latency is drawn, and rounds of timings: the demo ends within 45 s, also beside
#: other work.
_TRACES = 15
_ROUNDS = 2
#: Recurrent stacks as exporters write them: one operator a layer. In the second, each step waits for the one before.
_STACK: dict[str, Any] = {"layers": 10, "io": 96, "batch": 1, "seq": 96, "chunk": 96}
_CHAIN: dict[str, Any] = {"layers": 1, "io": 512, "batch": 1, "seq": 32, "chunk": 32}
#: The paper's model and machine. Its profile says that cores beyond the fourth add no throughput.
_PAPER_MODEL, _PAPER_MACHINE, _PAPER_CORES = "lstm-baseline", "gtx1080ti-paper", 4
#: Objectives around the paper's latencies for this model.
_SLOS_MS = (40.0, 50.0, 60.0)


def demo(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Page to write.", show_default=f"{_PAGE}, with a number if it exists"
        ),
    ] = None,
    cores: CoresOption = None,
    force: ForceOption = False,
) -> None:
    """Run a stack of LSTMs on all cores, plan the paper's LSTM for the paper's machine, and time a model without gain.

    It takes less than a minute on two cores, and writes a web page with the predicted and the measured timeline of the
    first plan.
    """
    path = output or (_PAGE if force else outputs.free_path(_PAGE))
    (target,) = outputs.check_outputs({"-o": output}, defaults={"-o": path}, force=force)
    show(*_missing())
    _show_heading("1. Run", f"a stack of 10 LSTMs, 96 wide, 96 steps, batch 1, on {this_machine()}")
    graph, measured, plan = _plan(_STACK, cores)
    feed = synthetic_inputs(graph)
    chart = _run(graph, plan, feed)
    timings, interference = _time(graph, plan, feed, cores)
    conclusion = f"   {bench_verdict(timings, _PLAN, interference=interference)}"
    predicted_ms = None if interference else plan.predicted.latency_ms  # of costs that the same processes disturbed
    show(bench_table(timings, _PLAN, predicted_ms), conclusion)
    charts = [predicted_chart(plan), chart]
    write_atomically(path, timeline_html(plan, charts, [conclusion.strip()], graph=graph, profile=measured))
    show(f"   timeline for a browser, {target.message}")
    _plan_for_the_papers_machine()
    _show_heading(
        "3. When it does not help", "operators that wait for one another, as in a single LSTM layer, 512 wide"
    )
    graph, _, plan = _plan(_CHAIN, cores)
    timings, interference = _time(graph, plan, synthetic_inputs(graph), cores)
    show(bench_table(timings, _PLAN), f"   {bench_verdict(timings, _PLAN, interference=interference)}")
    show("   HybridSession keeps the plain session where no plan is faster")


def _show_heading(heading: str, text: str) -> None:
    show(Text.assemble((heading, "bold"), f": {text}"))


def _missing() -> list[str]:
    """Return a line for everything that a plan for CPU cores needs and this machine or installation lacks."""
    lines = []
    if len(physical_cores()) < 2:
        lines.append("one CPU core only: a plan needs two or more to be faster than plain onnxruntime")
    if not available():
        lines.append("native lanes are missing: plans run on Python threads and are slower; see chrion devices")
    return lines


def _plan(stack: dict[str, Any], cores: int | None) -> tuple[Graph, Profile, Plan]:
    """Return a recurrent stack, its profile and its plan on the CPU cores of this machine."""
    with step("building the model"):
        graph = load(zoo.build("lstm", stack))
    costs = CostOptions(cores=cores, accelerator="none")
    measured = costs.find_profile(graph, plain=False)  # plain sessions are timed beside the plan
    with step(f"planning {graph.name}"):
        return graph, measured, partition(graph, measured)


def _run(graph: Graph, plan: Plan, feed: Feed) -> LaneChart:
    """Run the plan, check its outputs, and return the lanes of the run of median latency.

    Raises:
        ModelError: Its outputs differ from plain onnxruntime's.
    """
    run_plain, close = plain_baseline(graph.source, feed, None)()
    expected = run_plain()
    close()
    with HybridSession(graph, plan=plan) as session:
        difference = largest_difference(session.run(None, feed), expected)
        traces = [session.trace(feed) for _ in range(_TRACES)]
    if difference > TOLERANCE:
        raise ModelError(f"demo: outputs differ from plain onnxruntime's by {difference:.2g}, more than {TOLERANCE:g}")
    show(f"   largest difference from plain onnxruntime: {difference:.2g}")
    traces.sort(key=lambda events: max((e.end_ms for e in events), default=0.0))
    return measured_chart(plan, traces[_TRACES // 2])


def _time(graph: Graph, plan: Plan, feed: Feed, cores: int | None) -> tuple[list[Timing], bool]:
    """Time the plan beside plain sessions with every number of threads; see :func:`time_sessions`."""
    plain = {
        f"onnxruntime, {format_count(count, 'thread')}": plain_baseline(graph.source, feed, count)
        for count in _thread_counts(cores or len(physical_cores()))
    }
    plain["onnxruntime, default"] = plain_baseline(graph.source, feed, None)
    return time_sessions({_PLAN: hybrid_candidate(graph, plan, feed), **plain}, rounds=_ROUNDS)


def _thread_counts(cores: int) -> list[int]:
    """Return all numbers of threads up to 8, then powers of two and all cores."""
    return [count for count in range(1, cores + 1) if count <= 8 or count & (count - 1) == 0 or count == cores]


def _plan_for_the_papers_machine() -> None:
    """Plan the paper's model for the paper's machine, without limits and for several SLOs."""
    profile = Profile.load(_PAPER_MACHINE)
    text = "12 LSTM layers, 96 steps, batch 8, for a GTX 1080 Ti and 4 of 12 cores; predicted from the paper's figures"
    _show_heading("2. Plan", text)
    with step(f"building {_PAPER_MODEL}"):
        graph = load(zoo.build(_PAPER_MODEL))
    with step(f"planning {_PAPER_MODEL}"):
        fastest = partition(graph, profile, cores=_PAPER_CORES)
        planner = Planner(graph, profile, PlanOptions(cores=_PAPER_CORES))
        within = [planner.plan(Limits(slo_ms)) for slo_ms in _SLOS_MS]
    show("   The fastest plan, whatever its memory")
    columns: list[Column | str] = [key("SLO"), "latency", MEMORY_NAMES["paper"], "operators on CPU"]
    table = FigureTable("The plans of least memory found within an SLO", columns)
    for slo_ms, plan in zip(_SLOS_MS, within, strict=True):
        figures = format_ms(plan.predicted.latency_ms), format_mb(plan.predicted.memory_mb)
        table.add_row(format_ms(slo_ms), *figures, str(plan.on_cpu))
    show(plan_table(fastest), table)
