"""Execution providers by name: which there are, whose memory they bind, and which one is taken by itself."""

from __future__ import annotations

import sys
from pathlib import Path

import onnxruntime as ort

from chrion.devices.probe import failure_reason, load_libraries
from chrion.errors import ProviderError

CPU_PROVIDER = "CPUExecutionProvider"
#: Short names of providers for the command line; any full name works too. The first that works is the automatic choice.
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
#: Never taken by itself: TensorRT builds engines for minutes, and the CPU is no accelerator.
_ONLY_IF_ASKED = {"tensorrt", "cpu"}
#: The kind of device memory each provider binds, as onnxruntime's IOBinding calls it; others bind host memory.
DEVICE_NAMES = {
    "CUDAExecutionProvider": "cuda",
    "TensorrtExecutionProvider": "cuda",
    "ROCMExecutionProvider": "cuda",
    "MIGraphXExecutionProvider": "cuda",
    "WebGpuExecutionProvider": "webgpu",
    "DmlExecutionProvider": "dml",
}
#: How to get what a provider needs.
_EXTRAS = {
    "CUDAExecutionProvider": "its libraries come with: pip install 'chrion[cuda]'",
    "TensorrtExecutionProvider": "its libraries come with: pip install 'chrion[cuda]' tensorrt",
    "WebGpuExecutionProvider": "it needs a Vulkan driver; VK_ICD_FILENAMES may name one",
}
_WEBGPU_WHEEL = "in an environment of its own: pip install onnxruntime-webgpu"


def provider_name(name: str) -> str:
    """The full name of an execution provider, from a short or a full one.

    Raises:
        ProviderError: This onnxruntime has no such provider.
    """
    full = PROVIDER_NAMES.get(name.lower(), name)
    available = ort.get_available_providers()
    if full not in available:
        hint = f"this onnxruntime offers {', '.join(available)}"
        if full == "WebGpuExecutionProvider":
            hint += f"; {_WEBGPU_WHEEL}"
        raise ProviderError(f"accelerator: there is no provider {name!r}", hint=hint)
    return full


def usable_provider(accelerator: str | None) -> str | None:
    """The full name of an accelerator's provider, tried out.

    Args:
        accelerator: A provider by its short or full name; ``auto`` for the first accelerator that works here; None or
            ``none`` for none.

    Returns:
        The provider's name; None where there is to be none, or ``auto`` finds none.

    Raises:
        ProviderError: There is no such provider, or it does not work here.
    """
    if accelerator is None or accelerator.lower() == "none":
        return None
    if accelerator.lower() == "auto":
        return detect()
    provider = provider_name(accelerator)
    require_working(provider, "accelerator")
    return provider


def require_working(provider: str, what: str) -> None:
    """Try a provider out and load its libraries.

    Args:
        provider: Its full name.
        what: Who asks for it, for the message.

    Raises:
        ProviderError: It does not work here; the message says why in one line.
    """
    reason = failure_reason(provider)
    if reason:
        raise ProviderError(f"{what}: {provider} does not work here: {reason}", hint=remedy(provider))
    load_libraries(provider)


def remedy(provider: str) -> str:
    """How to get what a provider needs; empty where there is nothing to say."""
    return _EXTRAS.get(provider, "")


def detect() -> str | None:
    """The first accelerator of this onnxruntime that works here, its libraries loaded; None where there is none."""
    available = set(ort.get_available_providers())
    for name, provider in PROVIDER_NAMES.items():
        eligible = name not in _ONLY_IF_ASKED and provider in available and _worth_trying(provider)
        if eligible and failure_reason(provider) is None:
            load_libraries(provider)
            return provider
    return None


def _worth_trying(provider: str) -> bool:
    """Spare the second that trying takes where there is no driver: a GPU build of onnxruntime on a machine without."""
    if DEVICE_NAMES.get(provider) != "cuda" or sys.platform != "linux":
        return True
    return any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/nvhost-gpu"))
