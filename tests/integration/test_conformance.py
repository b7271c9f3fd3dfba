"""A fixed sample of ONNX's own backend tests; ``scripts/conformance.py`` runs all of them."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from onnx_suite import FORMS, judge, prepare, sample


@pytest.mark.parametrize("form", FORMS)
def test_what_plain_onnxruntime_passes_passes_cut_into_pieces(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No test of the sample does worse with a forced split, and most of those that could be cut were."""
    monkeypatch.setenv("ONNX_HOME", str(tmp_path))  # put back afterwards
    monkeypatch.setenv("ALLOW_RELEASED_ONNX_OPSET_ONLY", "1")
    prepare(str(tmp_path))
    try:
        found = [judge(name, form) for name in sample()]
    finally:
        gc.unfreeze()
    assert [v for v in found if v.wrong] == []
    passed = [v for v in found if v.plain == "passed"]
    assert len(passed) > 200
    assert sum(v.segments > 1 for v in passed) > (200 if form == "surrounded" else 50)
