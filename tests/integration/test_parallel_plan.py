"""The parallel plan that is timed although its prediction is bad."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chrion import Graph, Profile, load
from chrion.profiler.profiles import OperatorCost
from chrion.runtime.selection.proposals import parallel_plan
from chrion.scheduler.plan_options import PlanOptions
from chrion.scheduler.planner import alternatives
from chrion.zoo import build
from helpers import FLOAT, MACHINE, make_model, node, value


def profile_of(graph: Graph, slowdown: float, accelerator: str | None = None) -> Profile:
    """Return a profile in which every operator takes 1 ms alone, and longer while another core is busy."""
    costs = {
        s: OperatorCost(t, (1.0, slowdown), 1.0 if accelerator else None)
        for s, t in zip(graph.dag.signatures, graph.dag.op_types, strict=True)
    }
    return Profile(MACHINE, 2, accelerator, costs, handoff_ms=0.001)


@pytest.fixture
def unfolded() -> Graph:
    """Return an unfolded stack, in which layers can run in parallel."""
    return load(build("lstm", {"layers": 4, "seq": 8, "io": 4, "batch": 1}))


def test_a_plan_is_made_although_the_slowdown_was_measured_too_large(unfolded: Graph) -> None:
    """With a slowdown of 3 the planner uses one core; the plan for the guard uses two and says so."""
    profile = profile_of(unfolded, 3.0)
    assert all(len(plan.segments) == 1 for plan in alternatives(unfolded, profile, PlanOptions()))
    plan = parallel_plan(unfolded, profile, None, None)
    assert plan is not None
    assert len(set(plan.schedule.lanes)) == 2
    assert any("slow each other down" in remark for remark in plan.remarks)


def test_no_plan_is_made_without_contention(unfolded: Graph) -> None:
    """The planner has then found what there is."""
    assert parallel_plan(unfolded, profile_of(unfolded, 1.0), None, None) is None


def test_no_plan_is_made_for_an_accelerator_or_one_core(unfolded: Graph) -> None:
    """Only contention between cores is mistaken for interference."""
    assert parallel_plan(unfolded, profile_of(unfolded, 3.0, "CUDAExecutionProvider"), None, None) is None
    single = profile_of(unfolded, 3.0)
    costs = {s: replace(cost, cpu_ms=cost.cpu_ms[:1]) for s, cost in single.operators.items()}
    assert parallel_plan(unfolded, replace(single, cores=1, operators=costs), None, None) is None


def test_no_plan_is_made_for_a_chain() -> None:
    """A chain has no two operators that could run in parallel, so that it is not planned again."""
    names = ["x", "a", "b", "y"]
    nodes = [node("Relu", [names[at]], [names[at + 1]]) for at in range(3)]
    chain = load(make_model(nodes, [value("x", FLOAT, [1, 8])], [value("y", FLOAT, [1, 8])]))
    assert parallel_plan(chain, profile_of(chain, 3.0), None, None) is None
