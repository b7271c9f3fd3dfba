"""Probes: small sessions that reveal what Python cannot read from the caller's options.

onnxruntime has no function that returns the weights or fixed dimensions that session options hold, or the adapters that
run options hold. So sessions of a few bytes are created, or run, with the caller's options. They contain only the names
of the real model's weights and inputs.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from chrion.devices import CPU_PROVIDER
from chrion.graph.external import nodes_of, tensors_of

#: Rank of the placeholder for a weight. All its dimensions are 0, so it has no elements, and no weight of a real model
#: has its shape.
_RANK = 7
#: Most placeholders in one session, whose cost grows faster than their number.
_CHUNK = 500
_IR_VERSION, _OPSET = 8, 17


def weight_names(model: onnx.ModelProto) -> list[str]:
    """Return the names under which session options can hold weights of a model: its initialisers and constants."""
    names = [tensor.name for tensor in tensors_of(model) if tensor.name]
    constants = [output for node in nodes_of(model) if node.op_type == "Constant" for output in node.output]
    return sorted({*names, *constants})


def weight_files(model: onnx.ModelProto) -> list[str]:
    """Return the files that hold weights of a model, as it names them."""
    entries = (entry for tensor in tensors_of(model) for entry in tensor.external_data)
    return sorted({entry.value for entry in entries if entry.key == "location"})


def replaces_weights(
    options: ort.SessionOptions, names: Sequence[str], accelerator: tuple[str, Mapping[str, Any]] | None = None
) -> bool:
    """Return whether the options hold a weight with one of the given names.

    The probe has a weight without elements for each name. It concatenates them with an input, so that onnxruntime does
    not fold them. If one is replaced by a weight with elements, the result has elements or onnxruntime raises an error.
    onnxruntime uses a weight only if it is in the memory of its reader's provider, so each provider is probed.

    Args:
        options: The options.
        names: The weights' names.
        accelerator: An accelerator's provider and its options, if there is one.
    """
    chunks = [names[at : at + _CHUNK] for at in range(0, len(names), _CHUNK)]
    return any(_replaced(options, chunk) for chunk in chunks) or (
        accelerator is not None and any(_replaced(options, chunk, accelerator) for chunk in chunks)
    )


def holds_files(options: ort.SessionOptions, files: Sequence[str]) -> bool:
    """Return whether the options hold the content of one of the given weight files."""
    return any(_held(options, name) for name in files)


def fixes_dimensions(options: ort.SessionOptions, model: onnx.ModelProto) -> bool:
    """Return whether the options fix a free dimension of the model's inputs.

    Raises:
        Exception: Raised by onnxruntime: the options are invalid, or hold weights that the probe does not have.
    """
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [i for i in model.graph.input if i.name not in weights and i.type.HasField("tensor_type")]
    free = [i for i in inputs if any(not d.HasField("dim_value") for d in i.type.tensor_type.shape.dim)]
    probe = _constant(*_unused((i.name for i in free), 1))
    probe.graph.input.extend(free)
    opened = _open(probe.SerializeToString(), options).get_inputs()
    return any(
        isinstance(given, int) and not declared.HasField("dim_value")
        for before, after in zip(free, opened, strict=True)
        for declared, given in zip(before.type.tensor_type.shape.dim, after.shape, strict=True)
    )


def brings_adapters(options: ort.RunOptions) -> bool:
    """Return whether run options hold active adapters, whose parameters a session without inputs refuses."""
    try:
        _without_inputs().run(None, {}, options)
    except InvalidArgument:
        return True
    except Exception:  # noqa: BLE001 - the options terminate the run; the request will raise that
        return False
    return False


def _replaced(
    options: ort.SessionOptions, names: Sequence[str], accelerator: tuple[str, Mapping[str, Any]] | None = None
) -> bool:
    fed, joined, size = _unused(names)
    graph = helper.make_graph(
        [helper.make_node("Concat", [*names, fed], [joined], axis=0), helper.make_node("Size", [joined], [size])],
        "probe",
        [helper.make_tensor_value_info(fed, TensorProto.FLOAT, [f"d{at}" for at in range(_RANK)])],
        [helper.make_tensor_value_info(size, TensorProto.INT64, [])],
        [helper.make_tensor(name, TensorProto.FLOAT, [0] * _RANK, []) for name in names],
    )
    quiet = ort.RunOptions()
    quiet.log_severity_level = 4
    feed = {fed: np.zeros((0,) * _RANK, np.float32)}
    try:
        session = _open(_model(graph).SerializeToString(), options, accelerator)
    except Exception:  # noqa: BLE001 - an accelerator that does not work is reported when it is used
        return accelerator is None
    try:
        (elements,) = session.run(None, feed, quiet)
    except Exception:  # noqa: BLE001 - Concat refuses a replacement of another type or shape
        return True
    return bool(elements)


def _unused(names: Iterable[str], count: int = 3) -> list[str]:
    """Return ``count`` names that are not among the given ones."""
    taken = set(names)
    return list(itertools.islice((name for at in itertools.count() if (name := f"v{at}") not in taken), count))


def _held(options: ort.SessionOptions, name: str) -> bool:
    """Return whether a weight stored in a file can be loaded although the file does not exist."""
    weight = TensorProto(name="weight", data_type=TensorProto.UINT8, dims=[1], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": name, "offset": "0", "length": "1"}.items():
        weight.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [helper.make_node("Identity", ["weight"], ["y"])],
        "probe",
        [],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, [1])],
        [weight],
    )
    with tempfile.TemporaryDirectory(prefix="chrion-") as folder:
        path = Path(folder) / "probe.onnx"
        path.write_bytes(_model(graph).SerializeToString())
        try:
            _open(str(path), options)
        except Exception:  # noqa: BLE001 - there is no such file
            return False
    return True


def _constant(name: str = "y") -> onnx.ModelProto:
    node = helper.make_node("Constant", [], [name], value_float=0.0)
    return _model(helper.make_graph([node], "probe", [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, [])]))


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)


def _open(
    model: bytes | str, options: ort.SessionOptions, accelerator: tuple[str, Mapping[str, Any]] | None = None
) -> ort.InferenceSession:
    first = [(accelerator[0], dict(accelerator[1]))] if accelerator else []
    return ort.InferenceSession(model, options, [*first, CPU_PROVIDER], enable_fallback=0)


@functools.cache
def _without_inputs() -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return _open(_constant().SerializeToString(), options)
