"""The parts of a split decoder as models that onnxruntime can open."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper, numpy_helper

from chrion.generation.rewrites.observation import Decoder, Size
from chrion.graph.assemble import node_reads
from chrion.graph.rewrite import MICROSOFT, STANDARD, int_attribute, nodes_before, set_int_attribute


@dataclass(frozen=True)
class Part:
    """A part of a split decoder."""

    #: True if it runs once for each request, False if it runs once on the tokens of all requests.
    by_request: bool
    #: The part as a model, whose values have names by their order. Equal parts of several layers are equal models.
    model: bytes
    #: The values that it reads, in the order of the model's inputs ``i0``, ``i1``, ...
    inputs: tuple[str, ...]
    #: The values that it computes, in the order of the model's outputs ``o0``, ``o1``, ...
    outputs: tuple[str, ...]
    #: Its inputs that depend on the numbers of tokens only: their integers, by name.
    sizes: Mapping[str, tuple[Size, ...]]
    #: True if past and present keys and values may be one buffer of a fixed length.
    in_place: bool


@dataclass
class _Draft:
    """A part under construction."""

    #: The labels of values in the part.
    names: dict[str, str]
    model: onnx.ModelProto = field(default_factory=onnx.ModelProto)
    inputs: list[str] = field(default_factory=list)
    sizes: dict[str, tuple[Size, ...]] = field(default_factory=dict)


class PartBuilder:
    """A builder of the parts of one decoder.

    Args:
        decoder: The decoder.
        folded: Values that depend on sizes only.
    """

    def __init__(self, decoder: Decoder, folded: Collection[str]) -> None:
        self._source, self._seen, self._folded = decoder.model, decoder.seen, folded
        self._nodes = list(decoder.model.graph.node)
        self._reads = node_reads(decoder.model)
        self._weights = {t.name: t for t in decoder.model.graph.initializer}

    def build(
        self,
        assignment: Mapping[int, tuple[int, bool]],
        order: Sequence[int],
        results: Collection[str],
        constant: Collection[int],
    ) -> list[Part]:
        """Return the parts in the order in which they run.

        Args:
            assignment: The number of each node's part, and whether it runs by request. Token-wise parts run before
                attention parts of the same number.
            order: The nodes in topological order.
            results: The values that the caller wants.
            constant: Nodes without a part of their own, of which every part that needs one has a copy.
        """
        groups: dict[tuple[int, bool], list[int]] = {}
        read_by: dict[str, set[tuple[int, bool]]] = {}
        for at in order:
            if at not in constant:
                groups.setdefault(assignment[at], []).append(at)
                for name in self._reads[at]:
                    read_by.setdefault(name, set()).add(assignment[at])
        copied = {name: at for at in sorted(constant) for name in self._nodes[at].output if name}
        parts = []
        for key in sorted(groups):
            computed = [name for at in groups[key] for name in self._nodes[at].output if name]
            outputs = [name for name in computed if name in results or read_by.get(name, set()) - {key}]
            copies = nodes_before((name for at in groups[key] for name in self._reads[at]), copied, self._reads)
            parts.append(self._part(sorted({*groups[key]} | copies), outputs, by_request=key[1]))
        return parts

    def _part(self, indices: Iterable[int], outputs: Sequence[str], *, by_request: bool) -> Part:
        draft = _Draft(names={name: f"o{at}" for at, name in enumerate(outputs)})
        model = draft.model
        model.ir_version, model.producer_name, model.graph.name = self._source.ir_version, "chrion", "part"
        model.opset_import.extend(self._source.opset_import)
        model.functions.extend(self._source.functions)
        for index in indices:
            node = model.graph.node.add()
            node.CopyFrom(self._nodes[index])
            for written in ("name", "doc_string", "metadata_props"):
                node.ClearField(written)
            for at, name in enumerate(self._nodes[index].input):
                node.input[at] = self._read(draft, self._nodes[index], at) if name else ""
            for at, name in enumerate(node.output):
                node.output[at] = draft.names.setdefault(name, f"v{len(draft.names)}") if name else ""
            if not by_request and node.op_type == "RotaryEmbedding":
                _rotate_many(model, node)
        for at in range(len(outputs)):
            model.graph.output.add().name = f"o{at}"
        content = model.SerializeToString(deterministic=True)
        in_place = any(node.op_type == "GroupQueryAttention" for node in model.graph.node)
        inputs = tuple(draft.inputs)
        return Part(by_request, content, inputs, tuple(outputs), draft.sizes, in_place)

    def _read(self, draft: _Draft, node: onnx.NodeProto, at: int) -> str:
        """Return the label of an input of a node; a weight or an input of the part is added at its first use."""
        name = node.input[at]
        fixed = self._fixed_shape(node, at)
        if fixed is not None:
            return self._constant(draft.model, fixed)
        if name in draft.names:
            return draft.names[name]
        if name in self._weights:
            label = self._weight(draft.model, name, len(draft.names))
        elif name in self._folded and name in self._seen.constants:
            label = self._constant(draft.model, self._seen.constants[name])
        else:
            label = f"i{len(draft.inputs)}"
            draft.inputs.append(name)
            self._declare(draft.model, name, label)
            if name in self._folded:
                draft.sizes[name] = self._seen.sizes[name]
        draft.names[name] = label
        return label

    def _fixed_shape(self, node: onnx.NodeProto, at: int) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
        """Return a shape without sizes that depend on the request, where a constant says the same.

        In ``Reshape`` a varying size that the data have at the same axis may be 0, and another one may be -1. In
        ``Expand`` a size that the data already have may be 1.
        """
        name = node.input[at]
        if at != 1 or node.op_type not in {"Reshape", "Expand"} or name not in self._folded:
            return None
        shape = self._seen.sizes.get(name, ())
        if all(size.constant for size in shape) or int_attribute(node, "allowzero", 0):
            return None
        data, reshape = self._seen.shapes[node.input[0]], node.op_type == "Reshape"
        fixed = []
        for i, size in enumerate(shape):
            own = i if reshape else i - len(shape) + len(data)
            if size.constant:
                fixed.append(size.fixed)
            elif 0 <= own < len(data) and data[own] == size:
                fixed.append(0 if reshape else 1)
            else:
                fixed.append(-1)
        if fixed.count(-1) > (1 if reshape else 0):
            return None
        return np.array(fixed, np.int64)

    def _weight(self, model: onnx.ModelProto, name: str, number: int) -> str:
        tensor = model.graph.initializer.add()
        tensor.CopyFrom(self._weights[name])
        tensor.name = f"w{number}"
        return tensor.name

    @staticmethod
    def _constant(model: onnx.ModelProto, value: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> str:
        name = f"c{len(model.graph.initializer)}"
        model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name))
        return name

    def _declare(self, model: onnx.ModelProto, name: str, label: str) -> None:
        element = helper.np_dtype_to_tensor_dtype(self._seen.types[name])
        shape = [size.fixed if size is not None and size.constant else None for size in self._seen.shapes[name]]
        model.graph.input.append(helper.make_tensor_value_info(label, element, shape))


def _rotate_many(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """Let a rotation take more tokens, those of several requests, than its tables have rows, in place.

    ONNX's operator with positions cannot do that, com.microsoft's can.
    """
    if node.domain in STANDARD:
        if len(node.input) < 4 or not node.input[3]:
            return
        source, cosines, sines, positions = node.input
        node.input[:], node.domain = [source, positions, cosines, sines], MICROSOFT
        if all(opset.domain != MICROSOFT for opset in model.opset_import):
            model.opset_import.add(domain=MICROSOFT, version=1)
    set_int_attribute(node, "is_packed_batching", 1)
