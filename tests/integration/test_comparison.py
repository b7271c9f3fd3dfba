"""Comparison of schedulers: its measurements, and its report of policies that fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

import chrion
from chrion.errors import ScheduleError
from chrion.graph import Dag
from chrion.graph.opened_model import OpenedModel
from chrion.profiler import Costs
from chrion.profiler.synthetic_inputs import synthetic_inputs
from chrion.report.benchmark.comparison import PolicyComparison, PolicyResult, plan_policies, time_plans
from chrion.report.comparison import (
    comparison_json,
    comparison_remarks,
    comparison_table,
    comparison_verdict,
    plot_comparison,
)
from chrion.scheduler import POLICIES, Schedule, fixed_plan
from chrion.scheduler.plan_options import PlanOptions
from chrion.scheduler.policies.policy import SchedulePolicy
from helpers import alternating_lanes, branches
from random_profiles import random_profile


def compared(source: onnx.ModelProto, *policies: str) -> PolicyComparison:
    """Return plans of some policies for this machine."""
    graph = chrion.load(source)
    return plan_policies(graph, chrion.profile(graph), [PlanOptions(policy=policy) for policy in policies])


def test_a_policy_that_finds_no_plan_has_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The row of the policy has the reason, and the other policies are compared as usual."""

    def failing(*_: Any) -> Any:
        raise ScheduleError("policy odd: there is an odd number of operators")

    monkeypatch.setitem(POLICIES, "odd", SchedulePolicy("odd", "No plan for any graph.", failing))
    found = compared(branches(), "odd", "cpu")
    assert found.results[0].plan is None
    assert "odd number" in found.results[0].reason
    assert found.results[1].plan is not None
    assert comparison_json(found)["policies"][0]["reason"].startswith("policy odd")
    assert "no policy found a plan" in comparison_verdict(replace(found, results=found.results[:1]))
    plot_comparison(replace(found, results=found.results[:1]), tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_lanes_and_waits_are_those_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two branches on two lanes that join on one have one wait; branches on one lane have none."""
    graph = chrion.load(branches())
    for right, expected in ((2, (2, 1)), (1, (1, 0))):
        lanes = [right if name.startswith("right") else 1 for name in graph.dag.names]

        def schedule(dag: Dag, costs: Costs, _alpha: float, lanes: list[int] = lanes) -> Schedule:
            return Schedule(dag.topological_order, tuple(lanes), costs.cores)

        monkeypatch.setitem(POLICIES, "fixed", SchedulePolicy("fixed", "Given lanes.", schedule))
        result = plan_policies(
            graph, random_profile([graph], accelerator=False), [PlanOptions(policy="fixed")]
        ).results[0]
        assert (result.lanes, result.synchronisations) == expected


def test_plans_that_fail_or_give_other_outputs_are_not_timed() -> None:
    """A plan of another model fails, and outputs that differ from the plain session's are reported."""
    found = compared(branches(), "cpu")
    other = chrion.load(branches(size=6))
    broken = PolicyResult("broken", fixed_plan(other, alternating_lanes(other)), 1.0)
    sound = PolicyResult("sound", fixed_plan(found.graph, alternating_lanes(found.graph)), 1.0)
    feed = synthetic_inputs(found.graph)
    measured = time_plans(replace(found, results=(broken, sound)), feed, rounds=1, trial_s=0.01)
    assert measured.results[0].reason.startswith("does not run: ")
    assert measured.results[0].timing is None
    assert measured.results[1].timing is not None
    table = comparison_table(measured)
    assert len(table.rows) == 2 + 3
    assert "lanes: CPU cores that a plan uses" in table.title
    assert f"{len(measured.graph.dag)} operators after onnxruntime's fusion" in table.title
    negated = branches()
    next(n for n in negated.graph.node if n.op_type == "Neg").op_type = "Abs"
    graph = replace(found.graph, source=OpenedModel(negated.SerializeToString()))
    measured = time_plans(replace(found, graph=graph, results=(sound,)), feed, rounds=1, trial_s=0.01)
    assert "differ from plain onnxruntime's" in measured.results[0].reason
    assert measured.results[0].timing is None
    assert all(t.runs >= 5 for t in measured.plain)


def test_policies_that_tie_are_named_together() -> None:
    """The verdict names all policies of the least latency; columns without figures are left out."""
    found = compared(branches(), "cpu", "heft")
    first = found.results[0]
    tied = replace(found, results=(first, replace(first, policy="other")))
    assert comparison_verdict(tied).startswith("fastest policy (predicted): cpu, other (tie), ")
    alone = comparison_verdict(replace(found, results=(first,)))
    assert alone.startswith("fastest policy (predicted): cpu, ")
    assert "tie" not in alone


def test_plans_on_the_same_lanes_say_in_what_operators_they_differ() -> None:
    """A line for the policies of each set of operators, and none if all plans have those of the model."""
    found = compared(branches(), "cpu", "heft", "bfs")
    assert comparison_remarks(found) == []
    plans = [result.plan for result in found.results]
    assert plans[2]
    count, native = len(plans[2].operators), plans[2].operators[:2]
    cut = replace(found.results[2], plan=replace(plans[2], chunk=4, model_operators=2, native=native))
    assert comparison_remarks(replace(found, results=(*found.results[:2], cut))) == [
        f"cpu, heft: {count} operators",
        f"bfs: {count} operators (2 in the model; recurrent layers in chunks of 4 steps), 2 native",
    ]


def test_the_search_of_the_default_policy_is_compared_with_the_fastest_other_one() -> None:
    """A line says how much faster the default policy is predicted, and how long each of them planned."""
    found = compared(branches(), "cpu", "heft")
    plan = found.results[0].plan
    assert plan

    def result(policy: str, latency_ms: float, planning_ms: float) -> PolicyResult:
        predicted = replace(plan.predicted, latency_ms=latency_ms)
        return PolicyResult(policy, replace(plan, predicted=predicted), planning_ms)

    others = result("cpu", 50.0, 1.0), result("heft", 40.0, 300.0)
    for latency_ms, words in ((38.0, "5.0 % below"), (40.0, "as fast as")):
        lines = comparison_remarks(replace(found, results=(result("chrion", latency_ms, 2000.0), *others)))
        expected = f"chrion: predicted {words} heft, the fastest other policy; planned in 2.00 s (heft: 300 ms)"
        assert lines == [expected]
    assert comparison_remarks(replace(found, results=(result("chrion", 41.0, 2000.0), *others))) == []


def test_policies_without_a_plan_can_be_left_out() -> None:
    """Only policies with a plan are kept, unless none has one."""
    found = compared(branches(), "cpu", "accelerator")
    assert [result.policy for result in found.planned.results] == ["cpu"]
    failed = replace(found, results=found.results[1:])
    assert failed.planned == failed
