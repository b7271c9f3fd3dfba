"""Names of execution providers, the memory that they use, and the automatic choice of one."""

from __future__ import annotations

import sys
from pathlib import Path

import onnxruntime as ort

from chrion.common.installation import install_hint
from chrion.common.suggestions import did_you_mean
from chrion.devices.probe import failure_reason, load_libraries
from chrion.errors import ProviderError

CPU_PROVIDER = "CPUExecutionProvider"
#: Full names of providers by their short names, in the order of the automatic choice: the first one that works.
PROVIDER_NAMES = {
    "cuda": "CUDAExecutionProvider",
    "rocm": "ROCMExecutionProvider",
    "migraphx": "MIGraphXExecutionProvider",
    "directml": "DmlExecutionProvider",
    "webgpu": "WebGpuExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "cpu": CPU_PROVIDER,
}
#: The short names that an accelerator may be given by, in messages.
SHORT_NAMES = f"none, auto, {', '.join(PROVIDER_NAMES)}"
#: Not part of the automatic choice: TensorRT builds engines for minutes, and the CPU is no accelerator.
_NOT_AUTOMATIC = {"tensorrt", "cpu"}
#: The name of each provider's device memory in onnxruntime's IOBinding; other providers use host memory.
DEVICE_NAMES = {
    "CUDAExecutionProvider": "cuda",
    "TensorrtExecutionProvider": "cuda",
    "ROCMExecutionProvider": "cuda",
    "MIGraphXExecutionProvider": "cuda",
    "WebGpuExecutionProvider": "webgpu",
    "DmlExecutionProvider": "dml",
}
#: Hints on the installation of libraries and drivers that a provider needs.
_EXTRAS = {
    "CUDAExecutionProvider": f"its libraries come with: {install_hint('cuda')}",
    "TensorrtExecutionProvider": f"its libraries come with: pip install tensorrt and {install_hint('cuda')}",
    "WebGpuExecutionProvider": "it needs a Vulkan driver; VK_ICD_FILENAMES may name one",
}
_WEBGPU_WHEEL = "in an environment of its own: pip install onnxruntime-webgpu"


def provider_name(name: str) -> str:
    """Return the full name of an execution provider for its short or full name.

    Raises:
        ProviderError: This onnxruntime has no such provider.
    """
    full = PROVIDER_NAMES.get(name.lower(), name)
    if full not in PROVIDER_NAMES.values() and full not in ort.get_available_providers():
        hint = f"expected {SHORT_NAMES}, or an execution provider by its full name"
        raise ProviderError(f"unknown accelerator {name!r}", hint=did_you_mean(name, PROVIDER_NAMES, hint))
    _require_offered(full, f"accelerator {name!r}")
    return full


def _require_offered(provider: str, subject: str) -> None:
    """Raise an error if this onnxruntime has no such provider."""
    available = ort.get_available_providers()
    if provider not in available:
        wheel = [_WEBGPU_WHEEL] if provider == "WebGpuExecutionProvider" else []
        hint = "; ".join([f"it offers {', '.join(available)}", *wheel])
        raise ProviderError(f"{subject}: this onnxruntime has no {provider}", hint=hint)


def usable_provider(accelerator: str | None) -> str | None:
    """Return the full name of an accelerator's provider, after a probe.

    Args:
        accelerator: A provider by its short or full name; ``auto`` for the first accelerator that works on this
            machine; None or ``none`` for no accelerator.

    Returns:
        The provider's name, or None without an accelerator.

    Raises:
        ProviderError: This onnxruntime has no such provider, or it does not work on this machine.
    """
    if accelerator is None or accelerator.lower() == "none":
        return None
    if accelerator.lower() == "auto":
        return detect_accelerator()
    provider = provider_name(accelerator)
    require_working(provider, "accelerator")
    return provider


def why_unavailable(provider: str) -> str:
    """Return a line on why a requested provider is not available on this machine; empty if it is."""
    try:
        usable_provider(provider)
    except ProviderError as error:
        return f"the accelerator was requested and is not available: {str(error).removeprefix('accelerator: ')}"
    return ""


def require_working(provider: str, subject: str) -> None:
    """Probe a provider and load its libraries.

    Args:
        provider: The full name.
        subject: The option or plan that names the provider, for the message.

    Raises:
        ProviderError: It does not work on this machine; the message gives the reason in one line.
    """
    _require_offered(provider, subject)
    reason = failure_reason(provider)
    if reason:
        raise ProviderError(f"{subject}: {provider} does not work on this machine: {reason}", hint=remedy(provider))
    load_libraries(provider)


def remedy(provider: str) -> str:
    """Return a hint on the libraries or the driver that a provider needs; empty if unknown."""
    if not _has_driver(provider):
        return "this machine has no GPU, or its driver is not loaded"
    return _EXTRAS.get(provider, "")


def detect_accelerator() -> str | None:
    """Return the first accelerator that works on this machine, with its libraries loaded, or None."""
    available = set(ort.get_available_providers())
    for name, provider in PROVIDER_NAMES.items():
        eligible = name not in _NOT_AUTOMATIC and provider in available and _has_driver(provider)
        if eligible and failure_reason(provider) is None:
            load_libraries(provider)
            return provider
    return None


def _has_driver(provider: str) -> bool:
    """Return whether a provider may have a driver: without one, a probe would fail after about a second."""
    if DEVICE_NAMES.get(provider) != "cuda" or sys.platform != "linux":
        return True
    return any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/nvhost-gpu"))
