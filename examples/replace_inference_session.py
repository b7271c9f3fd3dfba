"""Run a model with HybridSession in place of onnxruntime.InferenceSession, and compare the outputs."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

import chrion
from chrion.zoo import build

# Any ONNX model will do: a path, its bytes, or a ModelProto.
model = build("lstm", {"layers": 4, "batch": 1, "seq": 8})

plain = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
inputs = {i.name: np.ones(i.shape, np.float32) for i in plain.get_inputs()}
expected = plain.run(None, inputs)

# With tune="now" the session measures the model and times plans against plain sessions before its first request; by
# default it does so in the background. The decision is cached.
with chrion.HybridSession(model, tune="now") as session:
    outputs = session.run(None, inputs)
    print(session.explain())

print("outputs equal:", all(np.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(outputs, expected, strict=True)))
