"""Does an execution provider work here, and if not, why not?

Asked in a process of its own: a provider whose libraries are missing says why on the standard error output only, and
one whose driver is broken may take the process with it. That process also tells how much GPU memory the provider
takes as soon as anything runs: its context and libraries.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from chrion.devices.nvml import used_mb

_TIMEOUT_S = 60.0
_MISSING = re.compile(r"(?:with error:|was false\.) (?P<reason>[^\n]+)")
_FAILURE = re.compile(r"(?:Error|Exception|FAIL)\b[^\n]*")


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What trying a provider out came to."""

    #: Why it does not work; None where it does.
    reason: str | None
    #: GPU memory that the smallest session takes, where NVML tells; None where it does not.
    memory_mb: float | None = None


def failure_reason(provider: str) -> str | None:
    """None if a provider works, or else the reason it gives."""
    return probe_provider(provider).reason


@lru_cache
def probe_provider(provider: str) -> ProbeResult:
    """Try a provider on the smallest model there is; asked once in a process."""
    command = [sys.executable, "-m", "chrion.devices.probe", provider]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter and this module
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False, env=os.environ
        )
    except subprocess.TimeoutExpired:
        return ProbeResult(f"no answer in {_TIMEOUT_S:.0f} s")
    if done.returncode == 0:
        return ProbeResult(None, _told(done.stdout))
    return ProbeResult(_reason(done.stderr) or f"exit code {done.returncode}")


def load_libraries(provider: str) -> None:
    """Make the libraries of NVIDIA's and PyTorch's packages known to this process, where a provider needs them."""
    if provider.startswith(("CUDA", "Tensorrt")) and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()


def smallest_model() -> bytes:
    """One Relu on one number, from x to y."""
    return _model(helper.make_node("Relu", ["x"], ["y"]), [1])


def smallest_session(provider: str) -> ort.InferenceSession:
    """A session over :func:`smallest_model`."""
    return _session(provider, smallest_model())


def product_session(provider: str, rows: int, side: int) -> ort.InferenceSession:
    """A session over one product of x, rows by side, with a square of weights, to y."""
    weight = numpy_helper.from_array(np.ones((side, side), np.float32), "w")
    return _session(provider, _model(helper.make_node("MatMul", ["x", "w"], ["y"]), [rows, side], [weight]))


def _model(node: onnx.NodeProto, shape: Sequence[int], weights: Sequence[onnx.TensorProto] = ()) -> bytes:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    graph = helper.make_graph([node], "probe", ends[:1], ends[1:], list(weights))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def _session(provider: str, model: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model, options, providers=[provider], enable_fallback=0)


def _reason(errors: str) -> str | None:
    """The line of the standard error output that says most."""
    missing = _MISSING.search(errors)
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    telling = [line for line in lines if _FAILURE.search(line)] or lines
    return missing["reason"] if missing else telling[-1] if telling else None


def _told(output: str) -> float | None:
    try:
        told = json.loads(output.strip().splitlines()[-1])["memory_mb"]
    except (ValueError, IndexError, KeyError, TypeError):
        return None
    return None if told is None else float(told)


def _main(provider: str) -> None:
    load_libraries(provider)
    before = used_mb()
    session = smallest_session(provider)
    if provider not in session.get_providers():
        sys.exit(1)
    session.run(None, {"x": np.ones(1, np.float32)})
    after = used_mb()
    grown = None if before is None or after is None else max(0.0, after - before)
    print(json.dumps({"memory_mb": grown}))  # noqa: T201 - the answer


if __name__ == "__main__":
    _main(sys.argv[1])
