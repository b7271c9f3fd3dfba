"""Patterns of operators that exporters write: subgraphs that onnxruntime fuses, and shapes computed at run time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import helper

from helpers import node
from random_models import BOOL, FLOAT, FREE, INT8, INT64, UINT8, Draft, Shape, UnfitError, Value, fixed

MICROSOFT = "com.microsoft"


def shape_of(value: Value) -> Shape:
    assert value.shape is not None
    return value.shape


def scalar(d: Draft, number: float) -> Value:
    return d.weight_of(np.float32(number))


# Fusions.


def dense(d: Draft, x: Value | None = None) -> None:
    """Add one or two pairs of MatMul and Add with shared weights, of rank 2 or 3, which onnxruntime fuses to Gemms."""
    x = x or d.choose({FLOAT}, ranks=range(2, 4), least=1)
    inner = fixed(x, -1)
    weight, bias = d.weight(FLOAT, (inner, inner)), d.weight(FLOAT, (inner,))
    for _ in range(d.pick.randint(1, 2)):
        product = d.emit("MatMul", [x, weight], FLOAT, shape_of(x))
        operands: list[Value | None] = [product, bias]
        d.pick.shuffle(operands)
        x = d.emit("Add", operands, FLOAT, shape_of(x))
        if d.pick.random() < 0.6:
            x = d.emit(d.pick.choice(["Relu", "Tanh", "Sigmoid"]), [x], FLOAT, shape_of(x))


def gelu(d: Draft) -> None:
    """Add a Gelu of elementary operators, with shared scalars."""
    x = d.choose({FLOAT})
    shape = shape_of(x)
    spread = d.emit("Erf", [d.emit("Div", [x, scalar(d, math.sqrt(2))], FLOAT, shape)], FLOAT, shape)
    gate = d.emit("Add", [spread, scalar(d, 1.0)], FLOAT, shape)
    product = d.emit("Mul", [x, gate], FLOAT, shape)
    d.emit("Mul", [product, scalar(d, 0.5)], FLOAT, shape)


def layer_norm(d: Draft) -> Value:
    """Add a layer normalisation: the operator, or elementary operators."""
    x = d.choose({FLOAT}, ranks=range(2, 4), least=2)
    size, shape = fixed(x, -1), shape_of(x)
    gain, shift = d.weight(FLOAT, (size,)), d.weight(FLOAT, (size,))
    if d.pick.random() < 0.5:
        return d.emit("LayerNormalization", [x, gain, shift], FLOAT, shape, axis=-1)
    centred = d.emit("Sub", [x, mean(d, x)], FLOAT, shape)
    squared = d.emit("Pow", [centred, scalar(d, 2.0)], FLOAT, shape)
    variance = mean(d, squared)
    spread = d.emit(
        "Sqrt", [d.emit("Add", [variance, scalar(d, 1e-3)], FLOAT, shape_of(variance))], FLOAT, shape_of(variance)
    )
    normal = d.emit("Div", [centred, spread], FLOAT, shape)
    return d.emit("Add", [d.emit("Mul", [normal, gain], FLOAT, shape), shift], FLOAT, shape)


def mean(d: Draft, x: Value) -> Value:
    """Add the mean over the last axis, which is an attribute before opset 18."""
    shape = (*shape_of(x)[:-1], 1)
    if d.opset < 18:
        return d.emit("ReduceMean", [x], FLOAT, shape, axes=[-1])
    return d.emit("ReduceMean", [x, d.weight_of(np.array([-1]))], FLOAT, shape)


def attention(d: Draft) -> None:
    """Add a transformer layer with two heads over the middle axis; the first axis may be free."""
    source = d.choose({FLOAT}, ranks=range(3, 4), least=1)
    batch, steps, size = shape_of(source)
    if isinstance(steps, str) or isinstance(size, str) or size % 2:
        raise UnfitError
    split, joined = d.weight_of(np.array([0, 0, 2, size // 2])), d.weight_of(np.array([0, 0, size]))
    gain, shift = d.weight(FLOAT, (size,)), d.weight(FLOAT, (size,))
    x = d.emit("LayerNormalization", [source, gain, shift], FLOAT, shape_of(source), axis=-1)

    def projected(value: Value) -> Value:
        product = d.emit("MatMul", [value, d.weight(FLOAT, (size, size))], FLOAT, shape_of(x))
        return d.emit("Add", [d.weight(FLOAT, (size,)), product], FLOAT, shape_of(x))

    def parted(perm: list[int]) -> Value:
        each = d.emit("Reshape", [projected(x), split], FLOAT, (batch, steps, 2, size // 2))
        return d.emit("Transpose", [each], FLOAT, tuple(shape_of(each)[axis] for axis in perm), perm=perm)

    scores = d.emit("MatMul", [parted([0, 2, 1, 3]), parted([0, 2, 3, 1])], FLOAT, (batch, 2, steps, steps))
    scaled = d.emit("Div", [scores, scalar(d, math.sqrt(size / 2))], FLOAT, shape_of(scores))
    weights = d.emit("Softmax", [scaled], FLOAT, shape_of(scores), axis=-1)
    mixed = d.emit("MatMul", [weights, parted([0, 2, 1, 3])], FLOAT, (batch, 2, steps, size // 2))
    back = d.emit("Transpose", [mixed], FLOAT, (batch, steps, 2, size // 2), perm=[0, 2, 1, 3])
    out = projected(d.emit("Reshape", [back, joined], FLOAT, shape_of(x)))
    dense(d, d.emit("Add", [out, x], FLOAT, shape_of(x)))


def convolution(d: Draft) -> None:
    """Add a convolution, batch normalisation, sum and activation, which onnxruntime fuses to one operator."""
    x = d.choose({FLOAT}, ranks=range(4, 5), least=1)
    channels = fixed(x, 1)
    numbers = [d.weight(FLOAT, (channels,)) for _ in range(3)]
    variance = d.weight_of(np.full(channels, 0.7, np.float32))
    kernel = d.weight(FLOAT, (channels, channels, 3, 3))
    made = d.emit("Conv", [x, kernel], FLOAT, shape_of(x), kernel_shape=[3, 3], pads=[1] * 4)
    made = d.emit("BatchNormalization", [made, *numbers, variance], FLOAT, shape_of(x))
    if d.pick.random() < 0.5:
        made = d.emit("Add", [made, x], FLOAT, shape_of(x))
    d.emit(d.pick.choice(["Relu", "Sigmoid", "HardSigmoid"]), [made], FLOAT, shape_of(x))


def transposed_product(d: Draft) -> None:
    """Add a product with a transposed and scaled operand, which onnxruntime fuses to one operator of its own."""
    x = d.choose({FLOAT}, ranks=range(2, 3), least=1)
    turned = d.emit("Transpose", [x], FLOAT, shape_of(x)[::-1], perm=[1, 0])
    scaled = d.emit("Mul", [turned, scalar(d, 0.25)], FLOAT, shape_of(turned))
    d.emit("MatMul", [scaled, x], FLOAT, (shape_of(x)[1], shape_of(x)[1]))


def quantised(d: Draft) -> None:
    """Add a product between QuantizeLinear and DequantizeLinear, which onnxruntime replaces by integer arithmetic.

    No quantisation step divides another, so that no product lies half-way between two levels.
    """
    x = d.choose({FLOAT}, ranks=range(2, 3), least=1)
    inner = fixed(x, -1)
    middle, none = d.weight_of(np.uint8(128)), d.weight_of(np.int8(0))
    restored = [d.weight(INT8, (inner, inner)), scalar(d, 0.0313), none]
    weight = d.emit("DequantizeLinear", restored, FLOAT, (inner, inner))

    def rounded(value: Value, step: float) -> Value:
        whole = d.emit("QuantizeLinear", [value, scalar(d, step), middle], UINT8, shape_of(value))
        return d.emit("DequantizeLinear", [whole, scalar(d, step), middle], FLOAT, shape_of(value))

    rounded(d.emit("MatMul", [rounded(x, 0.0517), weight], FLOAT, shape_of(x)), 0.0471)


# Computed shapes and omitted inputs.


def reshaped_by_shape(d: Draft) -> None:
    """Add a Reshape to a shape computed from the value's own, as PyTorch exports ``x.view(x.size(0), -1)``."""
    x = d.choose(ranks=range(2, 5), least=1)
    if FREE in shape_of(x)[1:]:
        raise UnfitError
    first, zero, axis = shape_of(x)[0], d.weight_of(np.int64(0)), d.weight_of(np.array([0]))
    whole = d.emit("Shape", [x], INT64, (x.rank,))
    size = d.emit("Gather", [whole, zero], INT64, ())
    listed = d.emit("Unsqueeze", [size, axis], INT64, (1,))
    target = d.emit("Concat", [listed, d.weight_of(np.array([-1]))], INT64, (2,), axis=0)
    d.emit("Reshape", [x, target], x.kind, (first, math.prod(s for s in shape_of(x)[1:] if isinstance(s, int))))


