"""The memory of a process that loads a model with large external weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from external_weights import embedding

#: Loads a model, plans it with estimated costs, and prints the peak of its memory and the size of its folder.
LOAD = """
import json, resource, sys
import chrion
from chrion.profiler.profiles import Profile
graph = chrion.load(sys.argv[1])
copied = sum(path.stat().st_size for path in graph.folder.path.iterdir())
own = int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) // 1000
print(json.dumps({"operators": len(graph.dag), "weights": sum(graph.dag.weight_bytes), "copied": copied, "peak": own}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_reads_and_copies_no_large_weight(tmp_path: Path) -> None:
    """A model of 1.3 GB is loaded in less than 0.3 GB, which is what the libraries need, and copies no weight."""
    path = embedding(tmp_path, 1 << 22, 1 << 20)
    done = subprocess.run([sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, check=True)  # noqa: S603
    found = json.loads(done.stdout)
    assert found["operators"] == 2
    assert found["weights"] > 1.3e9
    assert found["copied"] < 1e6
    assert found["peak"] < 300
