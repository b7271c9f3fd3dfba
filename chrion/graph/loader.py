"""From an ONNX file to a Graph.

Stages, in the order of :func:`load`: read the file without its external weights; write the given shapes into
the inputs; let onnxruntime apply its basic optimisation once, so that cutting loses no fusion (weights go to one
file beside the optimised model, and stay there); give every node a unique name; ask onnxruntime for the type of
every value; keep together what cannot be cut.

onnxruntime itself is asked for types, rather than onnx's shape inference, because it also knows its own operators
and what it knows is what will run.
"""

from __future__ import annotations

import errno
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
from google.protobuf.message import DecodeError, EncodeError
from onnx.external_data_helper import load_external_data_for_tensor

from chrion.errors import ModelError, ShapeError
from chrion.files import read_bytes
from chrion.graph.assemble import assemble
from chrion.graph.external import check_external
from chrion.graph.model import ELEMENT_BYTES, Graph, ModelMetadata, TensorInfo, WeightsFolder
from chrion.graph.rewrite import make_dense, rename_weights
from chrion.units import format_shape

#: Weights of fewer bytes stay inside the model file.
INLINE_BYTES = 1024
#: Integer weights of at most so many elements may be shapes, and always do.
_SHAPE_ELEMENTS = 1 << 16
_WEIGHTS_FILE = "weights.bin"
#: Begins the name of every weight of a loaded model, so that no fusion makes it again: MatMulAddFusion adds a constant
#: ``gemm_input_shape`` to the whole model, then to a segment that already holds one, and onnxruntime refuses it.
_WEIGHT_PREFIX = "chrion{}/"
#: Operators of com.microsoft whose second and third outputs are caches, of shape (batch, heads, length, size).
_CACHING = frozenset(
    {"DecoderMaskedMultiHeadAttention", "GroupQueryAttention", "MultiHeadAttention", "SparseAttention"}
)
#: What a protobuf file can hold, and what to do about a model that does not fit.
_MOST_BYTES = (1 << 31) - 1
_TOO_LARGE = "save it with its weights as external data and give its path"


def load(
    source: str | Path | bytes | onnx.ModelProto,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    optimise: bool = True,
) -> Graph:
    """Read a model and see it as a graph of operators.

    Args:
        source: A model file (its external data is found beside it), its bytes, or a ModelProto.
        shapes: Shapes for inputs with free dimensions, by input name; or one size by the name of a free dimension.
        optimise: Apply onnxruntime's basic optimisation. Without it operators are those of the file, which is what
            published counts are of; it is the better choice for nothing else.

    Returns:
        The graph. Without a shape for every free dimension it can be looked at, but not profiled or planned.

    Raises:
        ModelError: There is no such file, it is not an ONNX model, or onnxruntime refuses it.
        ShapeError: A shape names no input, or contradicts the model.
        UnsafeModelError: Its weights are said to be in files outside of its folder.
    """
    proto, path = read(source)
    given = {name: tuple(shape) for name, shape in (shapes or {}).items()}
    values = (*proto.graph.input, *proto.graph.output) if given else proto.graph.input
    declared = {v.name: _declared_shape(v) for v in values if v.type.HasField("tensor_type")}
    original = path or _serialised(proto, "model")
    _fix_shapes(proto, given)
    folder = WeightsFolder()
    basic, plain = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC, ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        model, types, session = _opened(proto, path, folder.path, basic if optimise else plain)
    except ModelError:
        # Some models onnxruntime optimises into what it then refuses itself; as they are it takes them.
        model, types, session = _opened(proto, path, folder.path, plain)
    _refuse_maps(types, str(path or "model"))
    return assemble(
        name=path.stem if path else proto.graph.name or "model",
        model=model,
        types=types,
        declared_inputs=_declared(session.get_inputs(), declared),
        declared_outputs=_declared(session.get_outputs(), declared),
        overridable=_declared(session.get_overridable_initializers(), declared),
        metadata=_metadata(session),
        source=original,
        optimised=optimise,
        shapes=given,
        folder=folder,
    )


