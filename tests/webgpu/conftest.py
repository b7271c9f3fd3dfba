"""A second device without a GPU: onnxruntime's WebGPU provider on a software Vulkan driver.

It wants an environment of its own, with onnxruntime-webgpu instead of onnxruntime, and the driver named in
VK_ICD_FILENAMES; ``.ci/run`` makes both. Elsewhere these tests are skipped.
"""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort
import pytest

from chrion.devices import Device
from chrion.devices.probe import failure_reason

PROVIDER = "WebGpuExecutionProvider"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.webgpu)


@pytest.fixture(scope="session", autouse=True)
def device() -> Device:
    """WebGPU's device; without one the tests are skipped."""
    if PROVIDER not in ort.get_available_providers():
        pytest.skip("webgpu: this environment's onnxruntime has no WebGPU")
    reason = failure_reason(PROVIDER)
    if reason:
        pytest.skip(f"webgpu: {reason}")
    return Device(PROVIDER)
