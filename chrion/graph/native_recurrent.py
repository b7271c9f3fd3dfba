"""Recurrent operators as the native operator ``Recurrent`` of ``chrion/native/recurrent.c``.

An LSTM, GRU or RNN becomes one node of the domain ``chrion`` with the same inputs and outputs. Its attributes are
numbers, and state the parameters of each function of each direction, with onnxruntime's defaults: a custom operator
cannot read lists of texts.

The native operator has constant W, R, B and P, and computes in float32, or multiplies in bfloat16. Outputs differ by
rounding: products are added in another order, and sigmoid and tanh have a relative error below 3e-7.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx
from onnx import helper

from chrion.graph.rewrite import NATIVE, STANDARD, RewriteError, float_attribute, int_attribute, text_attribute

OPERATOR = "Recurrent"
#: The kinds of operators, in the order of their numbers in ``recurrent.h``, each with its functions by default.
_DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
_KINDS = tuple(_DEFAULTS)
#: The gates of each kind.
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
#: The functions, in the order of their numbers in ``recurrent.h``, each with the default values of alpha and beta;
#: None if it does not have the parameter. These are onnxruntime's defaults, which are not always those of ONNX.
_FUNCTIONS: dict[str, tuple[float | None, float | None]] = {
    "sigmoid": (None, None),
    "tanh": (None, None),
    "relu": (None, None),
    "affine": (0.0, 0.0),
    "leakyrelu": (0.01, None),
    "thresholdedrelu": (0.0, None),
    "scaledtanh": (0.0, 0.0),
    "hardsigmoid": (0.2, 0.5),
    "elu": (1.0, None),
    "softsign": (None, None),
    "softplus": (None, None),
}
_NUMBERS = {name: at for at, name in enumerate(_FUNCTIONS)}
#: The first opset whose recurrent operators are those of today.
_FIRST_OPSET = 7
#: The largest float32, to which onnxruntime limits the values of an LSTM or GRU without ``clip``.
_LARGEST = 3.4028234663852886e38
#: The inputs that have to be constant.
_CONSTANT = {1: "W", 2: "R", 3: "B", 7: "P"}


def is_recurrent(node: onnx.NodeProto) -> bool:
    """Return whether a node is an LSTM, GRU or RNN of ONNX."""
    return node.op_type in _DEFAULTS and node.domain in STANDARD


def native_recurrent(
    node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto], opset: int, *, bfloat16: bool, split: int
) -> onnx.NodeProto:
    """Return the native operator that computes what an LSTM, GRU or RNN computes.

    Args:
        node: The operator.
        weights: The constants of its model, by name.
        opset: The version of ONNX's operators in the model.
        bfloat16: Whether it multiplies in bfloat16.
        split: The number of threads that its units are divided among.

    Raises:
        RewriteError: There is no such native operator.
    """
    if opset < _FIRST_OPSET:
        raise RewriteError(f"is of opset {opset}: expected {_FIRST_OPSET} or later", node)
    hidden, directions = _check_weights(node, weights)
    functions = list(_functions(node, directions))
    direction = text_attribute(node, "direction", "forward")
    if direction not in {"forward", "reverse", "bidirectional"} or (direction == "bidirectional") != (directions == 2):
        raise RewriteError(f"has direction {direction!r}, and weights of {directions} directions", node)
    native = helper.make_node(
        OPERATOR,
        list(node.input),
        list(node.output),
        node.name,
        domain=NATIVE,
        kind=_KINDS.index(node.op_type),
        hidden=hidden,
        directions=directions,
        reverse=int(direction == "reverse"),
        layout=int_attribute(node, "layout", 0),
        linear_before_reset=int_attribute(node, "linear_before_reset", 0),
        input_forget=int_attribute(node, "input_forget", 0),
        clip=_clip(node),
        bfloat16=int(bfloat16),
        split=split,
        squeezed=0,
        activations=[_NUMBERS[name] for name, _, _ in functions],
        alpha=[alpha for _, alpha, _ in functions],
        beta=[beta for _, _, beta in functions],
    )
    native.metadata_props.extend(node.metadata_props)
    return native


def _check_weights(node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto]) -> tuple[int, int]:
    """Return the numbers of hidden units and of directions, which the weights have to fit."""
    given = dict(enumerate(node.input))
    for at, label in _CONSTANT.items():
        name = given.get(at, "")
        if name not in weights and (name or label in {"W", "R"}):
            raise RewriteError(f"has no constant {label}", node)
        if name and weights[name].data_type != onnx.TensorProto.FLOAT:
            element = onnx.TensorProto.DataType.Name(weights[name].data_type)
            raise RewriteError(f"has {label} of type {element}: expected float32", node)
    shape = list(weights[given[2]].dims)
    hidden = int_attribute(node, "hidden_size", shape[-1] if shape else 0)
    directions = shape[0] if len(shape) == 3 else 0
    rows = _GATES[node.op_type] * hidden
    if shape != [directions, rows, hidden] or directions not in {1, 2} or hidden < 1:
        raise RewriteError(f"has R of shape {shape}, which does not fit {hidden} hidden units", node)
    if list(weights[given[1]].dims)[:-1] != [directions, rows]:
        raise RewriteError(f"has W of shape {list(weights[given[1]].dims)}, which does not fit R {shape}", node)
    expected = {3: [directions, 2 * rows], 7: [directions, 3 * hidden]}
    for at, sizes in expected.items():
        if given.get(at, "") and list(weights[given[at]].dims) != sizes:
            raise RewriteError(f"has {_CONSTANT[at]} of shape {list(weights[given[at]].dims)}: expected {sizes}", node)
    return hidden, directions


def _clip(node: onnx.NodeProto) -> float:
    """Return the limit on the values that functions are applied to, 0 for none."""
    given = float_attribute(node, "clip", 0.0)
    if any(a.name == "clip" for a in node.attribute) and not given > 0:
        raise RewriteError(f"has clip {given}: expected a positive number", node)
    return given or (0.0 if node.op_type == "RNN" else _LARGEST)


def _functions(node: onnx.NodeProto, directions: int) -> Iterator[tuple[str, float, float]]:
    """Yield the name, alpha and beta of each function of each direction.

    The lists of parameters have an entry for each function that has the parameter, in order.
    """
    names = [name.decode().lower() for a in node.attribute if a.name == "activations" for name in a.strings]
    names = names or [name.lower() for name in _DEFAULTS[node.op_type]] * directions
    expected = len(_DEFAULTS[node.op_type]) * directions
    if node.op_type == "RNN" and len(names) == 2:
        names = names[:directions]  # ONNX's default is two functions, also for one direction
    if len(names) != expected or not set(names) <= _FUNCTIONS.keys():
        raise RewriteError(f"has activations {names}: expected {expected} of {sorted(_FUNCTIONS)}", node)
    rest = [iter(_floats(node, "activation_alpha")), iter(_floats(node, "activation_beta"))]
    for name in names:
        alpha, beta = (
            0.0 if default is None else next(values, default)
            for default, values in zip(_FUNCTIONS[name], rest, strict=True)
        )
        yield name, alpha, beta


def _floats(node: onnx.NodeProto, name: str) -> list[float]:
    return next(([float(value) for value in a.floats] for a in node.attribute if a.name == name), [])
