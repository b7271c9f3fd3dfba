"""Models with estimated times: blocks against sums by hand, and loads against what one lane can serve."""

from __future__ import annotations

from typing import Any

import pytest

from chrion.graph.dag import Dag
from chrion.profiler import uniform_costs
from chrion.serving.multi.estimated_models import EstimatedModels, estimate_blocks
from chrion.serving.multi.load import find_factor, predict
from chrion.serving.multi.simulation import build_arrivals

CHAIN = Dag.from_edges(4, [(0, 1), (1, 2), (2, 3)])
#: An operator takes 2 ms alone and 3 ms while both cores are busy.
COSTS = uniform_costs(CHAIN, cpu_ms=(2.0, 3.0))


def test_blocks_take_as_long_as_their_operators() -> None:
    """A chain of four operators of 2 ms is two blocks of 4 ms, each 6 ms beside another; pieces have no limit."""
    cut = estimate_blocks(CHAIN, COSTS, 5.0, modules=False)
    assert (cut.block_ms, cut.busy_ms) == ((4.0, 4.0), (6.0, 6.0))
    cut = estimate_blocks(CHAIN, COSTS, modules=True)
    assert (cut.block_ms, cut.busy_ms) == ((8.0,), (12.0,))


def test_the_rate_that_fits_is_that_of_the_lanes() -> None:
    """A task alone takes its 8 ms; with both lanes always busy a task takes 12 ms, so that 166.7 a second fit."""
    models = EstimatedModels({"a": (CHAIN, COSTS)}, block="5ms")
    assert models.lanes == 2
    slow = predict(models, build_arrivals({"a": 10.0}, 10.0), models.times)
    assert (slow.models["a"].p50_ms, slow.models["a"].p99_ms) == pytest.approx((8.0, 8.0))
    assert slow.utilisation == pytest.approx(0.5 * 10 * 0.008, rel=0.05)
    found = find_factor(models, {"a": 1.0}, 60.0, models.times)
    assert found == pytest.approx(2 / 0.012, rel=0.03)


def test_short_times_have_three_digits() -> None:
    """The times of blocks that take microseconds are not rounded to 0.0 ms."""
    short = EstimatedModels({"a": (CHAIN, uniform_costs(CHAIN, cpu_ms=(0.0015,)))})
    assert short.explain().splitlines()[1] == "a: 6.00 us in 1 block, the longest 6.00 us"


@pytest.mark.parametrize(
    ("options", "block_ms"),
    [
        ({}, (5.0, 5.0)),
        ({"deadlines": "1s"}, (5.0, 5.0)),
        ({"deadlines": {"a": "1s", "b": 7.0}}, (3.0, 3.0, 3.0, 1.0)),
        ({"deadlines": {"b": 0.1}}, (2.0,) * 5),
        ({"deadlines": {"b": 0.1}, "block": "5ms"}, (5.0, 5.0)),
    ],
)
def test_blocks_are_shorter_beside_short_deadlines(options: dict[str, Any], block_ms: tuple[float, ...]) -> None:
    """Blocks of at most 5 ms, or of half of the shortest deadline from 2 ms, if no limit is given."""
    chain = Dag.from_edges(10, [(i, i + 1) for i in range(9)])
    costs = uniform_costs(chain, cpu_ms=(1.0,))
    models = EstimatedModels({"a": (chain, costs), "b": (chain, costs)}, **options)
    assert sorted(models.rules["a"].block_ms, reverse=True) == list(block_ms)
