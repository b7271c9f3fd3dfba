"""Fixtures of the tests on a second device: onnxruntime's WebGPU provider with a software Vulkan driver.

The tests need an environment with onnxruntime-webgpu in place of onnxruntime, and the driver named in
``VK_ICD_FILENAMES``; ``.ci/run`` creates both. In other environments they are skipped.
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
    """Return the WebGPU device; skip the test if there is none."""
    if PROVIDER not in ort.get_available_providers():
        pytest.skip("webgpu: onnxruntime of this environment lacks the provider")
    reason = failure_reason(PROVIDER)
    if reason:
        pytest.skip(f"webgpu: {reason}")
    return Device(PROVIDER)
