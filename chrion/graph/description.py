"""Description of a model: inputs, outputs, replaceable weights and metadata, as an onnxruntime session reports them.

All of it is copied, because onnxruntime's own objects keep their session and its weights alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
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
    def read(name: str) -> Any:
        try:
            return getattr(described, name)
        except UnicodeDecodeError:  # the model runs even if this text is not UTF-8
            return {} if name == "custom_metadata_map" else ""

    return ModelMetadata(**{one.name: read(one.name) for one in fields(ModelMetadata)})