def read(source: str | Path | bytes | onnx.ModelProto) -> tuple[onnx.ModelProto, Path | None]:
    """Read a model without its external weights.

    Returns:
        A copy of the model, and its file if it has one.

    Raises:
        ModelError: There is no such file, or it is not an ONNX model.
        UnsafeModelError: Its weights are said to be in files outside of its folder.
    """
    proto, path = _read(source)
    check_external(proto, path.parent if path else Path.cwd(), str(path or "model"))
    return proto, path


def reassemble(graph: Graph, model: onnx.ModelProto) -> Graph:
    """The graph of a rewritten model: same inputs, outputs and weights' file, other nodes."""
    _name_nodes(model)
    return assemble(
        name=graph.name,
        model=model,
        types=_node_types(model, graph.weights_folder),
        declared_inputs=graph.declared_inputs,
        declared_outputs=graph.declared_outputs,
        overridable=graph.overridable,
        metadata=graph.metadata,
        source=graph.source,
        optimised=graph.optimised,
        shapes=graph.shapes,
        folder=graph.folder,
    )


def element_type(kind: str) -> int:
    """Return ONNX's number for a tensor type as onnxruntime writes it."""
    return int(onnx.TensorProto.DataType.Value(kind.removeprefix("tensor(").removesuffix(")").upper()))


def original_name(weight: str) -> str:
    """Return the name that a weight of a loaded model had in the model's file."""
    return re.sub(r"^chrion\d*/", "", weight)


def weights_folder_option(folder: Path) -> dict[str, str]:
    """The session option that tells onnxruntime where a model given as bytes keeps its external weights."""
    return {"session.model_external_initializers_file_folder_path": str(folder)}


def first_line(error: BaseException) -> str:
    """The first line of an onnxruntime error, without its code prefix."""
    text = str(error).strip().split("\n", 1)[0]
    return text.rsplit(" : ", 1)[-1] if text.startswith("[ONNXRuntimeError]") else text


def _read(source: str | Path | bytes | onnx.ModelProto) -> tuple[onnx.ModelProto, Path | None]:
    if isinstance(source, onnx.ModelProto):
        copy = onnx.ModelProto()
        copy.CopyFrom(source)
        return _checked(copy, "model"), None
    if isinstance(source, bytes):
        return _checked(_parse(source, "model"), "model"), None
    path = Path(source)
    try:
        content = read_bytes(path, _MOST_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ModelError(f"{path}: more than 2 GB in one file", hint=_TOO_LARGE) from error
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    return _checked(_parse(content, str(path)), str(path)), path.resolve()


def _parse(content: bytes, where: str) -> onnx.ModelProto:
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(content)
    except DecodeError as error:
        raise ModelError(f"{where}: not an ONNX model, or cut short", hint="expected a .onnx protobuf file") from error
    return proto


def _checked(proto: onnx.ModelProto, where: str) -> onnx.ModelProto:
    if not proto.ir_version or not proto.HasField("graph") or not proto.graph.output:
        raise ModelError(
            f"{where}: not an ONNX model: no {'graph output' if proto.ir_version else 'ir_version'} in it",
            hint="expected a .onnx protobuf file",
        )
    return proto


def _refuse_maps(types: Mapping[str, TensorInfo], where: str) -> None:
    for info in types.values():
        if "map(" in info.type:
            raise ModelError(f"{where}: value {info.name!r} is a {info.type}; maps are not supported")


def _fix_shapes(proto: onnx.ModelProto, given: Mapping[str, tuple[int, ...]]) -> None:
    """Write the given shapes into the graph's inputs; a named dimension fixed in one input is fixed in all."""
    weights = {t.name for t in proto.graph.initializer}
    inputs = {i.name: i for i in proto.graph.input if i.name not in weights}
    sizes: dict[str, int] = {}
    for name, shape in given.items():
        if name in inputs:
            _fix_input(inputs[name], shape, sizes)
        elif len(shape) == 1 and any(name == d.dim_param for i in inputs.values() for d in _dims(i)):
            sizes[name] = shape[0]
        else:
            known = ", ".join(inputs) or "none"
            raise ShapeError(f"shape: the model has no input {name!r}", hint=f"its inputs are {known}")
    for value in inputs.values():
        for dim in _dims(value):
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]


