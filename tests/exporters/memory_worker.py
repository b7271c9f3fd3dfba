"""One session's resident memory, measured in a process of its own: ``python memory_worker.py FOLDER plain|hybrid``.

The process imports its library, creates a session for the model of a case, serves every request three times, collects
garbage, has the C library return freed memory, and prints its memory as one line of JSON. With ``plain`` it imports
onnxruntime alone, so that the baseline after the imports is that of a program without Chrion.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from cases import read_feeds

PLAIN, HYBRID = "plain", "hybrid"
_ROUNDS = 3
_STATUS, _ROLLUP, _CLEAR = Path("/proc/self/status"), Path("/proc/self/smaps_rollup"), Path("/proc/self/clear_refs")
#: Written to ``clear_refs``, resets the peak of resident memory (proc(5)).
_RESET_PEAK = "5"


def measure_session(folder: Path, kind: str) -> dict[str, Any]:
    """Serve the requests of a case and return what the process held before, at most, and afterwards.

    Returns:
        ``imports_mb``, ``peak_mb``, ``steady_mb`` (resident memory), ``steady_pss_mb`` (the same with shared pages
        divided among the processes that map them), ``served`` (requests without an exception), and ``segments``.
    """
    import onnxruntime as ort  # noqa: PLC0415 - part of the baseline, after which the peak is reset

    ort.set_default_logger_severity(4)
    make = importlib.import_module("chrion").HybridSession if kind == HYBRID else ort.InferenceSession
    feeds = read_feeds(folder)
    _return_freed_memory()
    imports_mb = _read_mb(_STATUS, "VmRSS")
    with contextlib.suppress(OSError):  # not permitted: the peak then includes the imports
        _CLEAR.write_text(_RESET_PEAK)
    session = make(str(folder / "model.onnx"))
    served = 0
    for feed in feeds * _ROUNDS:
        with contextlib.suppress(Exception):
            session.run(None, feed)
            served += 1
    _return_freed_memory()
    plan = getattr(session, "plan", None)
    return {
        "imports_mb": imports_mb,
        "peak_mb": _read_mb(_STATUS, "VmHWM"),
        "steady_mb": _read_mb(_STATUS, "VmRSS"),
        "steady_pss_mb": _read_mb(_ROLLUP, "Pss"),
        "served": served,
        "segments": len(plan.segments) if plan is not None else 0,
    }


def _return_freed_memory() -> None:
    """Collect garbage and return freed memory to the system (glibc)."""
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.pythonapi.malloc_trim(0)


def _read_mb(path: Path, name: str) -> float:
    """Return a line's value of a file of /proc that counts in KiB."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(f"{path}: no line {name!r}")


if __name__ == "__main__":
    print(json.dumps(measure_session(Path(sys.argv[1]), sys.argv[2])))
