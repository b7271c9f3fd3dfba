"""Names and probes of providers, and devices without memory of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from chrion.devices import Device, probe, provider_name, providers, usable_provider
from chrion.devices.host import allocate, on_host, to_host, zeros
from chrion.devices.probe import ProbeResult, probe_provider, smallest_session
from chrion.devices.single_provider import find_foreign_nodes, open_on_one_provider
from chrion.errors import ProviderError
from chrion.graph.model import TensorInfo
from helpers import FLOAT, make_model, node, value

CPU = "CPUExecutionProvider"


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Return the providers that onnxruntime pretends to offer, each with its failure or None; tests add to it."""
    offers: dict[str, str | None] = {CPU: None}
    monkeypatch.setattr(ort, "get_available_providers", lambda: list(offers))
    monkeypatch.setattr(providers, "failure_reason", lambda name: offers[name])
    monkeypatch.setattr(providers, "load_libraries", lambda _: None)
    monkeypatch.setattr(Path, "exists", lambda path: path.name == "nvidiactl")
    return offers


def test_short_and_full_names_of_providers(offered: dict[str, str | None]) -> None:
    """Any provider that onnxruntime offers may be named; an unknown one is refused with a hint."""
    offered |= {"CUDAExecutionProvider": None, "MadeUpExecutionProvider": None}
    assert provider_name("cuda") == provider_name("CUDA") == "CUDAExecutionProvider"
    assert usable_provider("MadeUpExecutionProvider") == "MadeUpExecutionProvider"
    assert usable_provider("none") is None
    with pytest.raises(ProviderError, match="unknown accelerator 'webgpu'") as caught:
        usable_provider("webgpu")
    assert "onnxruntime-webgpu" in caught.value.hint


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
    monkeypatch.setattr(Path, "exists", lambda _: False)
    assert usable_provider("auto") is None
    assert usable_provider("cuda") == "CUDAExecutionProvider"  # an explicit choice is probed


def test_probes_of_providers() -> None:
    """The probe of the CPU provider succeeds, and that of a missing provider has a reason."""
    assert probe_provider(CPU).reason is None
    assert "NoSuch" in (probe_provider("NoSuchExecutionProvider").reason or "")


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        ("load failed with error: libcudnn.so.9: cannot open\nmore\n", "libcudnn.so.9: cannot open"),
        ("a warning\nRuntimeError: no adapter\nwarning: left over\n", "RuntimeError: no adapter"),
        ("status == Success was false. Failed to get an adapter: none\n", "Failed to get an adapter: none"),
        ("only this\n", "only this"),
        ("", "the probe ended with exit code 3"),
    ],
)
def test_the_reason_is_one_line_of_stderr(errors: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is chosen from all that a provider writes when it fails."""
    done = type("Done", (), {"returncode": 3, "stdout": "", "stderr": errors})
    monkeypatch.setattr(probe.subprocess, "run", lambda *_, **__: done)
    assert probe_provider.__wrapped__("X") == ProbeResult(reason)


@pytest.mark.parametrize(
    ("output", "memory_mb"), [('{"memory_mb": 345.5}\n', 345.5), ('{"memory_mb": null}\n', None), ("noise", None)]
)
def test_the_memory_of_a_provider(output: str, memory_mb: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe reports a provider's memory if NVML is available."""
    done = type("Done", (), {"returncode": 0, "stdout": output, "stderr": ""})
    monkeypatch.setattr(probe.subprocess, "run", lambda *_, **__: done)
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
