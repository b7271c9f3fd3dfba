"""Tests of every configuration key of onnxruntime on a cut session: honoured, run plain, or without effect."""

from __future__ import annotations

import re
from pathlib import Path

import onnxruntime as ort
import pytest

from chrion.runtime.options.table import RUN_KEYS, SESSION_KEYS
from option_cases import check_harmless_values, check_key


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to an empty folder, in which files that a session writes appear."""
    monkeypatch.chdir(tmp_path)


def test_every_key_in_the_library_is_in_the_table() -> None:
    """All configuration keys in the texts of the installed library are in the table."""
    capi = Path(ort.__file__).parent / "capi"
    (library,) = [*capi.glob("onnxruntime_pybind11_state*.so"), *capi.glob("onnxruntime_pybind11_state*.pyd")]
    areas = b"session|optimization|ep|mlas|memory|qnn"
    found = re.findall(rb"\0((?:%s)\.[a-z][a-zA-Z0-9_.]+[a-zA-Z0-9])(?=\0)" % areas, library.read_bytes())
    assert len(found) > 50
    assert {key.decode() for key in found} - set(SESSION_KEYS) - set(RUN_KEYS) == set()


@pytest.mark.parametrize("key", SESSION_KEYS)
def test_a_session_key_is_treated_as_the_table_says(key: str) -> None:
    """The session is cut or plain as the table says, with equal outputs."""
    check_key(key)


@pytest.mark.parametrize("key", [key for key, option in SESSION_KEYS.items() if option.harmless])
def test_harmless_values_leave_the_model_cut(key: str) -> None:
    """The session is cut with the values that the table lists as harmless."""
    check_harmless_values(key)
