"""The configuration of a session without its accelerator."""

from __future__ import annotations

from typing import Any

import pytest

from chrion.runtime.selection.selector import SessionConfig

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"


@pytest.mark.parametrize(
    ("providers", "options", "left", "left_options"),
    [
        ([CUDA, CPU], None, [CPU], None),
        ([CUDA], None, [CPU], None),
        ([CPU, CUDA], [{}, {"device_id": 1}], [CPU], [{}]),
        ([TENSORRT, (CUDA, {"device_id": 1}), CPU], None, [(CUDA, {"device_id": 1}), CPU], None),
        ([TENSORRT, CUDA], [{"a": 1}, {"b": 2}], [CUDA], [{"b": 2}]),
    ],
)
def test_the_first_accelerator_is_dropped_with_its_options(
    providers: list[Any], options: list[dict[str, Any]] | None, left: list[Any], left_options: Any
) -> None:
    """All other providers remain in their order, or the CPU alone if there is no other."""
    config = SessionConfig("", None, providers, options, None, None, None, None)
    reduced = config.without_accelerator()
    assert reduced.providers == left
    assert reduced.provider_options == left_options
