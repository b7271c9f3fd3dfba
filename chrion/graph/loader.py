"""Loading an ONNX model as a Graph.

The stages, in the order of :func:`load`:

1. Read the model without its external weights (:mod:`chrion.graph.reading`).
2. Write the given shapes into its inputs (:mod:`chrion.graph.input_shapes`).
3. Let onnxruntime apply its basic optimisation once. The weights go to one file beside the optimised model, and every
   node and weight gets a unique name (:mod:`chrion.graph.optimise`).
4. Infer the type of every value (:mod:`chrion.graph.type_inference`).
5. Group the nodes that must not be separated into operators (:mod:`chrion.graph.assemble`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from chrion.errors import ModelError
from chrion.graph.assemble import assemble
from chrion.graph.input_shapes import declared_shape, fix_shapes
from chrion.graph.model import Graph, ModelMetadata, TensorInfo
from chrion.graph.optimise import name_nodes, optimise_model
from chrion.graph.reading import read_model, serialise
from chrion.graph.type_inference import infer_types
from chrion.graph.weights_folder import WeightsFolder

_BASIC, _PLAIN = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC, ort.GraphOptimizationLevel.ORT_DISABLE_ALL


def load(
    source: str | Path | bytes | onnx.ModelProto,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    optimise: bool = True,
) -> Graph:
    """Load a model as a graph of operators.

    Args:
        source: A model file (its external data is read from the same folder), its bytes, or a ModelProto.
        shapes: Shapes for inputs with free dimensions, by input name; or one size by the name of a free dimension.
        optimise: Apply onnxruntime's basic optimisation. If false, the operators are those of the file, to which
            published operator counts refer; all other purposes need the optimisation.

    Returns:
        The graph. If a free dimension has no shape, the graph can be inspected, but not profiled or planned.

    Raises:
        ModelError: The file does not exist or is too large, it is not an ONNX model, onnxruntime refuses it, or one of
            its values is a map.
        ShapeError: A shape names no input or free dimension, or contradicts the model.
        UnsafeModelError: The model refers to files outside its own folder.
    """
    proto, path = read_model(source)
    given = {name: tuple(shape) for name, shape in (shapes or {}).items()}
    values = (*proto.graph.input, *proto.graph.output) if given else proto.graph.input
    declared = {v.name: declared_shape(v) for v in values if v.type.HasField("tensor_type")}
    original = path or serialise(proto, "model")
    fix_shapes(proto, given)
    folder = WeightsFolder()
    model, types, session = _optimised(proto, path, folder.path, basic=optimise)
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


def reassemble(graph: Graph, model: onnx.ModelProto) -> Graph:
    """Build the graph of a rewritten model.

    Args:
        graph: The graph that was rewritten.
        model: The rewritten model, with the same inputs, outputs and weights but other nodes.

    Raises:
        ModelError: onnxruntime refuses the rewritten model.
    """
    name_nodes(model)
    return assemble(
        name=graph.name,
        model=model,
        types=infer_types(model, graph.weights_folder),
        declared_inputs=graph.declared_inputs,
        declared_outputs=graph.declared_outputs,
        overridable=graph.overridable,
        metadata=graph.metadata,
        source=graph.source,
        optimised=graph.optimised,
        shapes=graph.shapes,
        folder=graph.folder,
    )


def _optimised(
    proto: onnx.ModelProto, path: Path | None, folder: Path, *, basic: bool
) -> tuple[onnx.ModelProto, dict[str, TensorInfo], ort.InferenceSession]:
    """Return the optimised model, the types of its values, and the session that optimised it."""
    try:
        return _optimised_to(proto, path, folder, _BASIC if basic else _PLAIN)
    except ModelError:
        # onnxruntime optimises some models into ones that it refuses afterwards; it accepts them unoptimised.
        return _optimised_to(proto, path, folder, _PLAIN)


def _optimised_to(
    proto: onnx.ModelProto, path: Path | None, folder: Path, level: ort.GraphOptimizationLevel
) -> tuple[onnx.ModelProto, dict[str, TensorInfo], ort.InferenceSession]:
    model, session = optimise_model(proto, path, folder, level)
    return model, infer_types(model, folder), session


def _refuse_maps(types: Mapping[str, TensorInfo], where: str) -> None:
    for info in types.values():
        if "map(" in info.type:
            raise ModelError(f"{where}: value {info.name!r} is a {info.type}; maps are not supported")


def _declared(
    arguments: Sequence[ort.NodeArg], shapes: Mapping[str, tuple[int | str | None, ...] | None]
) -> tuple[TensorInfo, ...]:
    """Return a session's inputs or outputs with the shapes that the model declares."""
    return tuple(TensorInfo(a.name, a.type, shapes.get(a.name, tuple(a.shape))) for a in arguments)


def _metadata(session: ort.InferenceSession) -> ModelMetadata:
    """Return a copy of a model's metadata: onnxruntime's own object keeps the session and its weights alive."""
    found = session.get_modelmeta()

    def read(name: str, default: Any = "") -> Any:
        try:
            return getattr(found, name)
        except UnicodeDecodeError:  # the model runs even if this text is not UTF-8
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
