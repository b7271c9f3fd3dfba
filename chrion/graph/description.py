"""Description of a model: inputs, outputs, replaceable weights and metadata, as an onnxruntime session reports them.

All of it is copied, because onnxruntime's own objects keep their session and its weights alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnxruntime as ort

from chrion.graph.model import ModelMetadata, TensorInfo

Shape = tuple[int | str | None, ...] | None


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Interface and metadata of a model."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    #: Weights that a request may replace.
    overridable: tuple[TensorInfo, ...]
    metadata: ModelMetadata


def describe_session(session: ort.InferenceSession, declared: Mapping[str, Shape] | None = None) -> ModelDescription:
    """Return the description of a session's model.

    Args:
        session: A session of the model.
        declared: Shapes that the model declares, by name, where the session was given others.
    """

    def infos(arguments: Sequence[ort.NodeArg]) -> tuple[TensorInfo, ...]:
        shapes = declared or {}
        return tuple(TensorInfo(a.name, a.type, shapes.get(a.name, tuple(a.shape))) for a in arguments)

    return ModelDescription(
        inputs=infos(session.get_inputs()),
        outputs=infos(session.get_outputs()),
        overridable=infos(session.get_overridable_initializers()),
        metadata=_metadata(session.get_modelmeta()),
    )


def _metadata(described: Any) -> ModelMetadata:
    def read(name: str, default: Any = "") -> Any:
        try:
            return getattr(described, name)
        except UnicodeDecodeError:  # the model runs even if this text is not UTF-8
            return default

    return ModelMetadata(
        producer_name=read("producer_name"),
        graph_name=read("graph_name"),
        domain=read("domain"),
        description=read("description"),
        graph_description=read("graph_description"),
        version=described.version,
        custom_metadata_map=dict(read("custom_metadata_map", {})),
    )
