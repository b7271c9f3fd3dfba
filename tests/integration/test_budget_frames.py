"""Plans within a GPU budget on a device of separate memory: the exact prediction, and what requests hold."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from chrion import HybridSession, Plan, partition
from chrion.runtime.execution.cut_engine import CutEngine
from helpers import assert_equal
from mirror_device import MirrorDevice
from property_tests import examples
from random_cases import random_case
from random_profiles import coarse_random_profile
from seams.execution import engine_of, note, use_device

pytestmark = [pytest.mark.timeout(300, method="thread"), pytest.mark.usefixtures("short_planning")]


def run_on_mirror(model: Any, plan: Plan, feed: Any, expected: Any) -> list[int]:
    """Run a plan with a device of separate memory; return the bytes that each frame allocates on the device."""
    with pytest.MonkeyPatch.context() as patch:
        use_device(patch, MirrorDevice)
        made = note(patch, "make a device frame")
        with HybridSession(model, plan=plan, strict=True) as session:
            assert_equal(session.run(None, feed), expected)
            engine = engine_of(session)  # a plain session, if the plan has one segment or values are sequences
            assert bool(made) == (isinstance(engine, CutEngine) and engine.accelerated)
    return [call.given[0].device_bytes for call in made]


@examples(60)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(3, 14),
    policy=st.sampled_from(["chrion", "chrion", "chrion-paper", "first-fit", "layers"]),
    share=st.floats(0.0, 1.2),
    alpha=st.sampled_from([None, 1.0]),
)
def test_a_plan_within_a_budget_holds_what_it_predicts(
    seed: int, size: int, policy: str, share: float, alpha: float | None
) -> None:
    """The exact resident memory is within the budget, and its frame is what the runtime allocates for a request."""
    pick = Random(seed)
    case = random_case(pick, size, least_operators=2) or reject()
    graph = case.graph
    profile = coarse_random_profile(graph, pick)
    free = partition(graph, profile, policy=policy, alpha=alpha)
    budget_mb = share * free.predicted.resident_mb
    plan = partition(graph, profile, policy=policy, alpha=alpha, gpu_budget=budget_mb)
    assert plan.meets_budget
    on_device = [i for i, lane in enumerate(plan.schedule.lanes) if lane <= 0]
    dag = plan.apply(graph).dag
    weights_mb = sum(dag.weight_bytes[w] for w in {w for i in on_device for w in dag.weights[i]}) / 1e6
    assert weights_mb + plan.predicted.frame_mb - 1e-9 <= plan.predicted.resident_mb <= budget_mb
    held = run_on_mirror(case.model, plan, case.feed, case.expected)
    assert held == [round(plan.predicted.frame_mb * 1e6)] * len(held)
