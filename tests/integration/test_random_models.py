"""Random models give what plain onnxruntime gives, however they are cut; ``scripts/soak.py`` goes on for longer."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chrion.scheduler import POLICIES
from differential_testing import MismatchError, Tally, examine
from output_comparison import difference

LONG = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])


@LONG
@given(pick=st.randoms(use_true_random=False), size=st.integers(1, 14))
def test_any_placement_of_any_model_is_right(pick: Random, size: int) -> None:
    """Every output equals plain onnxruntime's, for one shape after another, however operators are spread over lanes."""
    examine(pick, size)


@settings(LONG, max_examples=8)
@given(pick=st.randoms(use_true_random=False), size=st.integers(1, 8))
def test_every_planner_makes_valid_plans_of_any_model(pick: Random, size: int) -> None:
    """Plans keep the rules of schedules, survive their files, and give what plain onnxruntime gives."""
    examine(pick, size, policies=tuple(POLICIES))


def test_models_are_various_and_mostly_accepted() -> None:
    """The generator makes what onnxruntime takes and what can be cut."""
    total = Tally()
    for seed in range(25):
        total += examine(Random(seed), 1 + seed % 12)
    assert total.refused <= 1
    assert total.failed < total.runs / 20
    assert total.unsettled < total.runs / 20
    assert total.cut > total.runs / 2
    assert total.segments > 3 * total.cut


def test_a_wrong_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail."""
    right = [np.array([1.0, 2.0], np.float32), np.array([1, 2])]
    assert not difference(right, right)
    assert difference([right[0] * np.float32(1.001), right[1]], right)
    assert difference([right[0], right[1] + 1], right)
    assert difference(right[:1], right)
    monkeypatch.setattr("chrion.runtime.session.HybridSession.run", lambda *_: [])
    with pytest.raises(MismatchError, match="0 outputs, not"):
        examine(Random(1), 6)
