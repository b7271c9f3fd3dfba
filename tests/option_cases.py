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
from chrion.runtime.options.session_options import UNSUPPORTED_KEYS, session_reason
from helpers import FLOAT, assert_equal, make_model, node, value
from random_plans import random_plan

CPU = "CPUExecutionProvider"
Level = ort.GraphOptimizationLevel
FEED = {"x": np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)}
DOUBLED = np.full((4, 4), 2, np.float32)
Change = Callable[[ort.SessionOptions], object]
#: A meaningful value of each key; "1" for the others.
VALUES = {
    "ep.context_file_path": "context.onnx",
    "optimization.disable_specified_optimizers": "ConstantFolding",
    "optimization.minimal_build_optimizations": "apply",
    "session.allow_released_opsets_only": "0",
    "session.collect_node_memory_stats_to_file": "stats.csv",
    "session.gqa_value_layout": "BNHS",
    "session.layer_assignment_settings": "cpu(=a)",
    "session.load_model_format": "ORT",
    "session.max_shape_override": "x:[2,4]",
    "session.model_external_initializers_file_folder_path": ".",
    "session.moe_expert_counter_state_file": "experts",
    "session.name_based_layer_assignment": "cpu(first)",
    "session.node_partition_config_file": "partition.json",
    "session.qdq_matmulnbits_block_size": "32",
    "session.resource_cuda_partitioning_settings": "1000,",
    "session.save_model_format": "ORT",
}


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


def check_session(change: Change, named: str | None = None) -> None:
    """Assert that a session with an option gives InferenceSession's outcome.

    Args:
        change: Sets the option.
        named: The name that the session gives as the reason for running plain; by default the model has to be cut.
    """
    theirs = outcome(lambda: plain(chain(), options(change)).run(None, FEED))

    def run() -> Any:
        with cut(chain(), options(change)) as session:
            if named is None:
                assert session.plan is not None
            else:
                assert session.plan is None
                assert repr(named) in session.explain()
            return session.run(None, FEED)

    assert_same_outcome(outcome(run), theirs)


def check_key(key: str) -> None:
    """Check that a session with a key is cut or plain as listed, with equal outputs, and cut with the key's default."""

    def change(made: ort.SessionOptions) -> None:
        made.intra_op_num_threads = 2
        made.add_session_config_entry(key, VALUES.get(key, "1"))

    if key in UNSUPPORTED_KEYS:
        assert repr(key) in session_reason(options(change), {})
    check_session(change, key if key in UNSUPPORTED_KEYS else None)
    if default := UNSUPPORTED_KEYS.get(key):
        check_session(lambda o: o.add_session_config_entry(key, default))
