"""Tests of published scheduling policies on real models: their plans give the outputs of plain onnxruntime."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

from chrion import Graph, HybridSession, load, partition
from chrion.common.lane_numbers import lane_name
from chrion.errors import OptionError, PlanError
from chrion.profiler import OperatorCost, Profile
from chrion.report.lane_chart import chrome_trace, predicted_chart
from chrion.report.timeline_html import timeline_html
from chrion.scheduler import Plan
from chrion.scheduler.explain import explain_placement
from chrion.scheduler.policies.ios_merging import merged_variants
from helpers import FLOAT, MACHINE, assert_equal, branches, make_model, node, run_plain, value
from published_policies import check_light_model, check_plan, check_random_model
from random_profiles import random_profile


@pytest.mark.parametrize("accelerator", [False, True])
def test_random_models_give_onnxruntimes_outputs(*, accelerator: bool) -> None:
    """Every policy's plan of random models is correct on cores and on several accelerator lanes."""
    for seed in (0, 3):
        check_random_model(seed, accelerator=accelerator)


def test_a_real_architecture_gives_onnxruntimes_outputs() -> None:
    """Plans of SqueezeNet, with its branches and concatenations, are correct on two cores."""
    check_light_model("light_squeezenet")


def siblings() -> Graph:
    """Return the sum of three products of one input, each with an activation."""
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.standard_normal((8, 4 + 4 * (i > 1))).astype(np.float32) for i in range(3)}
    weights["back"] = rng.standard_normal((8, 4)).astype(np.float32)
    nodes = [node("MatMul", ["x", f"w{i}"], [f"p{i}"], name=f"product{i}") for i in range(3)]
    nodes += [node(kind, [f"p{i}"], [f"a{i}"], name=kind) for i, kind in enumerate(("Relu", "Tanh", "Neg"))]
    nodes += [node("MatMul", ["a2", "back"], ["b"], name="back"), node("Sum", ["a0", "a1", "b"], ["y"], name="sum")]
    return load(make_model(nodes, [value("x", FLOAT, [2, 8])], [value("y", FLOAT, [2, 4])], weights))


def merged_profile(graph: Graph, ms: float) -> Profile:
    """Return a profile that includes the merged operators, with the given time for each."""
    profile = random_profile([graph, *merged_variants(graph)], accelerator=False)
    own = set(graph.dag.signatures)
    fast = {s: OperatorCost("Op", (ms, ms)) for s in profile.operators if s not in own}
    return Profile(MACHINE, 2, None, {**profile.operators, **fast}, handoff_ms=0.01, dispatch_ms=0.01)


def test_siblings_are_merged_if_that_is_faster() -> None:
    """The plan names the merged operators, does not change when written and read, and gives equal outputs."""
    graph = siblings()
    profile = merged_profile(graph, 0.001)
    plan = partition(graph, profile, policy="ios")
    assert [set(group) for group in plan.merged] == [{"product0", "product1", "product2"}]
    assert plan.operator_counts.endswith(f"({len(graph.dag)} in the model; 3 merged into 1)")
    assert plan.predicted.latency_ms < partition(graph, merged_profile(graph, 9.0), policy="ios").predicted.latency_ms
    check_plan(graph, profile, plan)
    feed = {"x": np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)}
    with HybridSession(graph, plan=Plan.from_json(plan.to_json())) as session:
        assert session.plan is not None
        assert_equal(session.run(None, feed), run_plain(onnx.load_from_string(bytes(graph.source.source)), feed))


def test_siblings_are_not_merged_if_that_is_slower() -> None:
    """The plan merges no operators."""
    graph = siblings()
    assert partition(graph, merged_profile(graph, 9.0), policy="ios").merged == ()


def test_a_plan_with_merged_operators_is_refused_for_another_model() -> None:
    """The error names the operators that the other model lacks."""
    graph = siblings()
    plan = partition(graph, merged_profile(graph, 0.001), policy="ios")
    other = load(branches())
    with pytest.raises(PlanError, match=r"cannot rewrite operators: .product"):
        plan.apply(other)


def test_zero_streams_are_refused() -> None:
    """A number of streams below one is refused."""
    graph = siblings()
    with pytest.raises(OptionError, match="streams: expected 1 or more, found 0"):
        partition(graph, random_profile([graph], accelerator=True), policy="nimble", streams=0)


def test_plans_keep_the_number_of_streams() -> None:
    """Three branches use at most the given number of accelerator lanes, and at most three."""
    graph = siblings()
    profile = random_profile([graph], accelerator=True)
    for policy in ("nimble", "greedy", "wavefront"):
        assert partition(graph, profile, policy=policy, streams=2).schedule.streams == 2
        assert partition(graph, profile, policy=policy, streams=8).schedule.streams == 3


def test_reports_show_every_lane_of_the_accelerator() -> None:
    """The timeline, the trace and the reasons of a placement name every lane."""
    graph = siblings()
    profile = random_profile([graph], accelerator=True)
    plan = partition(graph, profile, policy="greedy", streams=3)
    lanes = predicted_chart(plan)
    names = [f"gpu{at}" for at in range(3)]
    threads = [
        e["args"]["name"] for e in json.loads(chrome_trace([lanes]))["traceEvents"] if e["name"] == "thread_name"
    ]
    assert threads == names
    assert all(f">{name}<" in timeline_html(plan, [lanes]) for name in names)
    reasons = explain_placement(graph, profile, plan, "product0")
    own = lane_name(plan.schedule.lanes[graph.dag.names.index("product0")])
    assert f"is on {own}:" in reasons[0]
    assert sum(reason.startswith("with its group moved to gpu") for reason in reasons) == 2
    with HybridSession(graph, plan=plan) as session:
        assert all(f"{name} (CPUExecutionProvider)" in session.explain() for name in names)
