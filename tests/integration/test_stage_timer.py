"""Measuring stages."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from test_field import made_up_profile

from chrion import Graph, HybridSession, load, partition
from chrion.benchmark import stage_timer as stage_bench
from chrion.benchmark.stage_timer import StageTimer
from chrion.errors import OptionError
from chrion.scheduler.policies.ios_search import search_stages
from chrion.scheduler.policies.stages import DeviceLanes
from helpers import FLOAT, assert_same_as_plain, branches, make_model, node, value


def twins(*, size: int = 8) -> Graph:
    """Two equal branches of two operators, on inputs of their own, and their sum."""
    nodes = [node("Relu", [x], [f"{x}r"], name=f"{x}r") for x in ("a", "b")]
    nodes += [node("Neg", [f"{x}r"], [f"{x}n"], name=f"{x}n") for x in ("a", "b")]
    nodes.append(node("Add", ["an", "bn"], ["y"], name="sum"))
    return load(make_model(nodes, [value(x, FLOAT, [size]) for x in "ab"], [value("y", FLOAT, [size])]))


def bench_of(graph: Graph, *, accelerator: bool = False) -> tuple[StageTimer, DeviceLanes]:
    device = DeviceLanes(graph.dag, made_up_profile([graph], accelerator=accelerator).costs(graph.dag))
    return StageTimer(graph, device), device


def test_equal_stages_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same operators of the twin branches are one stage; alone and side by side are two."""
    graph = twins()
    bench, _ = bench_of(graph)
    measured = []
    monkeypatch.setattr(StageTimer, "_measure", lambda _, parts: measured.append(len(parts)) or 1.0)
    index = {name: i for i, name in enumerate(graph.dag.names)}
    assert bench([(index["ar"],)]) == bench([(index["br"],)]) == 1.0
    assert bench([(index["ar"],), (index["br"],)]) == bench([(index["br"],), (index["ar"],)]) == 1.0
    assert measured == [1, 2]


def test_every_part_runs_as_often_as_in_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two and six times six runs on each of two lanes, of which the median of six means counts."""
    graph = twins()
    bench, _ = bench_of(graph)
    clock = iter(float(at) for at in range(1000))
    monkeypatch.setattr(stage_bench.time, "perf_counter", lambda: next(clock))
    assert bench([(0,), (1,)]) == pytest.approx(1000.0)  # each round looks twice at a clock of whole seconds
    assert next(clock) == 2 * (2 + 36)


@pytest.mark.parametrize("lane", [0, 1])
def test_a_stage_that_fails_costs_what_is_predicted(lane: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of its lanes fails; the other neither hangs nor is left behind."""

    class Broken:
        def run_with_iobinding(self, _: Any) -> None:
            """As onnxruntime fails on values that make no sense to an operator."""
            raise RuntimeError("made up values")

    graph = twins()
    bench, device = bench_of(graph)
    real = bench._bind
    calls = iter(range(2))
    monkeypatch.setattr(bench, "_bind", lambda part: (Broken(), None) if next(calls) == lane else real(part))
    before = threading.active_count()
    assert bench([(0,), (1,)]) == device.stage_ms([(0,), (1,)])
    assert threading.active_count() == before


def test_an_accelerators_stages_are_refused() -> None:
    """Cores only."""
    with pytest.raises(OptionError, match="CPU cores only"):
        bench_of(twins(), accelerator=True)


def test_a_plan_of_measured_stages_runs() -> None:
    """IOS with measured latencies gives a plan whose results are onnxruntime's."""
    model = branches(size=16)
    graph = load(model)
    profile = made_up_profile([graph], accelerator=False)
    bench, _ = bench_of(graph)
    assert search_stages(graph.dag, bench)
    plan = partition(graph, profile, policy="ios", meter=StageTimer)
    with HybridSession(graph, plan=plan) as session:
        assert_same_as_plain(session, model, {"x": np.ones((2, 16), np.float32)})
    with pytest.raises(OptionError, match="no stages to measure"):
        partition(graph, profile, policy="nimble", meter=StageTimer)
