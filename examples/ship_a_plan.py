"""Make a plan once, save it, and start sessions from the file without measuring again."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx

import chrion
from chrion.zoo import build

folder = Path(tempfile.mkdtemp())
onnx.save(build("lstm", {"layers": 4, "batch": 1, "seq": 8}), folder / "model.onnx")

# On the machine that will serve the model, or with a profile that was measured there.
graph = chrion.load(folder / "model.onnx")
profile = chrion.profile(graph)
chrion.partition(graph, profile).save(folder / "model.plan.json")

# In every serving process. A plan of another model, or for more cores, would raise PlanError.
with chrion.HybridSession(folder / "model.onnx", plan=folder / "model.plan.json") as session:
    outputs = session.run(None, {i.name: np.ones(i.shape, np.float32) for i in session.get_inputs()})

plan = chrion.Plan.load(folder / "model.plan.json")
print(f"{len(plan.operators)} operators in {len(plan.segments)} segments, predicted {plan.predicted.latency_ms:.2f} ms")
print(f"outputs: {[o.shape for o in outputs]}")
