"""A model that can be cut anywhere, and the comparison of HybridSession and InferenceSession with given options."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from chrion import HybridSession
from chrion.runtime.options.table import Treatment
from chrion.scheduler.fixed_placement import random_plan
from helpers import FLOAT, assert_equal, make_model, node, value

CPU = "CPUExecutionProvider"
Level = ort.GraphOptimizationLevel
FEED = {"x": np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)}
DOUBLED = np.full((4, 4), 2, np.float32)
Change = Callable[[ort.SessionOptions], object]


def chain(*, free: bool = False) -> onnx.ModelProto:
    """Build ``y = relu(x @ w) @ w``, which can be cut anywhere; with ``free``, the number of rows is symbolic."""
    w = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
    nodes = [
        node("MatMul", ["x", "w"], ["a"], name="first"),
        node("Relu", ["a"], ["b"], name="relu"),
        node("MatMul", ["b", "w"], ["y"], name="second"),
    ]
    shape = ["rows" if free else 2, 4]
    model = make_model(nodes, [value("x", FLOAT, shape)], [value("y", FLOAT, shape)], {"w": w})
    if free:
        model.graph.input[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    return model


def ort_value(array: np.ndarray[Any, Any]) -> ort.OrtValue:
    """Return an OrtValue of an array."""
    return ort.OrtValue.ortvalue_from_numpy(array)


@functools.cache
def doubled() -> ort.OrtValue:
    """Return a weight that is never freed, since session options only refer to it."""
    return ort_value(DOUBLED)


def options(change: Change = lambda _: None) -> ort.SessionOptions:
    """Return session options that log nothing, with a change applied."""
    made = ort.SessionOptions()
    made.log_severity_level = 4
    change(made)
    return made


def cut(model: onnx.ModelProto | str, given: ort.SessionOptions | None = None, **rest: Any) -> HybridSession:
    """Create a session of a random plan."""
    return HybridSession(model, given, [CPU], plan=partial(random_plan, pick=Random(0)), **rest)


def plain(model: onnx.ModelProto | str, given: ort.SessionOptions, **rest: Any) -> ort.InferenceSession:
    """Create an InferenceSession with the same options."""
    source = model if isinstance(model, str) else model.SerializeToString()
    return ort.InferenceSession(source, given, [CPU], **rest)


def outcome(run: Callable[[], Any]) -> Any:
    """Return the result of a call, or the type of its exception."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - both sessions must raise the same
        return type(error)


def assert_same_outcome(ours: Any, theirs: Any) -> None:
    """Assert equal outputs or the same exception."""
    if isinstance(theirs, type):
        assert ours is theirs
    else:
        assert_equal(ours, theirs)


def check_session(change: Change, treatment: Treatment, named: str) -> None:
    """Assert that a session with an option gives InferenceSession's outcome, and is cut or plain as the table says."""
    theirs = outcome(lambda: plain(chain(), options(change)).run(None, FEED))

    def run() -> Any:
        with cut(chain(), options(change)) as session:
            if treatment is Treatment.PLAIN:
                assert session.plan is None
                assert repr(named) in session.explain()
            else:
                assert session.plan is not None
            return session.run(None, FEED)

    assert_same_outcome(outcome(run), theirs)
