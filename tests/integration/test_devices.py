"""Names and probes of providers, and devices without memory of their own."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from chrion.devices import Device, provider_name, usable_provider
from chrion.devices.host import allocate, on_host, to_host, zeros
from chrion.devices.probe import ProbeResult, probe_provider
from chrion.devices.single_provider import find_foreign_nodes, open_on_one_provider
from chrion.devices.small_models import smallest_session
from chrion.errors import ProviderError
from chrion.graph.model import TensorInfo
from helpers import FLOAT, make_model, node, value
from seams.commands import offer_providers, replace_probes, set_driver

CPU = "CPUExecutionProvider"


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Return the providers that onnxruntime pretends to offer, each with its failure or None; tests add to it."""
    offers: dict[str, str | None] = {CPU: None}
    offer_providers(monkeypatch, offers)
    set_driver(monkeypatch, exists=True)
    return offers


def test_short_and_full_names_of_providers(offered: dict[str, str | None]) -> None:
    """Any provider that onnxruntime offers may be named; an unknown one is refused with a hint."""
    offered |= {"CUDAExecutionProvider": None, "MadeUpExecutionProvider": None}
    assert provider_name("cuda") == provider_name("CUDA") == "CUDAExecutionProvider"
    assert usable_provider("MadeUpExecutionProvider") == "MadeUpExecutionProvider"
    assert usable_provider("none") is None
    with pytest.raises(ProviderError, match="accelerator 'webgpu': this onnxruntime has no WebGpuExec") as caught:
        usable_provider("webgpu")
    assert "onnxruntime-webgpu" in caught.value.hint
    with pytest.raises(ProviderError, match=r"unknown accelerator 'banana' \(expected none, auto, cuda, .*webgpu"):
        usable_provider("banana")
    with pytest.raises(ProviderError, match="did you mean 'cuda'"):
        usable_provider("cudaa")


def test_missing_libraries_are_one_line_with_the_extra(offered: dict[str, str | None]) -> None:
    """The line has the missing library and the command that installs it."""
    offered["CUDAExecutionProvider"] = "libcublasLt.so.13: cannot open shared object file"
    with pytest.raises(ProviderError) as caught:
        usable_provider("cuda")
    message = str(caught.value)
    assert "libcublasLt.so.13" in message
    assert "pip install 'chrion[cuda]'" in message
    assert "\n" not in message


def test_the_first_working_provider_is_chosen(offered: dict[str, str | None]) -> None:
    """CUDA precedes WebGPU, a broken provider is skipped, and TensorRT and the CPU are never chosen."""
    assert usable_provider("auto") is None
    offered |= {"TensorrtExecutionProvider": None}
    assert usable_provider("auto") is None
    offered |= {"WebGpuExecutionProvider": None, "CUDAExecutionProvider": "no device"}
    assert usable_provider("auto") == "WebGpuExecutionProvider"
    offered["CUDAExecutionProvider"] = None
    assert usable_provider("auto") == "CUDAExecutionProvider"


def test_without_a_driver_there_is_no_probe(offered: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver CUDA is not probed, since a probe takes a second and GPU builds are common without a GPU."""
    offered["CUDAExecutionProvider"] = None
    set_driver(monkeypatch, exists=False)
    assert usable_provider("auto") is None
    assert usable_provider("cuda") == "CUDAExecutionProvider"  # an explicit choice is probed


def test_the_reason_is_one_line_of_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is chosen from all that a provider writes when it fails."""
    cases = {
        "load failed with error: libcudnn.so.9: cannot open\nmore\n": "libcudnn.so.9: cannot open",
        "a warning\nRuntimeError: no adapter\nwarning: left over\n": "RuntimeError: no adapter",
        "status == Success was false. Failed to get an adapter: none\n": "Failed to get an adapter: none",
        "only this\n": "only this",
        "": "the probe ended with exit code 3",
    }
    for errors, reason in cases.items():
        replace_probes(monkeypatch, 3, stderr=errors)
        assert probe_provider.__wrapped__("X") == ProbeResult(reason)


def test_the_memory_of_a_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe reports a provider's memory if NVML is available."""
    for output, memory_mb in {'{"memory_mb": 345.5}\n': 345.5, '{"memory_mb": null}\n': None, "noise": None}.items():
        replace_probes(monkeypatch, 0, stdout=output)
        assert probe_provider.__wrapped__("X") == ProbeResult(None, memory_mb)


def test_the_cpu_provider_uses_host_memory() -> None:
    """The CPU provider supports no buffers, keeps values in host memory, and its fence returns at once."""
    device = Device(CPU)
    info = TensorInfo("x", "tensor(float)", (2, 3))
    assert not device.supports("tensor(float)")
    with pytest.raises(TypeError, match="does not support"):
        device.allocate(info)
    held = device.to_device(info, np.ones((2, 3), np.float32))
    assert on_host(held)
    assert to_host(held) is held
    device.fence()
    assert not device.has_pinned_memory
    assert on_host(device.host_buffer(info))


@pytest.mark.parametrize("kind", ["float", "double", "float16", "int8", "uint64", "bool", "bfloat16"])
def test_host_memory_of_every_type(kind: str) -> None:
    """Onnxruntime allocates host memory with type and shape, and zeros are zero."""
    info = TensorInfo("x", f"tensor({kind})", (2, 3))
    made = allocate(info)
    assert (made.data_type(), tuple(made.shape())) == (f"tensor({kind})", (2, 3))
    if kind != "bfloat16":  # which numpy does not have
        assert not zeros(info).numpy().any()


def test_all_nodes_of_a_cpu_session_are_on_the_cpu() -> None:
    """The recorded assignment of a CPU session lists no other provider."""
    model = smallest_session_bytes()
    session = open_on_one_provider(model, ort.SessionOptions(), CPU, {})
    assert find_foreign_nodes(session, CPU) == {}
    assert set(find_foreign_nodes(session, "AnotherExecutionProvider").values()) == {CPU}


def smallest_session_bytes() -> bytes:
    """Return a model of one node."""
    assert smallest_session(CPU).get_providers() == [CPU]
    return make_model(
        [node("Relu", ["x"], ["y"])], [value("x", FLOAT, [1])], [value("y", FLOAT, [1])]
    ).SerializeToString()
