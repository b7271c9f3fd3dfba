"""Does an execution provider work here, and if not, why not?

Asked in a process of its own: a provider whose libraries are missing says why on the standard error output only, and
one whose driver is broken may take the process with it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import lru_cache

import onnxruntime as ort
from onnx import TensorProto, helper

_TIMEOUT_S = 60.0
_MISSING = re.compile(r"with error: (?P<reason>[^\n]+)")


@lru_cache
def why_unusable(provider: str) -> str | None:
    """Try a provider on the smallest model there is: None if it works, or else the reason it gives."""
    command = [sys.executable, "-m", "chrion.profiler.probe", provider]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter and this module
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False, env=os.environ
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {_TIMEOUT_S:.0f} s"
    if done.returncode == 0:
        return None
    missing = _MISSING.search(done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return missing["reason"] if missing else lines[-1] if lines else f"exit code {done.returncode}"


def load_libraries(provider: str) -> None:
    """Make the libraries of NVIDIA's and PyTorch's packages known to this process, where a provider needs them."""
    if provider.startswith(("CUDA", "Tensorrt")) and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()


def smallest_session(provider: str) -> ort.InferenceSession:
    """A session over one Relu on one number."""
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "probe", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=[provider], enable_fallback=0)


def _main(provider: str) -> None:
    load_libraries(provider)
    if provider not in smallest_session(provider).get_providers():
        sys.exit(1)


if __name__ == "__main__":
    _main(sys.argv[1])
