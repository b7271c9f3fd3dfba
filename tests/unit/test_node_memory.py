"""Scratch memory of operators, as onnxruntime reports it."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from chrion.profiler.operator_bench import read_scratch, scratch_bytes
from helpers import FLOAT, make_model, node, value

TABLE = """#name,input_sizes,initializers_sizes,total_dynamic_sizes,total_temp_allocations
LSTM_1,1920,0,2048,8132
Relu_2,64,0,64,
Transpose_3,64,0,64,120
"""


def test_the_largest_size_is_returned() -> None:
    """A missing size counts as zero."""
    assert read_scratch(TABLE) == 8132
    assert read_scratch("#name,input_sizes\nRelu_1,64\n") == 0
    assert read_scratch("") == 0


def test_an_lstm_has_scratch_memory() -> None:
    """Onnxruntime allocates an LSTM's gates in each run: at least one step's, and less than the model."""
    hidden, steps = 16, 30
    weights = {name: np.zeros((1, 4 * hidden, hidden), np.float32) for name in ("W", "R")}
    lstm = node("LSTM", ["x", "W", "R"], ["y"], hidden_size=hidden)
    model = make_model([lstm], [value("x", FLOAT, [steps, 1, hidden])], [value("y", FLOAT, None)], weights)

    def run(options: ort.SessionOptions) -> None:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        session.run(None, {"x": np.zeros((steps, 1, hidden), np.float32)})

    assert 4 * hidden * 4 <= scratch_bytes(run) <= 2 * steps * 4 * hidden * 4
