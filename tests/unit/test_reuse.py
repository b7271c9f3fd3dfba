"""Reuse of plans for other shapes."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import onnx
import pytest

from chrion import load, partition
from chrion.graph.model import Graph
from chrion.profiler.machine import this_machine
from chrion.profiler.profiles import OperatorCost, Profile
from chrion.scheduler.plan import Plan
from chrion.scheduler.reuse import adapt_plan, find_near_plan, is_near, is_near_optimal
from helpers import FLOAT, make_model, node, value

WIDTH, ROWS, BRANCHES = 8, 64, 4


def branching_model() -> onnx.ModelProto:
    """Build branches that read an input of free rows, and as many that read one of fixed rows."""
    nodes, weights, outputs = [], {}, []
    for name, rows in (("x", "rows"), ("z", ROWS)):
        for at in range(BRANCHES):
            weights[f"{name}{at}"] = np.full((WIDTH, WIDTH), at + 1.0, np.float32)
            nodes.append(node("MatMul", [name, f"{name}{at}"], [f"{name}p{at}"], name=f"{name}_{at}"))
            outputs.append(value(f"{name}p{at}", FLOAT, [rows, WIDTH]))
    return make_model(nodes, [value("x", FLOAT, ["rows", WIDTH]), value("z", FLOAT, [ROWS, WIDTH])], outputs, weights)


@functools.cache
def with_rows(rows: int) -> Graph:
    """Return the graph for a number of rows."""
    return load(branching_model(), {"x": (rows, WIDTH)})


def profile_of(*graphs: Graph) -> Profile:
    """Return a profile in which an operator takes 1 us for each row, and a handoff 2 us."""
    costs = {}
    for graph in graphs:
        for signature, op_type, size in zip(
            graph.dag.signatures, graph.dag.op_types, graph.dag.output_bytes, strict=True
        ):
            ms = size / (4 * WIDTH) * 1e-3
            costs[signature] = OperatorCost(op_type, (ms, ms))
    return Profile(this_machine(), 2, None, costs, handoff_ms=2e-3)


@functools.cache
def plan_for(rows: int) -> Plan:
    """Return a plan of its own for a number of rows."""
    graph = with_rows(rows)
    return partition(graph, profile_of(graph))


@pytest.mark.parametrize(("rows", "expected"), [(2, True), (3, True), (1000, False)])
def test_near_shapes_share_a_plan_and_far_ones_do_not(rows: int, expected: bool) -> None:  # noqa: FBT001
    """A plan for one row puts the branches of free rows anywhere; for a thousand rows they must be distributed."""
    graph = with_rows(rows)
    placed = [1 if "x_" in name else 1 + int(name[-1]) % 2 for name in graph.dag.names]
    plan = plan_for(1)
    plan = replace(
        plan, schedule=replace(plan.schedule, lanes=tuple(placed)), segments=tuple((i,) for i in plan.schedule.order)
    )
    adapted = adapt_plan(plan, graph, profile_of(graph))
    assert adapted is not None
    assert is_near(adapted, plan_for(rows)) == expected


def test_the_prediction_of_a_reused_plan_is_that_of_the_evaluator() -> None:
    """A plan adapted to its own shapes keeps its predictions, and fits the graph of the new ones."""
    graph = with_rows(8)
    own = plan_for(8)
    same = adapt_plan(own, graph, profile_of(graph))
    assert same is not None
    assert same.predicted.latency_ms == pytest.approx(own.predicted.latency_ms)
    assert same.lower_bound_ms == pytest.approx(own.lower_bound_ms)
    other = adapt_plan(plan_for(1), graph, profile_of(graph))
    assert other is not None
    assert other.apply(graph) is graph
    assert dict(other.shapes) == {"x": (8, WIDTH)}
    assert other.remarks[-1] == f"reuses the plan for x 1x{WIDTH}"


def test_a_plan_that_meets_its_lower_bound_needs_no_rival() -> None:
    """With equal rows, eight equal operators on two lanes are balanced: no plan can be faster."""
    graph = with_rows(ROWS)
    adapted = adapt_plan(plan_for(ROWS), graph, profile_of(graph))
    assert adapted is not None
    assert adapted.predicted.latency_ms == pytest.approx(BRANCHES * ROWS * 1e-3, rel=0.05)
    assert is_near_optimal(adapted)
    assert not is_near_optimal(replace(adapted, lower_bound_ms=adapted.lower_bound_ms / 2))


def test_the_best_of_several_plans_is_found() -> None:
    """Of a balanced plan and one on a single lane, the balanced one is chosen."""
    graph = with_rows(ROWS)
    balanced = plan_for(ROWS)
    single = replace(balanced, schedule=replace(balanced.schedule, lanes=(1,) * len(graph.dag)))
    found = find_near_plan([single, balanced], graph, profile_of(graph))
    assert found is not None
    assert found.schedule == balanced.schedule
    assert find_near_plan([], graph, profile_of(graph)) is None


def test_plans_of_other_operators_are_not_reused() -> None:
    """A plan whose operators have other names, or that uses more cores or an accelerator, does not fit."""
    graph = with_rows(8)
    own = plan_for(8)
    for changes in (
        {"operators": tuple(f"other_{name}" for name in own.operators)},
        {"schedule": replace(own.schedule, cores=3)},
        {"accelerator": "CUDAExecutionProvider"},
        {"merged": (("x_0", "x_1"),)},
    ):
        assert adapt_plan(replace(own, **changes), graph, profile_of(graph)) is None
