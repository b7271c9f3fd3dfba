"""The server with two memories: models on a second device shrink to the host before they are evicted from it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from model_repository import product, put
from server_process import serving

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("uvicorn") is None, reason="uvicorn: pip install 'chrion[serve]'"
)


def test_models_leave_the_device_before_they_are_evicted(tmp_path: Path) -> None:
    """On a device for two of four models all are served, with equal answers, and none is evicted from the host."""
    for number in range(4):
        put(tmp_path, f"m{number}", product(512, number))
    x = np.random.default_rng(0).standard_normal((2, 512), np.float32)
    with serving(tmp_path, "--gpu-budget", "2.5MB", "--accelerator", "webgpu", "--host-budget", "100MB") as server:
        for number in (0, 1, 2, 3, 2, 1, 0):
            status, found, _ = server.infer(f"m{number}", x)
            assert status == 200, found
            session = ort.InferenceSession(
                tmp_path / f"m{number}" / "1" / "model.onnx", providers=["CPUExecutionProvider"]
            )
            (expected,) = session.run(None, {"x": x})
            assert np.allclose(np.array(found["outputs"][0]["data"]).reshape(2, 512), expected, rtol=1e-3, atol=1e-4)
            assert server.metric("chrion_memory_used_bytes", device="accelerator") <= 2.5e6
        assert server.metric("chrion_model_shrinks_total") >= 2
        assert server.metric("chrion_model_evictions_total") == 0