def _fix_input(value: onnx.ValueInfoProto, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        for size in shape:
            tensor.shape.dim.add().dim_value = size
        return
    dims = _dims(value)
    declared = _declared_shape(value) or ()
    fits = len(dims) == len(shape) and all(
        not isinstance(d, int) or d == s for d, s in zip(declared, shape, strict=True)
    )
    if not fits:
        raise ShapeError(
            f"shape: {value.name!r} cannot be {format_shape(shape)}: the model declares {format_shape(declared)}"
        )
    for dim, size in zip(dims, shape, strict=True):
        if dim.dim_param:
            sizes.setdefault(dim.dim_param, size)
        dim.dim_value = size


def _declared_shape(value: onnx.ValueInfoProto) -> tuple[int | str | None, ...] | None:
    """Dimensions as the file has them; None where it has none."""
    if not value.type.tensor_type.HasField("shape"):
        return None
    return tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in _dims(value))


def _declared(
    arguments: Sequence[ort.NodeArg], shapes: Mapping[str, tuple[int | str | None, ...] | None]
) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(a.name, a.type, shapes.get(a.name, tuple(a.shape))) for a in arguments)


def _metadata(session: ort.InferenceSession) -> ModelMetadata:
    # Copied, since onnxruntime's own object would keep the session and its weights alive.
    found = session.get_modelmeta()

    def read(name: str, default: Any = "") -> Any:
        try:
            return getattr(found, name)
        except UnicodeDecodeError:  # the model runs all the same
            return default

    return ModelMetadata(
        producer_name=read("producer_name"),
        graph_name=read("graph_name"),
        domain=read("domain"),
        description=read("description"),
        graph_description=read("graph_description"),
        version=found.version,
        custom_metadata_map=dict(read("custom_metadata_map", {})),
    )


def _dims(value: onnx.ValueInfoProto) -> list[onnx.TensorShapeProto.Dimension]:
    return list(value.type.tensor_type.shape.dim)


def _opened(
    proto: onnx.ModelProto, path: Path | None, folder: Path, level: ort.GraphOptimizationLevel
) -> tuple[onnx.ModelProto, dict[str, TensorInfo], ort.InferenceSession]:
    """The optimised model with named nodes, the types of its values, and the session that optimised it."""
    model, session = _optimise(proto, path, folder, level)
    prefix = _unused_prefix(model)
    rename_weights(model, prefix)
    _name_nodes(model)
    _part_initial_states(model, prefix)
    return model, _node_types(model, folder), session


def _unused_prefix(model: onnx.ModelProto) -> str:
    """Return a beginning that no name in the model has, nor in the bodies of its nodes."""
    content = model.SerializeToString()
    prefixes = (_WEIGHT_PREFIX.format(at or "") for at in itertools.count())
    return next(prefix for prefix in prefixes if prefix.encode() not in content)


def _optimise(
    proto: onnx.ModelProto, path: Path | None, folder: Path, level: ort.GraphOptimizationLevel
) -> tuple[onnx.ModelProto, ort.InferenceSession]:
    options = _quiet_options(level)
    target = folder / "model.onnx"
    options.optimized_model_filepath = str(target)
    entries = {
        "session.optimized_model_external_initializers_file_name": _WEIGHTS_FILE,
        "session.optimized_model_external_initializers_min_size_in_bytes": str(INLINE_BYTES),
    }
    if path:
        entries |= weights_folder_option(path.parent)
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    session = _open_session(proto, options, str(path or "model"))
    model = onnx.load(target, load_external_data=False)
    _take_in_shapes(model, folder)
    make_dense(model)
    # Weights that are also listed as inputs are constants here, whether or not folding has removed them.
    required = {i.name for i in session.get_inputs()}
    inputs = [i for i in model.graph.input if i.name in required]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    return model, session


def _take_in_shapes(model: onnx.ModelProto, folder: Path) -> None:
    """Move integer constants back into the model: shape inference reads sizes and axes, but not from other files."""
    for tensor in model.graph.initializer:
        integer = tensor.data_type in {onnx.TensorProto.INT32, onnx.TensorProto.INT64}
        if integer and tensor.data_location == onnx.TensorProto.EXTERNAL and math.prod(tensor.dims) <= _SHAPE_ELEMENTS:
            load_external_data_for_tensor(tensor, str(folder))
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]


def _name_nodes(model: onnx.ModelProto) -> None:
    """Keep names that are unique; number the missing and the repeated ones."""
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


