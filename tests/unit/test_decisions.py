"""The cache of decisions, on a fake clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from chrion.runtime.selection import decisions
from chrion.runtime.selection.decisions import Decision, DecisionCache, model_files, model_identity


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """The time in seconds, with an empty cache."""
    now = [1e9]
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(decisions.time, "time", lambda: now[0])
    return now


def test_a_certain_decision_stays_valid(clock: list[float]) -> None:
    """For years."""
    cache = DecisionCache("model")
    cache.keep(Decision("plain", None, "fastest"))
    clock[0] += 1e8
    assert cache.recall() == Decision("plain", None, "fastest")


def test_an_uncertain_decision_is_valid_for_a_limited_time(clock: list[float]) -> None:
    """A minute at first, and four times as long after each further uncertain one: at most 11 in a year."""
    cache = DecisionCache("model")
    for attempt in range(4):
        cache.keep(Decision("plain", None, "by chance", uncertain=True))
        clock[0] += 60 * 4**attempt - 1
        assert cache.recall() is not None
        clock[0] += 2
        assert cache.recall() is None
    cache.keep(Decision("plain", None, "certain"))
    cache.keep(Decision("plain", None, "by chance", uncertain=True))
    clock[0] += 61
    assert cache.recall() is None


def test_a_decision_from_the_future_is_not_used(clock: list[float]) -> None:
    """A clock that was set back would keep it valid for too long."""
    cache = DecisionCache("model")
    cache.keep(Decision("plain", None, "by chance", uncertain=True))
    clock[0] -= 1e6
    assert cache.recall() is None


@pytest.mark.usefixtures("clock")
def test_a_decision_depends_on_the_models_files(tmp_path: Path) -> None:
    """On the model and on the files of its external weights."""
    model, weights = tmp_path / "model.onnx", tmp_path / "weights.bin"
    model.write_bytes(b"model")
    weights.write_bytes(b"weights")
    files = model_files(str(model), ["weights.bin", "weights.bin", "missing.bin"])
    assert [Path(path).name for path, _, _ in files] == ["model.onnx", "weights.bin"]
    cache = DecisionCache("model")
    cache.keep(Decision("plain", None, "", files))
    assert cache.recall() is not None
    weights.write_bytes(b"other weights")
    assert cache.recall() is None


def test_the_identity_of_a_model_is_its_content_or_its_files_state(tmp_path: Path) -> None:
    """Bytes are identified by what they are; a file by where, how large and how old it is."""
    assert model_identity(b"a") == model_identity(b"a") != model_identity(b"b")
    path = tmp_path / "model.onnx"
    path.write_bytes(b"a")
    before = model_identity(str(path))
    assert before == model_identity(str(path))
    path.write_bytes(b"bc")
    assert model_identity(str(path)) != before
