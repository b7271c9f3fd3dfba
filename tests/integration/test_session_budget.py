"""HybridSession with a memory budget: the candidates that fit, and plain sessions."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chrion import HybridSession, load
from chrion.common.units import format_count
from chrion.errors import OptionError
from chrion.graph.opened_model import OpenedModel
from chrion.machine.cores import physical_cores
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import TimedCandidate
from chrion.runtime.selection.guard import Candidate, Comparison
from chrion.runtime.selection.selector import EngineSelector
from chrion.scheduler import Prediction, fixed_plan
from chrion.scheduler.priced_memory import Memory
from helpers import alternating_lanes, assert_same_as_plain, branches
from seams.sessions import decide_by, replace_step
from tuning_support import alternate, invented_profile

#: An accelerator that onnxruntime does not offer, so that it is not tried.
ACCELERATOR = "NoSuchExecutionProvider"


def config(budget_mb: float | None) -> SessionConfig:
    """Return the configuration of a session on an accelerator."""
    model = OpenedModel(branches().SerializeToString())
    return SessionConfig(model, providers=[ACCELERATOR, "CPUExecutionProvider"], budget_mb=budget_mb)


def timed_candidates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, budget_mb: float | None, memory: Memory = "resident"
) -> dict[str, float]:
    """Return the candidates that the guard times, with their priced memory in MB; a plan of one segment is none.

    In resident memory, the plain session takes 800 MB and the plan 300; by Equation 4, 100 MB more.
    """
    graph = load(branches())
    plan = replace(
        fixed_plan(graph, alternating_lanes(graph)),
        predicted=Prediction(1.0, 400.0, 300.0),
        accelerator_only=Prediction(1.0, 900.0, 800.0),
        memory=memory,
    )
    timed: dict[str, float] = {}

    def compare(candidates: list[Candidate], *_: Any) -> Comparison:
        timed.update({c.name: c.memory_mb for c in candidates})
        return Comparison(candidates[0].name, ())

    monkeypatch.setenv("CHRION_CACHE", str(tmp_path))
    replace_step(monkeypatch, "profile", invented_profile)
    whole = replace(plan, segments=(tuple(range(len(graph.dag))),))
    replace_step(monkeypatch, "plan", lambda *_, **__: [whole, plan])
    replace_step(monkeypatch, "compare", compare)
    EngineSelector(config(budget_mb)).decide(graph)
    return timed


@pytest.mark.parametrize(
    ("budget_mb", "plain", "plan"),
    [(None, True, True), (900.0, True, True), (500.0, False, True), (100.0, False, False)],
)
def test_only_candidates_that_fit_are_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, budget_mb: float | None, *, plain: bool, plan: bool
) -> None:
    """Candidates that exceed the budget are not timed; plain sessions on the CPU always fit."""
    timed = timed_candidates(monkeypatch, tmp_path, budget_mb)
    assert ("plain" in timed) == plain
    assert ("plan 1" in timed) == plan
    assert any(name.startswith("plain, ") for name in timed)


@pytest.mark.parametrize(("memory", "plain_mb", "plan_mb"), [("resident", 800.0, 300.0), ("paper", 900.0, 400.0)])
def test_candidates_are_compared_by_the_memory_that_alpha_prices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memory: Memory, plain_mb: float, plan_mb: float
) -> None:
    """An SLO leaves the least of that memory; the budget limits resident memory in either case."""
    timed = timed_candidates(monkeypatch, tmp_path, 850.0, memory)
    assert (timed["plain"], timed["plan 1"]) == (plain_mb, plan_mb)
    assert config(None).decision_key != replace(config(None), memory=memory).decision_key


def test_a_decision_has_the_results_of_its_comparison(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has the plan of the winner, and the latencies of the candidates that were timed."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path))
    graph, plan = load(branches()), alternate(load(branches())).plan
    replace_step(monkeypatch, "profile", invented_profile)
    replace_step(monkeypatch, "plan", lambda *_, **__: [plan])
    results = (
        TimedCandidate("plain", plain=True, latency_ms=0.5, rounds=3),
        TimedCandidate("plain, threads: 1", plain=True, latency_ms=math.inf, rounds=0, failure="failed"),
        TimedCandidate("plan 1", plain=False, latency_ms=0.25, rounds=3),
    )
    replace_step(monkeypatch, "compare", lambda *_: Comparison("plan 1", results, interference=True))
    decision = EngineSelector(replace(config(None), providers=None, slo_ms=0.125)).decide(graph)
    assert (decision.winner, decision.plan, decision.uncertain) == ("plan 1", plan, True)
    assert decision.missed == "no candidate meets the SLO of 125 us: the fastest takes 250 us"
    plain = f"plain, {format_count(len(physical_cores()), 'thread')}"
    assert decision.why.startswith(f"fastest when timed ({plain}: 500 us; plan 1: 250 us; 3 rounds)")
    assert decision.timings == (
        TimedCandidate("plain", plain=True, latency_ms=0.5, rounds=3),
        TimedCandidate("plan 1", plain=False, latency_ms=0.25, rounds=3),
    )


def test_a_plain_session_that_replaces_a_plan_runs_on_the_cpu() -> None:
    """The session runs on the CPU, since its accelerator memory would be unknown."""
    assert config(500.0).plain("no plan").session.get_providers() == ["CPUExecutionProvider"]


def test_decisions_of_different_budgets_are_cached_separately() -> None:
    """The budget is part of the cache's key."""
    goals = [config(mb).decision_key for mb in (None, 500.0, 600.0)]
    assert len(set(goals)) == 3


def test_a_session_with_a_budget_computes_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without an accelerator every candidate fits, and outputs are those of plain onnxruntime."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path))
    decide_by(monkeypatch, alternate)
    model = branches()
    with HybridSession(model, gpu_budget="600MB") as session:
        assert_same_as_plain(session, model, {"x": np.ones((2, 4), np.float32)})


def test_a_budget_that_is_no_size_is_refused() -> None:
    """The session raises an OptionError."""
    with pytest.raises(OptionError, match="gpu_budget"):
        HybridSession(branches(), gpu_budget="600 apples")
