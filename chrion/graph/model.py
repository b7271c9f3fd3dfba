"""A loaded model: its operators as a Dag, the ONNX nodes behind them, and the types of its values."""

from __future__ import annotations

import functools
import hashlib
import math
import shlex
from collections.abc import Hashable, Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from chrion.common.units import format_shape
from chrion.errors import ShapeError
from chrion.graph.dag import Dag
from chrion.graph.opened_model import OpenedModel
from chrion.graph.weights_folder import WeightsFolder

if TYPE_CHECKING:
    import onnx

#: Bytes of one element, by the type's name in onnxruntime. Values of other types are never passed between segments.
ELEMENT_BYTES = {
    "tensor(float)": 4,
    "tensor(double)": 8,
    "tensor(float16)": 2,
    "tensor(bfloat16)": 2,
    "tensor(int8)": 1,
    "tensor(int16)": 2,
    "tensor(int32)": 4,
    "tensor(int64)": 8,
    "tensor(uint8)": 1,
    "tensor(uint16)": 2,
    "tensor(uint32)": 4,
    "tensor(uint64)": 8,
    "tensor(bool)": 1,
}


@functools.cache
def element_code(kind: str) -> int:
    """Return ONNX's number for a tensor type as onnxruntime writes it, ``tensor(float)`` for example."""
    from onnx import TensorProto  # noqa: PLC0415 - plain sessions do not need it

    return int(TensorProto.DataType.Value(kind.removeprefix("tensor(").removesuffix(")").upper()))


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The name, type and shape of a value, with the attributes of onnxruntime's ``NodeArg``."""

    name: str
    #: As onnxruntime writes it: ``tensor(float)``, ``seq(tensor(int64))``; empty where unknown.
    type: str
    #: The dimensions, of which an unknown one is a name or None; None if the rank is unknown.
    shape: tuple[int | str | None, ...] | None

    @property
    def bytes(self) -> int | None:
        """Size in bytes; None if it depends on the data or on a free dimension, or is not fixed for the type."""
        if self.shape is None or self.type not in ELEMENT_BYTES:
            return None
        fixed = self.fixed_dimensions
        return math.prod(fixed) * ELEMENT_BYTES[self.type] if len(fixed) == len(self.shape) else None

    @property
    def free(self) -> bool:
        """True for a tensor with an unknown dimension or rank."""
        fixed = self.shape is not None and all(isinstance(d, int) for d in self.shape)
        return self.type.startswith("tensor(") and not fixed

    @property
    def fixed_dimensions(self) -> tuple[int, ...]:
        """The known dimensions: the shape of a tensor without free ones."""
        return tuple(d for d in self.shape or () if isinstance(d, int))

    def __str__(self) -> str:
        kind = self.type.removeprefix("tensor(").removesuffix(")") if self.type else "?"
        return f"{kind}[{'?' if self.shape is None else format_shape(self.shape)}]"


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Metadata that a model file contains, with the attributes of onnxruntime's class of the same name."""

    producer_name: str
    graph_name: str
    domain: str
    description: str
    graph_description: str
    version: int
    custom_metadata_map: Mapping[str, str]


