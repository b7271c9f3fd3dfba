"""Measurement of stages."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from chrion import Graph, HybridSession, load, partition
from chrion.errors import OptionError
from chrion.report.benchmark import stage_timer
from chrion.report.benchmark.stage_timer import StageTimer
from chrion.scheduler.policies.ios_search import search_stages
from chrion.scheduler.policies.stages import DeviceLanes
from helpers import FLOAT, assert_same_as_plain, branches, make_model, node, value
from random_profiles import random_profile
from seams.commands import replace_clock


def twin_branches(*, size: int = 8) -> Graph:
    """Return the sum of two equal branches of two operators, each with an input of its own."""
    nodes = [node("Relu", [x], [f"{x}r"], name=f"{x}r") for x in ("a", "b")]
    nodes += [node("Neg", [f"{x}r"], [f"{x}n"], name=f"{x}n") for x in ("a", "b")]
    nodes.append(node("Add", ["an", "bn"], ["y"], name="sum"))
    return load(make_model(nodes, [value(x, FLOAT, [size]) for x in "ab"], [value("y", FLOAT, [size])]))


def timer_of(graph: Graph, *, accelerator: bool = False) -> tuple[StageTimer, DeviceLanes]:
    device = DeviceLanes(graph.dag, random_profile([graph], accelerator=accelerator).costs(graph.dag))
    return StageTimer(graph, device), device


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """Return the readings of the clock of measurements, which shows the next whole second each time."""
    readings = itertools.count(0.0)
    replace_clock(monkeypatch, stage_timer, SimpleNamespace(perf_counter=lambda: next(readings)))
    return readings


def test_equal_stages_are_measured_once(seconds: Iterator[float]) -> None:
    """The same operator of either branch is one stage; two operators in parallel are another.

    Two warm-up runs precede six times six, as in the paper; the result is the median of six means.
    """
    graph = twin_branches()
    timer, _ = timer_of(graph)
    index = {name: i for i, name in enumerate(graph.dag.names)}
    for stages in (("ar",), ("br",)), (("ar", "br"), ("br", "ar")):
        for names in stages:
            assert timer([(index[name],) for name in names]) == pytest.approx(1000.0)
    assert next(seconds) == 2 * (2 + 36) * 2  # each run of the two stages reads the clock twice


@pytest.mark.parametrize("lane", [0, 1])
def test_a_stage_that_fails_has_its_predicted_latency(lane: int) -> None:
    """If either lane fails, the thread of the other one ends."""
    nodes = [node("Gather", ["a", "far"], ["b"], name="fails"), node("Relu", ["a"], ["c"], name="works")]
    nodes.append(node("Add", ["b", "c"], ["y"]))
    far = {"far": np.full(8, 9, np.int64)}
    graph = load(make_model(nodes, [value("a", FLOAT, [8])], [value("y", FLOAT, [8])], far))
    timer, device = timer_of(graph)
    fails, works = (graph.dag.names.index(name) for name in ("fails", "works"))
    stage = [(fails,), (works,)] if lane == 0 else [(works,), (fails,)]
    before = threading.active_count()
    assert timer(stage) == device.stage_ms(stage)
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
