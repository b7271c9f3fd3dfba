"""Scratch memory of operators: allocations beside inputs, outputs and weights, as onnxruntime counts them.

onnxruntime writes a file with the allocations of each node. Inputs, outputs and weights are not read from it: their
sizes follow from their shapes, and the file has zeros if buffers are bound or reused. Scratch memory from other
allocators, such as that of a library, is not included.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import onnxruntime as ort

_FILE = "session.collect_node_memory_stats_to_file"
_SCRATCH = "total_temp_allocations"


def scratch_bytes(run: Callable[[ort.SessionOptions], object]) -> int:
    """Return the largest scratch memory of any node of a session.

    Args:
        run: A function that opens the session with the given options, runs it once, and releases it.

    Returns:
        Bytes; zero if onnxruntime reports none.

    Raises:
        Exception: Any error of ``run``.
    """
    with TemporaryDirectory(prefix="chrion-") as folder:
        path = Path(folder) / "nodes.csv"
        options = ort.SessionOptions()
        options.enable_mem_pattern = False  # preplanned memory is not counted
        options.add_session_config_entry(_FILE, str(path))
        run(options)
        return read_scratch(path.read_text(encoding="utf-8")) if path.is_file() else 0


def read_scratch(text: str) -> int:
    """Return the largest scratch size in onnxruntime's table of nodes, or zero if the table has none."""
    rows = csv.DictReader(line.lstrip("#") for line in text.splitlines() if line.strip())
    sizes = [row.get(_SCRATCH) or "0" for row in rows]
    return max((int(text) for text in sizes if text.isdigit()), default=0)