def ranges(d: Draft) -> None:
    """Add a Gather by positions along an axis, as in embeddings."""
    x = d.choose(ranks=range(1, 4), least=1)
    size = d.emit("Gather", [d.emit("Shape", [x], INT64, (x.rank,)), d.weight_of(np.int64(0))], INT64, ())
    at = d.emit("Range", [d.weight_of(np.int64(0)), size, d.weight_of(np.int64(1))], INT64, (shape_of(x)[0],))
    wrapped = d.emit("Mod", [at, d.weight_of(np.int64(3))], INT64, shape_of(at))
    d.emit("Gather", [d.weight(FLOAT, (3, 4)), wrapped], FLOAT, (shape_of(x)[0], 4))


def resized(d: Draft) -> None:
    """Add a Resize with an omitted input in the middle."""
    x = d.choose({FLOAT}, ranks=range(3, 4), least=1)
    doubled = d.weight_of(np.array([1, 1, 2], np.float32))
    d.emit("Resize", [x, None, doubled], FLOAT, (*shape_of(x)[:2], 2 * fixed(x, 2)), mode="nearest")


def temperature(d: Draft) -> None:
    """Add a product with a scalar input of the request."""
    x = d.choose({FLOAT})
    found = [i for i in d.inputs if i.kind == FLOAT and i.shape == ()]
    if not found:
        found = [Value(f"x{len(d.inputs)}", FLOAT, ())]
        d.inputs += found
        d.values += found
    d.emit("Mul", [x, found[0]], FLOAT, shape_of(x))


