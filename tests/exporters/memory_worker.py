"""One session's resident memory, measured in a separate process.

Usage: ``python memory_worker.py FOLDER plain|hybrid [MODULE ...]``. The process imports its library and the given
modules, creates a session for the model of a case, serves every request three times, collects garbage, has the C
library return freed memory, and prints its memory as one line of JSON. With ``plain`` it imports onnxruntime alone, so
that the baseline after the imports is that of a program without Chrion.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cases import read_feeds

PLAIN, HYBRID = "plain", "hybrid"
_ROUNDS = 3
_TUNING_LIMIT_S = 300.0
_STATUS, _ROLLUP, _CLEAR = Path("/proc/self/status"), Path("/proc/self/smaps_rollup"), Path("/proc/self/clear_refs")
#: Written to ``clear_refs``, resets the peak of resident memory (proc(5)).
_RESET_PEAK = "5"


def measure_session(folder: Path, kind: str, modules: Sequence[str] = ()) -> dict[str, Any]:
    """Serve the requests of a case and measure the process before, during and after.

    Args:
        folder: The case.
        kind: ``plain`` or ``hybrid``.
        modules: Modules to import beforehand: those that a session of this kind imports when it is used.

    Returns:
        The fields of :class:`memory_check.Footprint`.
    """
    import onnxruntime as ort  # noqa: PLC0415 - part of the baseline, after which the peak is reset

    ort.set_default_logger_severity(4)
    make = importlib.import_module("chrion").HybridSession if kind == HYBRID else ort.InferenceSession
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    feeds = read_feeds(folder)
    imported = set(sys.modules)
    _return_freed_memory()
    imports_mb = _read_mb(_STATUS, "VmRSS")
    with contextlib.suppress(OSError):  # not permitted: the peak then includes the imports
        _CLEAR.write_text(_RESET_PEAK)
    session = make(str(folder / "model.onnx"))
    served = segments = 0
    for _ in range(_ROUNDS):
        for feed in feeds:
            with contextlib.suppress(Exception):
                session.run(None, feed)
                served += 1
            plan = getattr(session, "plan", None)
            segments = max(segments, len(plan.segments) if plan is not None else 0)
        if kind == HYBRID:  # the next round is served by the engines that tuning has selected
            session.wait_until_tuned(_TUNING_LIMIT_S)
    _return_freed_memory()
    return {
        "imports_mb": imports_mb,
        "peak_mb": _read_mb(_STATUS, "VmHWM"),
        "steady_mb": _read_mb(_STATUS, "VmRSS"),
        "steady_pss_mb": _read_mb(_ROLLUP, "Pss"),
        "served": served,
        "segments": segments,
        "later_modules": sorted(set(sys.modules) - imported),
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
    print(json.dumps(measure_session(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])))
