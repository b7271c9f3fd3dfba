"""Probes of execution providers: whether a provider works on this machine, and the memory of its context.

A probe runs in a process of its own, because a provider with missing libraries gives the reason on stderr only, and a
broken driver may crash the process. It also measures the GPU memory that the provider takes for its context and
libraries as soon as any model runs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import onnxruntime as ort

from chrion.devices.nvml import used_mb

#: Time limit of a probe, which loads a driver and its libraries, in seconds (a choice, not measured).
_TIMEOUT_S = 60.0
_MISSING = re.compile(r"(?:with error:|was false\.) (?P<reason>[^\n]+)")
_FAILURE = re.compile(r"(?:Error|Exception|FAIL)\b[^\n]*")


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of a probe."""

    #: The reason why the provider does not work; None if it works.
    reason: str | None
    #: GPU memory of the smallest session; None without NVML.
    memory_mb: float | None = None


def failure_reason(provider: str) -> str | None:
    """Return the reason why a provider does not work on this machine, or None if it works."""
    return probe_provider(provider).reason


@lru_cache
def probe_provider(provider: str) -> ProbeResult:
    """Run the smallest model on a provider, in a process of its own; once per provider and process."""
    command = [sys.executable, "-m", "chrion.devices.probe", provider]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter and this module
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False, env=os.environ
        )
    except subprocess.TimeoutExpired:
        return ProbeResult(f"the probe did not end within {_TIMEOUT_S:.0f} s")
    if done.returncode == 0:
        return ProbeResult(None, _memory_mb(done.stdout))
    return ProbeResult(_reason(done.stderr) or f"the probe ended with exit code {done.returncode}")


def load_libraries(provider: str) -> None:
    """Load the libraries of NVIDIA's and PyTorch's packages into this process if a provider needs them."""
    if provider.startswith(("CUDA", "Tensorrt")) and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()


def _reason(errors: str) -> str | None:
    """Return the line of a probe's stderr that gives the reason."""
    missing = _MISSING.search(errors)
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    relevant = [line for line in lines if _FAILURE.search(line)] or lines
    return missing["reason"] if missing else relevant[-1] if relevant else None


def _memory_mb(output: str) -> float | None:
    try:
        memory_mb = json.loads(output.strip().splitlines()[-1])["memory_mb"]
    except (ValueError, IndexError, KeyError, TypeError):
        return None
    return None if memory_mb is None else float(memory_mb)


def _main(provider: str) -> None:
    from chrion.devices.small_models import smallest_session  # noqa: PLC0415 - only this process needs onnx

    load_libraries(provider)
    before = used_mb()
    session = smallest_session(provider)
    if provider not in session.get_providers():
        sys.exit(1)
    session.run(None, {"x": np.ones(1, np.float32)})
    after = used_mb()
    grown = None if before is None or after is None else max(0.0, after - before)
    print(json.dumps({"memory_mb": grown}))  # noqa: T201 - the result


if __name__ == "__main__":
    _main(sys.argv[1])
