"""Differential tests of random models; ``scripts/soak.py`` runs many more."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from chrion import HybridSession
from chrion.scheduler import POLICIES
from differential_testing import Counts, MismatchError, compare_random_model
from output_comparison import difference
from property_tests import examples

pytestmark = pytest.mark.usefixtures("short_planning")
SLOW = {"suppress_health_check": [HealthCheck.too_slow]}


@examples(25, **SLOW)
@given(pick=st.randoms(use_true_random=False), size=st.integers(1, 14))
def test_any_placement_of_any_model_gives_correct_outputs(pick: Random, size: int) -> None:
    """Outputs equal plain onnxruntime's for several shapes, however the operators are placed on lanes."""
    compare_random_model(pick, size)


@examples(15, **SLOW)
@given(pick=st.randoms(use_true_random=False), size=st.integers(1, 14))
def test_any_widths_on_any_model_give_correct_outputs(pick: Random, size: int) -> None:
    """Outputs equal plain onnxruntime's, however operators are placed on one core or on both."""
    compare_random_model(pick, size, wide=1.0)


@examples(24, **SLOW)
@given(pick=st.randoms(use_true_random=False), size=st.integers(1, 8), first=st.integers(0, 2))
def test_every_scheduler_makes_valid_plans_of_any_model(pick: Random, size: int, first: int) -> None:
    """Plans are valid, do not change when written and read, and give plain onnxruntime's outputs."""
    compare_random_model(pick, size, policies=tuple(POLICIES)[first::3])


def test_most_random_models_are_accepted_and_cut() -> None:
    """Onnxruntime accepts most models of the generator, and most of their runs are cut."""
    total = Counts()
    for seed in range(9):
        total += compare_random_model(Random(seed), 2 + seed)
    assert total.refused == 0
    assert total.failed < total.runs / 20
    assert total.unsettled < total.runs / 20
    assert total.cut > total.runs / 2
    assert total.segments > 3 * total.cut


def test_a_wrong_output_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails for wrong values and missing outputs."""
    correct = [np.array([1.0, 2.0], np.float32), np.array([1, 2])]
    assert not difference(correct, correct)
    assert difference([correct[0] * np.float32(1.001), correct[1]], correct)
    assert difference([correct[0], correct[1] + 1], correct)
    assert difference(correct[:1], correct)
    monkeypatch.setattr(HybridSession, "run", lambda *_: [])
    with pytest.raises(MismatchError, match="0 outputs, not"):
        compare_random_model(Random(1), 6)
