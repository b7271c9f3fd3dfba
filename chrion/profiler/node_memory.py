"""Memory that an operator takes while it runs, beside its inputs, outputs and weights: as onnxruntime counts it.

onnxruntime writes for each node what it allocated. Inputs, outputs and weights are not read from there: their shapes
say the same, and where buffers are bound or reused the file says zero. Kernels that take their scratch memory from
elsewhere (from a library's own allocator, say) are not counted by it; nothing is known of those.
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
    """The most scratch memory that any node of a session takes.

    Args:
        run: Makes the session with these options, runs it once, and lets go of it.

    Returns:
        Bytes; zero where onnxruntime counts none.

    Raises:
        Exception: Whatever ``run`` raises.
    """
    with TemporaryDirectory(prefix="chrion-") as folder:
        path = Path(folder) / "nodes.csv"
        options = ort.SessionOptions()
        options.enable_mem_pattern = False  # planned memory is not counted
        options.add_session_config_entry(_FILE, str(path))
        run(options)
        return read_scratch(path.read_text(encoding="utf-8")) if path.is_file() else 0


def read_scratch(text: str) -> int:
    """The largest scratch figure in onnxruntime's table of nodes; zero in a table that has none."""
    rows = csv.DictReader(line.lstrip("#") for line in text.splitlines() if line.strip())
    found = [row.get(_SCRATCH) or "0" for row in rows]
    return max((int(text) for text in found if text.isdigit()), default=0)
