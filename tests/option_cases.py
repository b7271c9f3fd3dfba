"""A model that is cut anywhere, options for it, and what both kinds of session make of them."""

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
    """``y = relu(x @ w) @ w``, cut anywhere; ``free`` leaves the rows open."""
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
    """An OrtValue of an array."""
    return ort.OrtValue.ortvalue_from_numpy(array)


@functools.cache
def doubled() -> ort.OrtValue:
    """Another weight, which stays: session options only point to it."""
    return ort_value(DOUBLED)


def options(change: Change = lambda _: None) -> ort.SessionOptions:
    """Quiet options with a change."""
    made = ort.SessionOptions()
    made.log_severity_level = 4
    change(made)
    return made


def cut(model: onnx.ModelProto | str, given: ort.SessionOptions | None = None, **rest: Any) -> HybridSession:
    """A session with the operators on lanes at random."""
    return HybridSession(model, given, [CPU], plan=partial(random_plan, pick=Random(0)), **rest)


def plain(model: onnx.ModelProto | str, given: ort.SessionOptions, **rest: Any) -> ort.InferenceSession:
    """InferenceSession with the same options."""
    source = model if isinstance(model, str) else model.SerializeToString()
    return ort.InferenceSession(source, given, [CPU], **rest)


def outcome(run: Callable[[], Any]) -> Any:
    """What comes out, or the type of what is raised."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - any: both sessions have to agree on it
        return type(error)


def assert_same_outcome(ours: Any, theirs: Any) -> None:
    """Equal outputs, or the same exception."""
    if isinstance(theirs, type):
        assert ours is theirs
    else:
        assert_equal(ours, theirs)


def check_session(change: Change, treatment: Treatment, named: str) -> None:
    """A session with an option gives what InferenceSession gives, cut or plain as the table says."""
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
