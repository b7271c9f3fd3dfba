"""The configuration of a session: its accelerator, and its number of lanes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import onnxruntime as ort
import pytest

from chrion.graph.opened_model import OpenedModel
from chrion.runtime.selection.configuration import SessionConfig
from seams.machine import pretend_cores

CPU, CUDA, WEBGPU = (f"{name}ExecutionProvider" for name in ("CPU", "CUDA", "WebGpu"))
CONFIG = SessionConfig(OpenedModel(b""))


@pytest.mark.parametrize(
    ("providers", "options", "accelerator", "left"),
    [
        (None, None, None, None),
        ([CPU], None, None, None),
        ([CUDA], None, (CUDA, {}), ([CPU], None)),
        ([CPU, (CUDA, {"device_id": 1}), WEBGPU], None, (CUDA, {"device_id": 1}), ([CPU, WEBGPU], None)),
        ([WEBGPU, CPU], [{"a": 1}, {}], (WEBGPU, {"a": 1}), ([CPU], [{}])),
        ([CUDA], [{"a": 1}], (CUDA, {"a": 1}), ([CPU], None)),
        ([CUDA, WEBGPU], [{"a": 1}, {"b": 2}], (CUDA, {"a": 1}), ([WEBGPU], [{"b": 2}])),
    ],
)
def test_the_first_provider_other_than_the_cpu_is_the_accelerator(
    providers: Any, options: Any, accelerator: Any, left: Any
) -> None:
    """Its options are beside it or in a list of their own; without it, the other providers are left, or the CPU's."""
    config = replace(CONFIG, providers=providers, provider_options=options)
    assert config.accelerator == accelerator
    if left:
        without = config.without_accelerator()
        assert (without.providers, without.provider_options) == left


def test_the_number_of_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given, or that of the threads in the options, as far as there are cores."""
    pretend_cores(monkeypatch, range(4))
    assert CONFIG.lanes is None
    options = ort.SessionOptions()
    for threads, cores, lanes in ((0, None, None), (3, None, 3), (9, None, 4), (3, 2, 2)):
        options.intra_op_num_threads = threads
        assert replace(CONFIG, options=options, cores=cores).lanes == lanes


def test_the_name_of_a_model() -> None:
    """It is that of the file, without its suffix."""
    assert CONFIG.name == "given as bytes"
    assert replace(CONFIG, model=OpenedModel("folder/model.onnx")).name == "model"
