"""Floating point operations of an ONNX node, from which the time of unmeasured operators is estimated."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx

from chrion.graph.model import TensorInfo


def node_flops(node: onnx.NodeProto, values: Mapping[str, TensorInfo]) -> float:
    """Return the floating point operations of a node; a multiply-add counts as two.

    Convolutions, matrix products and recurrent cells are counted from their shapes. Any other node, or one whose first
    two inputs do not both have a known shape, counts one operation per element of its first output, or zero if the
    shape of that output is unknown.
    """
    inputs = [_shape(values.get(name)) for name in node.input]
    outputs = [_shape(values.get(name)) for name in node.output if name]
    elements = math.prod(outputs[0]) if outputs and outputs[0] is not None else 0
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    first, second = (*inputs, None, None)[:2]
    if first is None or second is None or not first or not second:
        return float(elements)
    match node.op_type:
        case "LSTM" | "GRU" | "RNN" if len(first) == 3:
            recurrence = (inputs[2] or (0, 0, 0))[-1]
            flops = 2.0 * math.prod(second[:2]) * (second[2] + recurrence) * first[0] * first[1]
        case "Conv" | "FusedConv":
            flops = 2.0 * elements * math.prod(second[1:])
        case "ConvTranspose":
            flops = 2.0 * math.prod(first) * math.prod(second[1:])
        case "MatMul" | "FusedMatMul" | "MatMulInteger":
            flops = 2.0 * elements * first[-1]
        case "Gemm":
            flops = 2.0 * elements * (first[0] if attributes.get("transA") else first[-1])
        case _:
            flops = float(elements)
    return flops


def _shape(info: TensorInfo | None) -> tuple[int, ...] | None:
    if info is None or info.shape is None:
        return None
    fixed = tuple(d for d in info.shape if isinstance(d, int))
    return fixed if len(fixed) == len(info.shape) else None
