"""Matrix products as the native operator ``Linear`` of ``chrion/native/linear.c``, which multiplies in bfloat16.

A MatMul or Gemm whose second factor is a constant matrix becomes one node of the domain ``chrion`` with the same inputs
and outputs. Sums are float32, so that outputs differ by the rounding of both factors.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import helper

from chrion.graph.rewrite import NATIVE, STANDARD, RewriteError, float_attribute, int_attribute

OPERATOR = "Linear"
#: The first opset in which the bias of a Gemm is broadcast without an attribute.
_FIRST_OPSET = 7


def is_product(node: onnx.NodeProto) -> bool:
    """Return whether a node is a matrix product of ONNX."""
    return node.op_type in {"MatMul", "Gemm"} and node.domain in STANDARD


def native_product(
    node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto], opset: int, *, split: int
) -> onnx.NodeProto:
    """Return the native operator that computes what a matrix product computes, in bfloat16.

    Args:
        node: The product.
        weights: The constants of its model, by name.
        opset: The version of ONNX's operators in the model.
        split: The number of threads that its outputs are divided among.

    Raises:
        RewriteError: There is no such native operator.
    """
    if opset < _FIRST_OPSET:
        raise RewriteError(f"is of opset {opset}: expected {_FIRST_OPSET} or later", node)
    factor = _constant(node, weights, 1)
    if factor is None:
        raise RewriteError("has no constant second factor", node)
    if len(factor.dims) != 2 or not all(factor.dims):
        raise RewriteError(f"has a second factor of shape {list(factor.dims)}: expected a matrix", node)
    columns = node.op_type == "MatMul" or not int_attribute(node, "transB", 0)
    outputs = factor.dims[1 if columns else 0]
    inputs = list(node.input[:2])
    if node.op_type == "Gemm":
        inputs += _bias(node, weights, outputs)
    linear = helper.make_node(
        OPERATOR, inputs, list(node.output), node.name, domain=NATIVE, width=outputs, columns=int(columns), split=split
    )
    linear.metadata_props.extend(node.metadata_props)
    return linear


def _bias(node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto], outputs: int) -> list[str]:
    """Return the name of the bias of a Gemm, or nothing if it has none."""
    given = len(node.input) > 2 and bool(node.input[2])
    if int_attribute(node, "transA", 0):
        raise RewriteError("transposes its first factor", node)
    if float_attribute(node, "alpha", 1.0) != 1.0 or (given and float_attribute(node, "beta", 1.0) != 1.0):
        raise RewriteError("has alpha or beta: expected 1", node)
    if not given:
        return []
    bias = _constant(node, weights, 2)
    if bias is None:
        raise RewriteError("has no constant bias", node)
    if list(bias.dims) not in ([outputs], [1, outputs]):
        raise RewriteError(f"has a bias of shape {list(bias.dims)}: expected {outputs} elements", node)
    return [node.input[2]]


def _constant(node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto], at: int) -> onnx.TensorProto | None:
    """Return a constant input of float32, or None if it is not constant."""
    tensor = weights.get(node.input[at])
    if tensor is not None and tensor.data_type != onnx.TensorProto.FLOAT:
        element = onnx.TensorProto.DataType.Name(tensor.data_type)
        raise RewriteError(f"has a factor or a bias of type {element}: expected float32", node)
    return tensor
