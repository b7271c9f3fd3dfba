"""Operators that not every request uses: their expected times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chrion.graph import Dag
from chrion.graph.usage import usage_of
from chrion.profiler import OperatorCost, Profile
from chrion.profiler.costs import uniform_costs
from chrion.scheduler.evaluation.weight_cache import durations_ms
from chrion.scheduler.schedule import Schedule
from helpers import MACHINE

PAIR = Dag.from_edges(2, [(0, 1)], [4])


def test_the_first_matching_pattern_decides() -> None:
    """An operator of several nodes is matched by any of them; others are always used."""
    patterns = {"*expert0/*": 0.25, "*expert*": 0.5}
    operators = [["MatMul:expert0/a"], ["Mul:x", "MatMul:expert1/a"], ["MatMul:router"]]
    assert usage_of(operators, patterns) == (0.25, 0.5, 1.0)
    assert usage_of(operators, {}) == ()


def test_expected_times_are_in_the_costs() -> None:
    """Times on both devices are multiplied by the probability; memory is not, since the weights must be there."""
    row = OperatorCost("Operator", (4.0, 5.0), 1.0)
    profile = Profile(MACHINE, 2, "X", {"0": row, "1": row})
    used = profile.costs(replace(PAIR, usage=(1.0, 0.25)))
    always = profile.costs(PAIR)
    assert used.cpu_ms == ((4.0, 1.0), (5.0, 1.25))
    assert used.accelerator_ms == (1.0, 0.25)
    assert (used.memory, used.accelerator_share) == (always.memory, always.accelerator_share)


def test_an_unused_expert_reloads_no_weights() -> None:
    """The weights of an operator return to the cache as often as it is used."""
    dag = replace(PAIR, weights=((0,), (1,)), weight_bytes=(1000, 1000), usage=(1.0, 0.1))
    costs = replace(uniform_costs(dag), cache_bytes=1000, reload_ms_per_byte=0.001)
    assert durations_ms(dag, costs, Schedule((0, 1), (1, 1), 1)) == pytest.approx([2.0, 1.1])
