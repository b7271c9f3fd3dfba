"""``chrion run``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from chrion.cli.console import note, show, show_json, step
from chrion.cli.exit_codes import FAILED
from chrion.cli.option_groups import ExecutionOptions, InputOptions
from chrion.cli.options import JsonOption
from chrion.cli.steps import check_reach, open_session
from chrion.common.units import format_ms, format_share
from chrion.profiler.precision import relative_error
from chrion.report.benchmark.accuracy import TOLERANCE, largest_difference
from chrion.runtime import HybridSession
from chrion.scheduler import Plan

#: Without a limit, outputs in bfloat16 are wrong beyond this multiple of the expected error (a choice, not measured).
_EXPECTED = 5.0


def run(
    model: InputOptions,
    options: ExecutionOptions,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Timed runs.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Run a model in a HybridSession, time it, and check the outputs against plain onnxruntime.

    The session chooses between plans and plain onnxruntime, as it does in a program. With --plan, --policy or --streams
    it runs that plan, even if plain onnxruntime is faster. Exit code 1: outputs differ by more than rounding, with
    --precision bf16 by more than --max-error (without it, five times the estimate). Exit code 3: the measured latency
    misses the SLO.
    """
    plan = options.load_plan()
    graph, arrays = model.load_with_feed(plan)
    expected = model.run_plain(arrays)
    arguments = options.session_arguments(graph, plan)
    with open_session(graph, arguments, model) as session:
        outputs, measured_ms = _run_repeatedly(session, arrays, repeat)
        explanation, chosen = session.explain(), session.plan
    difference = largest_difference(outputs, expected)
    rounded = chosen is not None and chosen.precision != "float32"
    error = relative_error(outputs, expected)
    limit = options.max_error or _EXPECTED * chosen.expected_error if chosen and rounded else TOLERANCE
    equal = (error if rounded else difference) <= limit
    predicted_ms = chosen.predicted.latency_ms if chosen else None
    if as_json:
        checked = {"equal": equal, "largest_difference": difference, "relative_error": error, "runs": repeat}
        latency = {"predicted_ms": predicted_ms, "measured_ms": measured_ms}
        show_json({"model": graph.name, "runs_plan": chosen is not None, **checked, **latency})
    else:
        predicted = f", predicted {format_ms(predicted_ms)}" if predicted_ms is not None else ""
        show(
            explanation,
            f"measured {format_ms(measured_ms)} (median of {repeat}){predicted}",
            _rounding_line(error, chosen, limit) if chosen and rounded else _difference_line(difference, equal=equal),
        )
    code = check_reach(measured_ms, options.plan_options.limits.slo_ms, chosen)
    if not equal:
        found = f"{format_share(error)} of the largest" if rounded else f"{difference:.2g}"
        note(f"error: outputs differ from plain onnxruntime's by {found}, more than {limit:.3g}")
    raise typer.Exit(code if equal else FAILED)


def _difference_line(difference: float, *, equal: bool) -> str:
    return f"outputs {'equal' if equal else 'DIFFER FROM'} plain onnxruntime's: largest difference {difference:.2g}"


def _rounding_line(error: float, plan: Plan, limit: float) -> str:
    """Return a line on the error of outputs in bfloat16, relative to the largest output."""
    expected = f"estimated {format_share(plan.expected_error)}; limit {format_share(limit)}"
    return f"error of {plan.precision} against plain onnxruntime's float32: {format_share(error)} measured ({expected})"


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
