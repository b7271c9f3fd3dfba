"""``chrion run``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import onnxruntime as ort
import typer

from chrion.cli.console import note, show, show_json, step
from chrion.cli.exit_codes import FAILED
from chrion.cli.option_groups import ExecutionOptions, InputOptions
from chrion.cli.options import JsonOption
from chrion.cli.steps import check_reach, open_session
from chrion.common.units import format_ms
from chrion.report.benchmark.accuracy import TOLERANCE, largest_difference
from chrion.runtime import HybridSession


def run(
    model: InputOptions,
    options: ExecutionOptions,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Timed runs.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Run a model in a HybridSession, time it, and check the outputs against plain onnxruntime.

    The session chooses between plans and plain onnxruntime, as it does in a program. With --plan, --policy or --streams
    it runs that plan, even if plain onnxruntime is faster. Exit code 3: the measured latency misses the SLO.
    """
    plan = options.load_plan()
    graph, arrays = model.load_with_feed(plan)
    arguments = options.session_arguments(graph, plan)
    expected = ort.InferenceSession(str(model.path), providers=["CPUExecutionProvider"]).run(None, arrays)
    with open_session(graph, arguments) as session:
        outputs, measured_ms = _run_repeatedly(session, arrays, repeat)
        explanation, chosen = session.explain(), session.plan
    difference = largest_difference(outputs, expected)
    equal = difference <= TOLERANCE
    predicted_ms = chosen.predicted.latency_ms if chosen else None
    if as_json:
        checked = {"equal": equal, "largest_difference": difference, "runs": repeat}
        latency = {"predicted_ms": predicted_ms, "measured_ms": measured_ms}
        show_json({"model": graph.name, "runs_plan": chosen is not None, **checked, **latency})
    else:
        predicted = f", predicted {format_ms(predicted_ms)}" if predicted_ms is not None else ""
        show(
            explanation,
            f"measured {format_ms(measured_ms)} (median of {repeat}){predicted}",
            f"outputs {'equal' if equal else 'DIFFER FROM'} plain onnxruntime's: largest difference {difference:.2g}",
        )
    code = check_reach(measured_ms, options.plan_options.limits.slo_ms, chosen)
    if not equal:
        note(f"error: outputs differ from plain onnxruntime's by {difference:.2g}, more than {TOLERANCE:g}")
    raise typer.Exit(code if equal else FAILED)


def _run_repeatedly(session: HybridSession, arrays: Mapping[str, Any], repeat: int) -> tuple[Sequence[Any], float]:
    """Return the outputs and the median latency in ms, after one warm-up run."""
    times = []
    with step(f"running {repeat} times", animated=False):
        outputs = session.run(None, arrays)
        for _ in range(repeat):
            before = time.perf_counter()
            outputs = session.run(None, arrays)
            times.append((time.perf_counter() - before) * 1e3)
    return outputs, statistics.median(times)