# Nested graphs and functions, and operators of other domains.


def branch_in_loop(d: Draft) -> None:
    """Add a Loop whose body contains an If; both read a weight of the outermost graph."""
    x = d.choose({FLOAT}, least=1)
    weight, rounds = d.partner(x), d.weight_of(np.int64(2))
    at, going, state, after, odd, start, one, other = (d.new_name() for _ in range(8))

    def arm(op_type: str, out: str) -> Any:
        nodes = [node(op_type, [state, weight.name], [out])]
        return helper.make_graph(nodes, op_type, [], [helper.make_tensor_value_info(out, FLOAT, None)])

    body = helper.make_graph(
        [
            node("Cast", [at], [odd], to=BOOL),
            node("If", [odd], [start], then_branch=arm("Add", one), else_branch=arm("Sub", other)),
            node("Mul", [start, weight.name], [after]),
        ],
        "round",
        [helper.make_tensor_value_info(*i) for i in ((at, INT64, []), (going, BOOL, []), (state, FLOAT, None))],
        [helper.make_tensor_value_info(*o) for o in ((going, BOOL, []), (after, FLOAT, None))],
    )
    last = d.new_name()
    d.add("Loop", [rounds, None, x], [last], body=body)
    d.loose.append(Value(last, FLOAT, None))


def nested_function(d: Draft) -> None:
    """Add a call of a function that calls another function of the model."""
    x = d.choose({FLOAT})
    opsets = [helper.make_opsetid("", d.opset), helper.make_opsetid("local", 1)]
    if not any(f.name == "Twice" for f in d.functions):
        square = helper.make_function("local", "Half", ["a"], ["b"], [node("Tanh", ["a"], ["b"])], opsets)
        calls = [node("Half", ["a"], ["m"], domain="local"), node("Half", ["m"], ["b"], domain="local")]
        d.functions += [square, helper.make_function("local", "Twice", ["a"], ["b"], calls, opsets)]
    d.emit("Twice", [x], FLOAT, shape_of(x), domain="local")


def of_microsoft(d: Draft) -> None:
    """Add an operator of onnxruntime's own domain, as its optimiser and PyTorch's exporter write them."""
    x = d.choose({FLOAT}, ranks=range(2, 4), least=1)
    size = fixed(x, -1)
    d.domains.add(MICROSOFT)
    kind = d.pick.choice(["Gelu", "QuickGelu", "BiasGelu", "FusedMatMul", "SkipLayerNormalization"])
    shape, rest = shape_of(x), {"domain": MICROSOFT}
    if kind == "BiasGelu":
        d.emit(kind, [x, d.weight(FLOAT, (size,))], FLOAT, shape, **rest)
    elif kind == "FusedMatMul":
        d.emit(kind, [x, d.weight(FLOAT, (3, size))], FLOAT, (*shape[:-1], 3), transB=1, alpha=0.5, **rest)
    elif kind == "SkipLayerNormalization":
        d.emit(kind, [x, x, d.weight(FLOAT, (size,))], FLOAT, shape, epsilon=1e-3, **rest)
    else:
        d.emit(kind, [x], FLOAT, shape, **rest)


PATTERNS = [
    *[dense, gelu, layer_norm, attention, convolution, transposed_product, quantised],
    *[reshaped_by_shape, ranges, resized, temperature],
    *[branch_in_loop, nested_function, of_microsoft],
]
