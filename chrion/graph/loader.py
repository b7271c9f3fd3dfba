"""Loading an ONNX model as a Graph.

The stages, in the order of :func:`load`:

1. Read the model without its external weights, and move large ones that are not external to files
   (:mod:`chrion.graph.reading`, :mod:`chrion.graph.embedded_weights`).
2. Write the given shapes into its inputs (:mod:`chrion.graph.input_shapes`).
3. Let onnxruntime apply its basic optimisation once. The weights go to one file beside the optimised model, except for
   large ones, which stay in the files of the original model (:mod:`chrion.graph.source_weights`). Every node and weight
   gets a unique name (:mod:`chrion.graph.optimise`).
4. Infer the type of every value (:mod:`chrion.graph.type_inference`).
5. Group the nodes that must not be separated into operators (:mod:`chrion.graph.assemble`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from chrion.errors import ModelError
from chrion.graph.assemble import assemble
from chrion.graph.description import describe_session
from chrion.graph.external import follow_links
from chrion.graph.input_shapes import as_shape, declared_shape, fix_shapes, free_negative_sizes
from chrion.graph.model import Graph, TensorInfo
from chrion.graph.opened_model import OpenedModel
from chrion.graph.optimise import name_nodes, optimise_model
from chrion.graph.reading import file_size, read_without_weights, serialise
from chrion.graph.source_weights import SourceWeights
from chrion.graph.type_inference import infer_types
from chrion.graph.weights_folder import WeightsFolder, space_for

_BASIC, _PLAIN = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC, ort.GraphOptimizationLevel.ORT_DISABLE_ALL
_ALL = ort.GraphOptimizationLevel.ORT_ENABLE_ALL


def load(
    source: str | Path | bytes | onnx.ModelProto | OpenedModel,
    shapes: Mapping[str, int | Sequence[int]] | None = None,
    *,
    optimise: bool = True,
) -> Graph:
    """Load a model as a graph of operators.

    Args:
        source: A model file (its external data is read from the same folder), its bytes, a ModelProto, or a model that
            was opened before and is loaded as it was then.
        shapes: Shapes for inputs with free dimensions, by input name, ``{"x": (1, 64)}``; or one size by the name of a
            free dimension, ``{"seq": 64}``.
        optimise: Apply onnxruntime's basic optimisation. If false, the operators are those of the file, to which
            published operator counts refer; all other purposes need the optimisation.

    Returns:
        The graph. If a free dimension has no shape, the graph can be inspected, but not profiled or planned.

    Raises:
        ModelError: The file does not exist or is too large, it is not an ONNX model, onnxruntime refuses it, or one of
            its values is a map.
        ShapeError: A shape names no input or free dimension, or contradicts the model.
        UnsafeModelError: The model names files outside of its folder, or its trees would end the process.
        SpaceError: The folder of temporary files has no space for the weights.
    """
    given = {name: as_shape(name, shape) for name, shape in (shapes or {}).items()}
    if isinstance(source, onnx.ModelProto):
        source = serialise(source, "model")
    opened = source if isinstance(source, OpenedModel) else OpenedModel(source)
    return opened.use(lambda content: _load(content, opened, given, optimise=optimise))


def load_kernels(opened: OpenedModel, shapes: Mapping[str, int | Sequence[int]] | None = None) -> Graph:
    """Load a model with all of onnxruntime's optimisations for this CPU, so that its operators are kernels.

    Sub-models of this graph have to be opened without optimisation. They then compute the same bits as the whole model,
    and values between them have the layout of the kernels; cut before, each sub-model would convert them twice.

    Args:
        opened: The model.
        shapes: As for :func:`load`.

    Raises:
        ChrionError: As for :func:`load`.
    """
    given = {name: as_shape(name, shape) for name, shape in (shapes or {}).items()}
    return opened.use(lambda content: _load(content, opened, given, optimise=True, level=_ALL))


def _load(
    content: str | bytes,
    opened: OpenedModel,
    given: Mapping[str, tuple[int, ...]],
    *,
    optimise: bool,
    level: ort.GraphOptimizationLevel = _BASIC,
) -> Graph:
    file = Path(opened.path) if opened.path else None
    size, where = file_size(content), opened.path or "model"
    with space_for(size, where, refused=False):
        folder = WeightsFolder()
        proto, path, moved = read_without_weights(content, folder)
    free_negative_sizes(proto)
    values = (*proto.graph.input, *proto.graph.output) if given else proto.graph.input
    declared = {v.name: declared_shape(v) for v in values if v.type.HasField("tensor_type")}
    fix_shapes(proto, given)
    with space_for(size, where):
        root = folder.path if moved else follow_links(proto, path) if path else None
        # Fusions of the last level may need the values of weights.
        sources = SourceWeights(proto, root, folder, hide=level != _ALL) if root else None
        model, types, session = _optimised(proto, path, folder, sources, level if optimise else _PLAIN)
        if moved:
            folder.remove_unused(model)
    _refuse_maps(types, str(path or "model"))
    description = describe_session(session, declared)
    hidden = sources.names if sources else ()
    return Graph(
        **assemble(model, types, description.metadata),
        name=file.stem if file else proto.graph.name or "model",
        declared_inputs=tuple(info for info in description.inputs if info.name not in hidden),
        declared_outputs=description.outputs,
        overridable=description.overridable,
        metadata=description.metadata,
        source=opened,
        file=file,
        optimised=optimise,
        shapes=given,
        folder=folder,
    )


def reassemble(graph: Graph, model: onnx.ModelProto) -> Graph:
    """Build the graph of a rewritten model.

    Args:
        graph: The graph that was rewritten.
        model: The rewritten model, with the same outputs; inputs and weights may be added or removed.

    Raises:
        ModelError: onnxruntime refuses the rewritten model.
    """
    name_nodes(model)
    rebuilt = assemble(model, infer_types(model, graph.weights_folder), graph.metadata)
    return replace(graph, **rebuilt, variants={})


def _optimised(
    proto: onnx.ModelProto,
    path: Path | None,
    folder: WeightsFolder,
    sources: SourceWeights | None,
    level: ort.GraphOptimizationLevel,
) -> tuple[onnx.ModelProto, dict[str, TensorInfo], ort.InferenceSession]:
    """Return the optimised model, the types of its values, and the session that optimised it."""

    def optimised(level: ort.GraphOptimizationLevel) -> tuple[onnx.ModelProto, dict[str, TensorInfo], Any]:
        model, session = optimise_model(proto, path, folder, level, sources)
        return model, infer_types(model, folder.root), session

    try:
        return optimised(level)
    except ModelError:
        if level == _ALL:  # what it does without them is another function, bit by bit
            raise
        # onnxruntime optimises some models into ones that it refuses afterwards; it accepts them unoptimised.
        return optimised(_PLAIN)


def _refuse_maps(types: Mapping[str, TensorInfo], where: str) -> None:
    for info in types.values():
        if "map(" in info.type:
            raise ModelError(f"{where}: value {info.name!r} is a {info.type}; maps are not supported")
