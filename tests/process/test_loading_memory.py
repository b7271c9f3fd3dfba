"""The memory of a process that loads a model with large external weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from external_weights import embedding
from helpers import FLOAT, make_model, node, value

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


#: Serves a model by a session that tunes in a mode, and prints its memory in MB, and whether onnx was imported.
SERVE = """
import gc, json, os, sys
import numpy as np
from chrion import HybridSession
from chrion.machine.allocator import trim
session = HybridSession(sys.argv[1], tune=sys.argv[2])
for _ in range(3):
    session.run(None, {"x": np.zeros((4, 1024), np.float32)})
gc.collect()
trim()
resident = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
print(json.dumps([resident, "onnx" in sys.modules, session.explain()]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_tuning_that_ends_plain_leaves_no_memory(tmp_path: Path) -> None:
    """A session that tunes now holds what one holds that does not tune, 24 MB of weights, since it loads no graph."""
    weights = {f"w{at}": np.zeros((1024, 1024), np.float32) for at in range(6)}
    nodes = [node("MatMul", ["x" if at == 0 else f"y{at - 1}", f"w{at}"], [f"y{at}"]) for at in range(6)]
    model = make_model(nodes, [value("x", FLOAT, [4, 1024])], [value("y5", FLOAT, [4, 1024])], weights)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    found = {}
    for mode in ("never", "now"):
        command = [sys.executable, "-c", SERVE, str(path), mode]
        environment = {**os.environ, "CHRION_CACHE": str(tmp_path / mode)}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)  # noqa: S603
        found[mode] = json.loads(done.stdout)
    assert all("plain onnxruntime" in explained for _, _, explained in found.values()), found
    assert not any(imported for _, imported, _ in found.values())
    assert found["now"][0] < 1.1 * found["never"][0] + 2