class Tensors(Protocol):
    """Types of a graph's values, and its constants."""

    @property
    def inputs(self) -> Sequence[TensorInfo]:
        """Inputs that a request must provide."""

    @property
    def outputs(self) -> Sequence[TensorInfo]:
        """Outputs of the graph."""

    @property
    def values(self) -> Mapping[str, TensorInfo]:
        """Types and shapes by name."""

    def constant(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return the value of a weight, or None for any other value."""


@dataclass(frozen=True, slots=True)
class SelectedTensors:
    """The part of a graph that requests need once its segments are open: the values between segments."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    values: Mapping[str, TensorInfo]
    constants: Mapping[str, np.ndarray[Any, Any]]

    def constant(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return the value of a weight that a segment has as an input, or None for any other value."""
        return self.constants.get(name)


@dataclass(frozen=True, eq=False)
class Graph:
    """A model that can be profiled, planned and cut. Use :func:`chrion.load` to create one."""

    #: The model file's stem, or the graph's own name.
    name: str
    #: The model after onnxruntime's basic optimisation. Weights of a kilobyte or more are in a file in ``folder``,
    #: except for integers that may be shapes.
    model: onnx.ModelProto
    dag: Dag
    #: The nodes of every operator of ``dag``, as indices into ``model.graph.node``.
    nodes: tuple[tuple[int, ...], ...]
    #: Graph inputs, weights and node outputs, by name.
    values: Mapping[str, TensorInfo]
    #: Inputs that a request must provide; weights that are also listed as inputs are not among them.
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    #: The original model, from which onnxruntime sessions of the whole model are created.
    source: OpenedModel
    #: The file as it was given; None for a model that is none. Beside it are the files that belong to the model.
    file: Path | None
    #: Inputs and outputs as the model declares them, with free dimensions by name.
    declared_inputs: tuple[TensorInfo, ...]
    declared_outputs: tuple[TensorInfo, ...]
    #: Weights that the model also lists as inputs. They are constants of the graph; a request may override them.
    overridable: tuple[TensorInfo, ...]
    metadata: ModelMetadata
    #: True if onnxruntime's basic optimisation was applied.
    optimised: bool
    #: Shapes that were given for inputs with free dimensions.
    shapes: Mapping[str, tuple[int, ...]]
    #: The folder of the weights' file, which is removed with the graph.
    folder: WeightsFolder = field(repr=False)
    #: Cached variants with rewritten operators, by the rewrite and its arguments; None if it changes nothing.
    #: See :mod:`chrion.graph.variants`.
    variants: dict[Hashable, Graph | None] = field(default_factory=dict, repr=False)

    @cached_property
    def declared_free(self) -> bool:
        """True if the model declares free dimensions for its inputs."""
        return any(i.free for i in self.declared_inputs)

    @cached_property
    def _initialisers(self) -> dict[str, onnx.TensorProto]:
        return {t.name: t for t in self.model.graph.initializer}

    @property
    def weight_names(self) -> KeysView[str]:
        """The names of the weights."""
        return self._initialisers.keys()

    def constant(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return the value of a weight, read from the weights' file, or None for any other value."""
        from onnx.numpy_helper import to_array  # noqa: PLC0415 - as above

        tensor = self._initialisers.get(name)
        return None if tensor is None else to_array(tensor, str(self.weights_folder)).copy()

    def select(self, names: Iterable[str]) -> SelectedTensors:
        """Return the graph's inputs and outputs and some of its values, without a reference to the graph."""
        chosen = {*names, *(info.name for info in (*self.inputs, *self.outputs))}
        constants = {name: value for name in chosen if (value := self.constant(name)) is not None}
        return SelectedTensors(self.inputs, self.outputs, {name: self.values[name] for name in chosen}, constants)

    @property
    def weights_folder(self) -> Path:
        """The folder that the locations of weights are relative to.

        Raises:
            ModelError: A file of the original model, from which large weights are read, has changed.
        """
        return self.folder.root

    @cached_property
    def free_dimensions(self) -> tuple[str, ...]:
        """Inputs with unknown dimensions, as ``x[batchx3x?]``; only a graph without any can be planned."""
        return tuple(f"{i.name}[{'?' if i.shape is None else format_shape(i.shape)}]" for i in self.inputs if i.free)

    def require_shapes(self) -> None:
        """Raise an error if an input has a free dimension.

        Raises:
            ShapeError: One has.
        """
        if self.free_dimensions:
            sizes = _example_shapes(self.inputs)
            options = " ".join(f"--shape {shlex.quote(f'{name}={format_shape(size)}')}" for name, size in sizes.items())
            argument = {name: size[0] if len(size) == 1 else size for name, size in sizes.items()}
            hint = f"fix them, for example with {options}; in Python, load(MODEL, shapes={argument})"
            raise ShapeError(f"model {self.name}: free dimensions in {', '.join(self.free_dimensions)}", hint=hint)

    @cached_property
    def digest(self) -> str:
        """A hash of what a plan depends on: operators, names, shapes and edges, but not the values of weights."""
        text = hashlib.sha256()
        for i, name in enumerate(self.dag.names):
            text.update(
                f"{name}\0{self.dag.signatures[i]}\0{self.dag.predecessors[i]}\0{self.dag.weights[i]}\n".encode()
            )
        return text.hexdigest()[:32]

    def __repr__(self) -> str:
        return f"<Graph {self.name}: {len(self.dag)} operators, {len(self.dag.weight_bytes)} weights>"


def _example_shapes(inputs: Sequence[TensorInfo]) -> dict[str, tuple[int, ...]]:
    """Return shapes that fix all free dimensions to 1: one size for a named dimension, else the shape of an input."""
    shapes: dict[str, tuple[int, ...]] = {}
    names = {info.name for info in inputs}
    for info in inputs:
        free = [d for d in info.shape or (None,) if not isinstance(d, int)] if info.free else []
        if any(d is None or d in names for d in free):
            shapes[info.name] = tuple(d if isinstance(d, int) else 1 for d in info.shape or (1,))
        else:
            shapes |= {d: (1,) for d in free if d is not None}
    return shapes
