"""onnxruntime's basic optimisation of a whole model, and unique names for its nodes and weights.

The optimisation runs once on the whole model, so that cutting the model loses no fusion.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from pathlib import Path

import onnx
import onnxruntime as ort

from chrion.graph.external import tensors_of
from chrion.graph.ort_sessions import analysis_options, open_session, weights_folder_option
from chrion.graph.rewrite import make_dense, rename_weights
from chrion.graph.source_weights import SourceWeights, embed, set_location
from chrion.graph.weights_folder import INLINE_BYTES, WeightsFolder

#: Integer weights of at most this many elements stay inside the model: they may be shapes.
_SHAPE_ELEMENTS = 1 << 16
_WEIGHTS_FILE = "weights.bin"
#: The prefix of the names of all weights of a loaded model. Without it a fusion may create the same name twice:
#: MatMulAddFusion adds a constant ``gemm_input_shape`` to the whole model and later to a segment that already has one,
#: which onnxruntime refuses.
_WEIGHT_PREFIX = "chrion{}/"


def optimise_model(
    proto: onnx.ModelProto,
    path: Path | None,
    folder: WeightsFolder,
    level: ort.GraphOptimizationLevel,
    sources: SourceWeights | None = None,
) -> tuple[onnx.ModelProto, ort.InferenceSession]:
    """Optimise a model and give unique names to its nodes and weights.

    Args:
        proto: The model.
        path: The model's file; None if it has none.
        folder: The folder that receives the weights of the optimised model, in one file.
        level: The optimisation level.
        sources: The external weights of the model's file.

    Returns:
        The optimised model, and the session that optimised it.

    Raises:
        ModelError: onnxruntime refuses the model.
    """
    options = analysis_options(level)
    target = folder.path / "model.onnx"
    options.optimized_model_filepath = str(target)
    entries = {
        "session.optimized_model_external_initializers_file_name": _WEIGHTS_FILE,
        "session.optimized_model_external_initializers_min_size_in_bytes": str(INLINE_BYTES),
    }
    if sources:
        entries |= weights_folder_option(sources.root)
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    session = open_session(proto, options, str(path or "model"))
    model = onnx.load(target, load_external_data=False)
    _inline_shapes(model, folder.path)
    make_dense(model)
    # Weights that are also listed as inputs are treated as constants, whether or not folding has removed them.
    required = {i.name for i in session.get_inputs()}
    inputs = [i for i in model.graph.input if i.name in required]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    for tensor in tensors_of(model):
        set_location(tensor, folder.location(folder.path / _WEIGHTS_FILE))
    if sources:
        sources.restore(model, folder)
    prefix = _unused_prefix(model)
    rename_weights(model, prefix)
    name_nodes(model)
    _separate_initial_states(model, prefix)
    return model, session


def original_name(weight: str) -> str:
    """Return the name that a weight of a loaded model had in the model's file."""
    return re.sub(r"^chrion\d*/", "", weight)


def name_nodes(model: onnx.ModelProto) -> None:
    """Give every node a unique name, in place: number missing and repeated names, and keep all others."""
    taken = Counter(node.name for node in model.graph.node)
    counters: Counter[str] = Counter()
    for node in model.graph.node:
        if node.name and taken[node.name] == 1:
            continue
        stem = node.name or node.op_type
        name = stem
        while not name or name in taken:
            name = f"{stem}_{counters[stem]}"
            counters[stem] += 1
        taken[name] = 1
        node.name = name


def _inline_shapes(model: onnx.ModelProto, folder: Path) -> None:
    """Move integer constants back into the model: shape inference reads no sizes and axes from external files."""
    for tensor in model.graph.initializer:
        integer = tensor.data_type in {onnx.TensorProto.INT32, onnx.TensorProto.INT64}
        if integer and tensor.data_location == onnx.TensorProto.EXTERNAL and math.prod(tensor.dims) <= _SHAPE_ELEMENTS:
            embed(tensor, folder)


def _unused_prefix(model: onnx.ModelProto) -> str:
    """Return a prefix that occurs in no name of the model or of the bodies of its nodes."""
    content = model.SerializeToString()
    prefixes = (_WEIGHT_PREFIX.format(at or "") for at in itertools.count())
    return next(prefix for prefix in prefixes if prefix.encode() not in content)


def _separate_initial_states(model: onnx.ModelProto, prefix: str) -> None:
    """Give every recurrent node constant initial states of its own, in place.

    Operators that start from zeros share one constant, at the latest after onnxruntime has merged equal constants. The
    first step of a layer would then have other inputs than its later steps, each of which reads a state of its own.
    """
    constants = {t.name: t for t in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type in {"LSTM", "GRU", "RNN"}:
            for slot in range(5, min(7, len(node.input))):
                if node.input[slot] in constants:
                    own = model.graph.initializer.add()
                    own.CopyFrom(constants[node.input[slot]])
                    own.name = node.input[slot] = f"{prefix}{node.name}/initial_{'hc'[slot - 5]}"