def _part_initial_states(model: onnx.ModelProto, prefix: str) -> None:
    """Give every recurrent node constant initial states of its own.

    Operators that begin with the same zeros share them, the more so once onnxruntime has merged equal constants. The
    first steps of a layer would then be wired otherwise than the later ones, which take in a state each.
    """
    constants = {t.name: t for t in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type in {"LSTM", "GRU", "RNN"}:
            for slot in range(5, min(7, len(node.input))):
                if node.input[slot] in constants:
                    own = model.graph.initializer.add()
                    own.CopyFrom(constants[node.input[slot]])
                    own.name = node.input[slot] = f"{prefix}{node.name}/initial_{'hc'[slot - 5]}"


def _node_types(model: onnx.ModelProto, folder: Path) -> dict[str, TensorInfo]:
    """Return the types of all values; the lengths of attention caches, and of what is made of them, are unknown.

    How long a cache is depends on a request's values (``total_sequence_length``), while onnxruntime infers the shape of
    the cache that comes in. So types are inferred once more, with the caches as inputs of unknown length.
    """
    types = _inferred_types(model, folder)
    caches = _caches(model, types)
    if not caches:
        return types
    fed = onnx.ModelProto()
    fed.CopyFrom(model)
    for node in fed.graph.node:
        for at, name in enumerate(node.output):
            node.output[at] = f"{name}/inferred" if name in caches else name
    kept = [o for o in fed.graph.output if o.name not in caches]
    del fed.graph.output[:]
    fed.graph.output.extend(kept)
    fed.graph.input.extend(
        onnx.helper.make_tensor_value_info(c.name, element_type(c.type), c.shape) for c in caches.values()
    )
    return types | _inferred_types(fed, folder) | caches


def _inferred_types(model: onnx.ModelProto, folder: Path) -> dict[str, TensorInfo]:
    """Declare every value a graph output, and see what onnxruntime makes of it."""
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    declared = {o.name for o in probe.graph.output}
    for node in probe.graph.node:
        for name in node.output:
            if name and name not in declared:
                declared.add(name)
                probe.graph.output.add().name = name
    types = _probe_types(probe, folder)
    # onnxruntime shows an unknown rank as it shows a scalar. The shape of their shapes tells them apart.
    unclear = [info.name for info in types.values() if info.shape == () and info.type in ELEMENT_BYTES]
    for name in unclear:
        probe.graph.node.add(op_type="Shape", input=[name], output=[f"{name}/shape"])
        probe.graph.output.add().name = f"{name}/shape"
    ranks = _probe_types(probe, folder) if unclear else {}
    unknown = {name: replace(types[name], shape=None) for name in unclear if ranks[f"{name}/shape"].shape != (0,)}
    return types | unknown


def _caches(model: onnx.ModelProto, types: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the caches that attention operators hand out, with an unknown length."""
    found = {}
    for node in model.graph.node:
        if node.domain == "com.microsoft" and node.op_type in _CACHING:
            for name in filter(None, node.output[1:3]):
                shape = types[name].shape
                found[name] = replace(types[name], shape=shape and (*shape[:2], None, *shape[3:]))
    return found


def _probe_types(probe: onnx.ModelProto, folder: Path) -> dict[str, TensorInfo]:
    options = _quiet_options(ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    for key, value in weights_folder_option(folder).items():
        options.add_session_config_entry(key, value)
    session = _open_session(probe, options, "optimised model")
    arguments = [*session.get_inputs(), *session.get_outputs()]
    return {a.name: TensorInfo(a.name, a.type, tuple(a.shape)) for a in arguments}


def _quiet_options(level: ort.GraphOptimizationLevel) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_prepacking", "1")
    return options


def _serialised(proto: onnx.ModelProto, where: str) -> bytes:
    try:
        return bytes(proto.SerializeToString())
    except (ValueError, EncodeError) as error:
        raise ModelError(f"{where}: more than 2 GB in memory", hint=_TOO_LARGE) from error


def _open_session(proto: onnx.ModelProto, options: ort.SessionOptions, where: str) -> ort.InferenceSession:
    content = _serialised(proto, where)
    try:
        return ort.InferenceSession(content, options, ["CPUExecutionProvider"], enable_fallback=0)
    except Exception as error:
        raise ModelError(f"{where}: onnxruntime refuses it: {first_line(error)}") from error
