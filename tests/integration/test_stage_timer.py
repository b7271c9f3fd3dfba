"""Measurement of stages."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from chrion import Graph, HybridSession, load, partition
from chrion.benchmark import stage_timer
from chrion.benchmark.stage_timer import StageTimer
from chrion.errors import OptionError
from chrion.scheduler.policies.ios_search import search_stages
from chrion.scheduler.policies.stages import DeviceLanes
from helpers import FLOAT, assert_same_as_plain, branches, make_model, node, value
from random_profiles import random_profile


def twin_branches(*, size: int = 8) -> Graph:
    """Return the sum of two equal branches of two operators, each with an input of its own."""
    nodes = [node("Relu", [x], [f"{x}r"], name=f"{x}r") for x in ("a", "b")]
    nodes += [node("Neg", [f"{x}r"], [f"{x}n"], name=f"{x}n") for x in ("a", "b")]
    nodes.append(node("Add", ["an", "bn"], ["y"], name="sum"))
    return load(make_model(nodes, [value(x, FLOAT, [size]) for x in "ab"], [value("y", FLOAT, [size])]))


def timer_of(graph: Graph, *, accelerator: bool = False) -> tuple[StageTimer, DeviceLanes]:
    device = DeviceLanes(graph.dag, random_profile([graph], accelerator=accelerator).costs(graph.dag))
    return StageTimer(graph, device), device


def test_equal_stages_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same operator of either branch is one stage; two operators in parallel are another."""
    graph = twin_branches()
    timer, _ = timer_of(graph)
    measured = []
    monkeypatch.setattr(StageTimer, "_measure", lambda _, parts: measured.append(len(parts)) or 1.0)
    index = {name: i for i, name in enumerate(graph.dag.names)}
    assert timer([(index["ar"],)]) == timer([(index["br"],)]) == 1.0
    assert timer([(index["ar"],), (index["br"],)]) == timer([(index["br"],), (index["ar"],)]) == 1.0
    assert measured == [1, 2]


def test_every_lane_runs_as_often_as_in_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two warm-up runs precede six times six; the result is the median of six means."""
    graph = twin_branches()
    timer, _ = timer_of(graph)
    clock = iter(float(at) for at in range(1000))
    monkeypatch.setattr(stage_timer.time, "perf_counter", lambda: next(clock))
    assert timer([(0,), (1,)]) == pytest.approx(1000.0)  # each run reads the clock of whole seconds twice
    assert next(clock) == 2 * (2 + 36)


@pytest.mark.parametrize("lane", [0, 1])
def test_a_stage_that_fails_has_its_predicted_latency(lane: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If either lane fails, the thread of the other one ends."""

    class Broken:
        def run_with_iobinding(self, _: Any) -> None:
            """Fail as onnxruntime does on values that an operator refuses."""
            raise RuntimeError("invalid values")

    graph = twin_branches()
    timer, device = timer_of(graph)
    real = timer._bind
    calls = iter(range(2))
    monkeypatch.setattr(timer, "_bind", lambda part: (Broken(), None) if next(calls) == lane else real(part))
    before = threading.active_count()
    assert timer([(0,), (1,)]) == device.stage_ms([(0,), (1,)])
    assert threading.active_count() == before


def test_stages_of_an_accelerator_are_refused() -> None:
    """Stages of an accelerator raise an error, since only those of CPU cores are measured."""
    with pytest.raises(OptionError, match="CPU cores only"):
        timer_of(twin_branches(), accelerator=True)


def test_a_plan_of_measured_stages_runs() -> None:
    """IOS with measured latencies makes a plan with the outputs of plain onnxruntime."""
    model = branches(size=16)
    graph = load(model)
    profile = random_profile([graph], accelerator=False)
    timer, _ = timer_of(graph)
    assert search_stages(graph.dag, timer)
    plan = partition(graph, profile, policy="ios", meter=StageTimer)
    with HybridSession(graph, plan=plan) as session:
        assert_same_as_plain(session, model, {"x": np.ones((2, 16), np.float32)})
    with pytest.raises(OptionError, match="policy nimble measures no stages"):
        partition(graph, profile, policy="nimble", meter=StageTimer)
