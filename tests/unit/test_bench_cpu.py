"""Tests of the tables of ``scripts/bench_cpu.py`` and ``scripts/predict_wide_lanes.py``; nothing is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_cpu import HEAD, HYBRID, WIDE, WIDE_CASES, Measured, format_wide
from predict_wide_lanes import NAME, Estimate, best_plain, describe_widths, format_results, predict
from result_files import read_rows, write_results

from chrion import load
from chrion.graph import Dag
from chrion.hardware import hardware
from chrion.profiler import Costs, OperatorMemory
from chrion.scheduler import Schedule
from chrion.scheduler.evaluation.solution import Problem
from chrion.zoo import build


def measured(case: int, own_ms: float) -> Measured:
    """Return trials of a model whose plain sessions take 2 and 3 ms."""
    trials = {HYBRID: [own_ms] * 8, "plain, 1 thread": [3.0] * 8, "plain, 2 threads": [2.0] * 8}
    return Measured(WIDE_CASES[case], b"", 9, trials, None, None)


def test_rows_of_models_that_are_not_measured_stay(tmp_path: Path) -> None:
    """Models are measured in three calls, in any order; the table has each once, in the order of the models."""
    for case, own_ms in ((3, 1.5), (0, 2.0), (3, 1.0)):
        write_results(tmp_path, format_wide(tmp_path, [measured(case, own_ms)]))
    rows = read_rows(tmp_path, WIDE)
    assert [row[0] for row in rows] == [WIDE_CASES[0].name, WIDE_CASES[3].name]
    assert [row[4] for row in rows] == ["1.00", "**0.50**"]
    assert all(len(row) == len(HEAD) for row in rows)


@pytest.mark.parametrize(("overhead_ms", "expected"), [(0.0, (3.0, 4)), (2.0, (6.0, 2))])
def test_the_best_plain_session_has_the_best_number_of_threads(overhead_ms: float, expected: tuple[float, int]) -> None:
    """Operators of 6 ms take 3 ms on two cores, and 1.5 ms and an overhead on four; no thread is woken."""
    dag = Dag.from_edges(2, [])
    wide = ((3.0, 3.0), (1.5 + overhead_ms, 1.5 + overhead_ms))
    costs = Costs(None, ((6.0, 6.0),) * 4, (OperatorMemory(),) * 2, widths=(2, 4), wide_ms=wide, wake_ms=5.0)
    assert best_plain(dag, costs) == expected


def test_widths_are_described() -> None:
    """The share of operators on lanes of each number of cores."""
    schedule = Schedule((0, 1, 2, 3), (1, 1, 2, 1), 4, widths=(4, 1, 1, 2))
    assert describe_widths(schedule) == "1: 50%, 2: 25%, 4: 25%"


def test_a_prediction_has_plans_no_slower_than_lanes_of_one_core() -> None:
    """A small model on four cores: the best plan of all is at least as fast as the best on lanes of one core."""
    graph = load(build("lstm", {"layers": 1, "batch": 1, "io": 32, "seq": 4, "chunk": 4}))
    found = predict("LSTM", graph, hardware("epyc-32"), 4)
    assert found.best.timeline.latency_ms <= found.narrow_ms
    assert found.plain_ms > 0
    assert found.threads in {1, 2, 4}
    assert found.row()[:2] == ["LSTM", "4"]


def estimate(case: int, cores: int, plain_ms: float) -> Estimate:
    """Return a prediction for a model whose best plan is one operator of 3 ms."""
    dag = Dag.from_edges(1, [])
    problem = Problem(dag, Costs(None, ((3.0,),), (OperatorMemory(),)))
    return Estimate(WIDE_CASES[case].name, cores, plain_ms, 1, 3.0, problem.evaluate(Schedule((0,), (1,), 1)))


def test_predicted_rows_stay_unless_they_are_for_another_processor(tmp_path: Path) -> None:
    """Models are predicted in any order; the table has each model and number of cores once, for one processor."""
    for found in ([estimate(3, 16, 6.0), estimate(3, 8, 6.0)], [estimate(0, 8, 6.0)], [estimate(3, 8, 4.0)]):
        write_results(tmp_path, {NAME: format_results(tmp_path, hardware("epyc-32"), found)})
    cells = [(row[0], row[1], row[6]) for row in read_rows(tmp_path, NAME)]
    first, other = WIDE_CASES[0].name, WIDE_CASES[3].name
    assert cells == [(first, "8", "0.50"), (other, "8", "0.75"), (other, "16", "0.50")]
    write_results(tmp_path, {NAME: format_results(tmp_path, hardware("epyc-16"), [estimate(1, 8, 6.0)])})
    assert [row[0] for row in read_rows(tmp_path, NAME)] == [WIDE_CASES[1].name]
