"""HybridSession within a memory budget: what may be chosen, and what a plain session may be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from chrion import HybridSession, Plan, load
from chrion.errors import OptionError
from chrion.runtime.selection import selector as choosing
from chrion.runtime.selection.guard import Candidate, Comparison
from chrion.runtime.selection.selector import EngineSelector, SessionConfig
from chrion.scheduler import Prediction, fixed_plan
from helpers import alternating_lanes, assert_same_as_plain, branches

ACCELERATOR = "CUDAExecutionProvider"


def config(budget_mb: float | None) -> SessionConfig:
    """A caller who names an accelerator."""
    source = branches().SerializeToString()
    return SessionConfig(
        source, None, [ACCELERATOR, "CPUExecutionProvider"], None, None, None, None, None, budget_mb=budget_mb
    )


def decided(monkeypatch: pytest.MonkeyPatch, budget_mb: float | None) -> list[str]:
    """Names of those that the guard would time: the plain session takes 800 MB, the plan 300."""
    graph = load(branches())
    plan = replace(
        fixed_plan(graph, alternating_lanes(graph)),
        predicted=Prediction(1.0, 400.0, 300.0),
        accelerator_only=Prediction(1.0, 900.0, 800.0),
    )
    timed: list[str] = []

    def made(*_: Any) -> list[Plan]:
        return [plan]

    def compare(candidates: list[Candidate], *_: Any) -> Comparison:
        timed.extend(c.name for c in candidates)
        return Comparison(candidates[0].name, ())

    monkeypatch.setattr(EngineSelector, "_plans", made)
    monkeypatch.setattr(choosing, "compare", compare)
    selector = EngineSelector(config(budget_mb))
    selector._compare(graph)
    return timed


@pytest.mark.parametrize(
    ("budget_mb", "plain", "plan"),
    [(None, True, True), (900.0, True, True), (500.0, False, True), (100.0, False, False)],
)
def test_only_what_fits_is_timed(
    monkeypatch: pytest.MonkeyPatch, budget_mb: float | None, *, plain: bool, plan: bool
) -> None:
    """Plain sessions on the CPU always do."""
    timed = decided(monkeypatch, budget_mb)
    assert ("plain" in timed) == plain
    assert ("plan 1" in timed) == plan
    assert any(name.startswith("plain, ") for name in timed)


def test_a_plain_session_in_place_of_a_plan_takes_nothing_of_a_budget() -> None:
    """Nobody knows what it would hold: it runs on the CPU."""
    assert config(500.0).plain("no plan").session.get_providers() == ["CPUExecutionProvider"]


def test_decisions_of_different_budgets_are_remembered_apart() -> None:
    """The budget is part of the goal."""
    goals = [config(mb).goal for mb in (None, 500.0, 600.0)]
    assert len(set(goals)) == 3


def test_a_session_within_a_budget_computes_the_same() -> None:
    """With no accelerator there is nothing to exceed."""
    model = branches()
    with HybridSession(model, gpu_budget="600MB") as session:
        assert_same_as_plain(session, model, {"x": np.ones((2, 4), np.float32)})


def test_what_is_no_budget_is_refused() -> None:
    """Before anything is measured."""
    with pytest.raises(OptionError, match="gpu budget"):
        HybridSession(branches(), gpu_budget="600 apples")
