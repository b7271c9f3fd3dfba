"""A fixed sample of ONNX's backend tests; ``scripts/conformance.py`` runs all of them."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from onnx_suite import FORMS, list_sample, prepare, run_test


@pytest.mark.parametrize("form", FORMS)
def test_a_cut_model_passes_the_tests_that_plain_onnxruntime_passes(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No test of the sample does worse with a forced split, and most models that can be cut are."""
    monkeypatch.setenv("ONNX_HOME", str(tmp_path))  # restored after the test
    monkeypatch.setenv("ALLOW_RELEASED_ONNX_OPSET_ONLY", "1")
    prepare(str(tmp_path))
    try:
        found = [run_test(name, form) for name in list_sample()]
    finally:
        gc.unfreeze()
    assert [v for v in found if v.wrong] == []
    passed = [v for v in found if v.plain == "passed"]
    assert len(passed) > 200
    assert sum(v.segments > 1 for v in passed) > (200 if form == "surrounded" else 50)
