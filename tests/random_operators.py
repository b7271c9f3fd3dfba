"""The steps of random models: each adds an operator, or a few related ones."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import onnx
from onnx import helper

from helpers import node
from random_models import (
    BOOL,
    DOUBLE,
    FLOAT,
    FREE,
    HALF,
    INT8,
    INT32,
    INT64,
    STRING,
    UINT8,
    Dim,
    Draft,
    Shape,
    UnfitError,
    Value,
    fixed,
)
from random_patterns import PATTERNS

SINGLE, LOGICAL, MEANS = {FLOAT}, {BOOL}, {FLOAT, INT32}
REAL = {FLOAT, DOUBLE}
NUMBERS = {FLOAT, DOUBLE, INT32, INT64}
ANY = {FLOAT, DOUBLE, HALF, INT8, UINT8, INT32, INT64, BOOL}

#: Element-wise operators and the types that onnxruntime supports on the CPU.
UNARY = {
    **dict.fromkeys(["Tanh", "Sigmoid", "Floor", "Ceil", "Round", "Sqrt", "Reciprocal"], REAL),
    **dict.fromkeys(["Erf", "Softplus", "Softsign", "LeakyRelu", "HardSigmoid", "ThresholdedRelu"], SINGLE),
    **dict.fromkeys(["Sin", "Cos", "Exp", "HardSwish", "Celu", "Elu", "Selu"], SINGLE),
    **dict.fromkeys(["Abs", "Sign"], ANY - {BOOL, HALF}),
    "Neg": NUMBERS | {INT8},
    "Relu": REAL | {INT32, INT8},
    "Identity": ANY,
    "Not": {BOOL},
}
BINARY = {
    **dict.fromkeys(["Add", "Sub", "Mul", "Max", "Min"], NUMBERS),
    **dict.fromkeys(["And", "Or", "Xor"], LOGICAL),
    "Div": REAL,
    "PRelu": {FLOAT},
    "Pow": {FLOAT},
}
COMPARE = {
    **dict.fromkeys(["Less", "Greater", "LessOrEqual", "GreaterOrEqual"], NUMBERS),
    "Equal": NUMBERS | {BOOL},
}
REDUCE = {
    **dict.fromkeys(["ReduceSum", "ReduceMax", "ReduceMin"], NUMBERS),
    **dict.fromkeys(["ReduceMean", "ReduceProd"], MEANS),
    **dict.fromkeys(["ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp"], SINGLE),
}

Step = Callable[[Draft], None]


def random_model(pick: Random, size: int) -> Draft:
    """Build a model of ``size`` random steps."""
    draft = Draft(pick)
    for _ in range(size):
        for _ in range(20):
            try:
                pick.choice(STEPS)(draft)
                break
            except UnfitError:
                continue
    return draft


# Element-wise operators.


def unary(d: Draft) -> None:
    op_type = d.pick.choice(list(UNARY))
    x = d.choose(UNARY[op_type])
    d.emit(op_type, [x], x.kind, x.shape or ())


def binary(d: Draft) -> None:
    op_type = d.pick.choice(list(BINARY))
    x = d.choose(BINARY[op_type])
    pair: list[Value | None] = [x, d.partner(x)]
    if op_type not in {"PRelu", "Pow"} and d.pick.random() < 0.3:
        pair.reverse()
    d.emit(op_type, pair, x.kind, x.shape or ())


def several(d: Draft) -> None:
    """Add a variadic operator with three inputs."""
    x = d.choose({FLOAT})
    d.emit(d.pick.choice(["Sum", "Max", "Min", "Mean"]), [x, *(d.partner(x) for _ in range(2))], FLOAT, x.shape or ())


def compare(d: Draft) -> None:
    op_type = d.pick.choice(list(COMPARE))
    x = d.choose(COMPARE[op_type])
    d.emit(op_type, [x, d.partner(x)], BOOL, x.shape or ())


def where(d: Draft) -> None:
    x = d.choose(NUMBERS)
    mask = d.partner(Value("", BOOL, x.shape))
    d.emit("Where", [mask, x, d.partner(x)], x.kind, x.shape or ())


def cast(d: Draft) -> None:
    x = d.choose()
    to = d.pick.choice(sorted(ANY))
    if x.kind in {FLOAT, DOUBLE, HALF} and to not in {FLOAT, DOUBLE, HALF, BOOL}:
        # The conversion of a large number to a small type is undefined.
        x = d.emit(
            "Clip", [d.emit("Cast", [x], FLOAT, x.shape or (), to=FLOAT), *bounds(d, 0, 100)], FLOAT, x.shape or ()
        )
    d.emit("Cast", [x], to, x.shape or (), to=to)


def bounds(d: Draft, least: float, most: float) -> list[Value | None]:
    return [d.constant(np.float32(least)), d.constant(np.float32(most))]


def clip(d: Draft) -> None:
    """Add a Clip, sometimes without optional inputs, in the middle or at the end."""
    x = d.choose({FLOAT})
    low, high = bounds(d, -1, 1)
    d.emit("Clip", d.pick.choice([[x, None, high], [x, low], [x, low, high], [x]]), FLOAT, x.shape or ())


def dropout(d: Draft) -> None:
    """Add a Dropout with or without its optional output, which later operators may read."""
    x = d.choose({FLOAT})
    made, mask = Value(d.new_name(), FLOAT, x.shape), Value(d.new_name(), BOOL, x.shape)
    wanted = d.pick.random() < 0.5
    d.add("Dropout", [x], [made.name, mask.name] if wanted else [made.name])
    d.values += [made, mask] if wanted else [made]


# Operators along axes.


def reduce(d: Draft) -> None:
    op_type = d.pick.choice(list(REDUCE))
    x = d.choose(REDUCE[op_type], ranks=range(1, 9), least=1)
    axis, keep = d.axis(x), d.pick.randint(0, 1)
    shape = list(x.shape or ())
    shape[axis : (axis + 1) or None] = [1] * keep
    if op_type == "ReduceSum" or d.opset >= 18:
        d.emit(op_type, [x, d.constant(np.array([axis]))], x.kind, tuple(shape), keepdims=keep)
    else:
        d.emit(op_type, [x], x.kind, tuple(shape), axes=[axis], keepdims=keep)


def reduce_all(d: Draft) -> None:
    """Add a reduction to a scalar."""
    x = d.choose({FLOAT}, least=1)
    d.emit(d.pick.choice(["ReduceSum", "ReduceMax", "ReduceMean"]), [x], FLOAT, (), keepdims=0)


def arg(d: Draft) -> None:
    x = d.choose({FLOAT, INT32}, ranks=range(1, 9), least=1)
    axis = d.axis(x, fixed=True)
    shape = [1 if at == axis % x.rank else s for at, s in enumerate(x.shape or ())]
    d.emit(d.pick.choice(["ArgMax", "ArgMin"]), [x], INT64, tuple(shape), axis=axis)


def softmax(d: Draft) -> None:
    x = d.choose(REAL, ranks=range(1, 9), least=1)
    d.emit(d.pick.choice(["Softmax", "LogSoftmax"]), [x], x.kind, x.shape or (), axis=d.axis(x))


def cumulate(d: Draft) -> None:
    x = d.choose(NUMBERS, ranks=range(1, 9))
    d.emit("CumSum", [x, d.constant(np.int64(d.axis(x)))], x.kind, x.shape or (), reverse=d.pick.randint(0, 1))


def normalise(d: Draft) -> None:
    x = d.choose({FLOAT}, ranks=range(2, 5), least=1)
    last = fixed(x, -1)
    # onnxruntime 1.31 crashes if a bias is omitted by an empty name.
    bias = d.pick.choice([[], [d.weight(FLOAT, (last,))]])
    d.emit("LayerNormalization", [x, d.weight(FLOAT, (last,)), *bias], FLOAT, x.shape or ())


def top(d: Draft) -> None:
    """Add a TopK, whose two outputs are often not both read."""
    x = d.choose({FLOAT, INT64}, ranks=range(1, 5), least=2)
    axis = d.axis(x, fixed=True)
    shape = tuple(2 if at == axis % x.rank else s for at, s in enumerate(x.shape or ()))
    made, index = Value(d.new_name(), x.kind, shape), Value(d.new_name(), INT64, shape)
    d.add("TopK", [x, d.constant(np.array([2]))], [made.name, index.name], axis=axis)
    d.values += [made, index]


# Products.


def product(d: Draft) -> None:
    x = d.choose({FLOAT, DOUBLE}, ranks=range(1, 5), least=1)
    inner, outer = fixed(x, -1), d.pick.choice([1, 3, 4])
    d.emit("MatMul", [x, d.weight(x.kind, (inner, outer))], x.kind, (*(x.shape or ())[:-1], outer))


def wide_product(d: Draft) -> None:
    """Add a product with a weight of more than a kilobyte, and one with the same weight transposed."""
    x = d.choose({FLOAT}, ranks=range(1, 4), least=1)
    inner = fixed(x, -1)
    big = d.weight(FLOAT, (inner, 300))
    wide = d.emit("MatMul", [x, big], FLOAT, (*(x.shape or ())[:-1], 300))
    d.emit("MatMul", [wide, d.emit("Transpose", [big], FLOAT, (300, inner), perm=[1, 0])], FLOAT, x.shape or ())


def gemm(d: Draft) -> None:
    x = d.choose({FLOAT}, ranks=range(2, 3), least=1)
    weight = d.weight(FLOAT, (4, fixed(x, 1)))
    bias = d.pick.choice([[], [d.weight(FLOAT, (4,))]])
    d.emit("Gemm", [x, weight, *bias], FLOAT, ((x.shape or ())[0], 4), transB=1, alpha=0.5)


def integers(d: Draft) -> None:
    """Add a dynamic quantisation, and a product of integers or a dequantisation."""
    x = d.choose({FLOAT}, ranks=range(2, 3), least=1)
    names = [d.new_name() for _ in range(3)]
    d.add("DynamicQuantizeLinear", [x], names)
    q, scale, zero = (Value(n, k, s) for n, k, s in zip(names, (UINT8, FLOAT, UINT8), (x.shape, (), ()), strict=True))
    if d.pick.random() < 0.5:
        d.emit("DequantizeLinear", [q, scale, zero], FLOAT, x.shape or ())
    else:
        weight = d.weight(INT8, (fixed(x, 1), 3))
        d.emit("MatMulInteger", [q, weight, zero], INT32, ((x.shape or ())[0], 3))


def convolve(d: Draft) -> None:
    x = d.choose({FLOAT}, ranks=range(3, 5), least=1)
    channels, flat = fixed(x, 1), x.rank - 2
    shape: Shape = ((x.shape or ())[0], 2, *(x.shape or ())[2:])
    pads = [1] * (2 * flat)
    if d.pick.random() < 0.7:
        inputs: list[Value | None] = [x, d.weight(FLOAT, (2, channels, *[3] * flat))]
        inputs += d.pick.choice([[], [d.weight(FLOAT, (2,))]])
        made = d.emit("Conv", inputs, FLOAT, shape, kernel_shape=[3] * flat, pads=pads)
        if d.pick.random() < 0.5:
            d.emit("Relu", [made], FLOAT, shape)
    else:
        d.emit(d.pick.choice(["MaxPool", "AveragePool"]), [x], FLOAT, x.shape or (), kernel_shape=[3] * flat, pads=pads)


def recurrent(d: Draft) -> None:
    """Add a recurrent operator in one or both directions, with or without an initial state."""
    x = d.choose({FLOAT}, ranks=range(3, 4), least=1)
    steps, batch, width = x.shape or ()
    if isinstance(batch, str) or isinstance(width, str):
        raise UnfitError
    op_type, both = d.pick.choice(["LSTM", "GRU", "RNN"]), d.pick.random() < 0.4
    gates, ways, hidden = {"LSTM": 4, "GRU": 3, "RNN": 1}[op_type], 1 + both, 3
    inputs: list[Value | None] = [x, d.weight(FLOAT, (ways, gates * hidden, width))]
    inputs.append(d.weight(FLOAT, (ways, gates * hidden, hidden)))
    if d.pick.random() < 0.5:
        inputs += [None, None, d.weight(FLOAT, (ways, batch, hidden))]
    made = Value(d.new_name(), FLOAT, (steps, ways, batch, hidden))
    last = Value(d.new_name(), FLOAT, (ways, batch, hidden))
    direction = "bidirectional" if both else d.pick.choice(["forward", "reverse"])
    d.add(op_type, inputs, [made.name, last.name], hidden_size=hidden, direction=direction)
    d.values += [made, last]


# Operators that change shapes.


def transpose(d: Draft) -> None:
    x = d.choose(ranks=range(2, 5))
    axes = d.pick.sample(range(x.rank), x.rank)
    d.emit("Transpose", [x], x.kind, tuple((x.shape or ())[at] for at in axes), perm=axes)


def reshape(d: Draft) -> None:
    """Add a Reshape to one axis, which keeps a free first axis."""
    x = d.choose(ranks=range(1, 5), least=1)
    head = [e for e in (x.shape or ())[:1] if e == FREE]
    rest = (x.shape or ())[len(head) :]
    if FREE in rest:
        raise UnfitError
    size = int(np.prod(rest))  # type: ignore[arg-type] # no free dimension is left
    d.emit("Reshape", [x, d.constant(np.array([0] * len(head) + [size]))], x.kind, (*head, size))


def unsqueeze(d: Draft) -> None:
    x = d.choose(ranks=range(4))
    at = d.pick.randint(0, x.rank)
    shape = list(x.shape or ())
    shape.insert(at, 1)
    made = d.emit("Unsqueeze", [x, d.constant(np.array([at]))], x.kind, tuple(shape))
    if d.pick.random() < 0.3:
        d.emit("Squeeze", [made, d.constant(np.array([at]))], x.kind, x.shape or ())


def concat(d: Draft) -> None:
    x = d.choose(ranks=range(1, 5))
    axis = d.axis(x, fixed=True)
    same = [v for v in d.values if (v.kind, v.shape) == (x.kind, x.shape)]
    parts = [x, *(d.pick.choice(same) for _ in range(d.pick.randint(0, 2)))]
    shape = [s * len(parts) if at == axis % x.rank else s for at, s in enumerate(x.shape or ())]
    d.emit("Concat", list(parts), x.kind, tuple(shape), axis=axis)


def split(d: Draft) -> None:
    x = d.choose(ANY - {HALF}, ranks=range(1, 5), least=2)
    axis = d.axis(x, fixed=True)
    size = fixed(x, axis)
    parts = [1, size - 1]
    made = [
        Value(d.new_name(), x.kind, tuple(p if at == axis % x.rank else s for at, s in enumerate(x.shape or ())))
        for p in parts
    ]
    d.add("Split", [x, d.constant(np.array(parts))], [v.name for v in made], axis=axis)
    d.values += made


def slice_(d: Draft) -> None:
    """Add a Slice, sometimes an empty one."""
    x = d.choose(ranks=range(1, 5), least=1)
    axis = d.axis(x, fixed=True)
    size = fixed(x, axis)
    start = d.pick.randint(0, size) if d.pick.random() < 0.3 else d.pick.randint(0, size - 1)
    shape = tuple(size - start if at == axis % x.rank else s for at, s in enumerate(x.shape or ()))
    ends = [d.constant(np.array([v])) for v in (start, np.iinfo(np.int64).max, axis)]
    d.emit("Slice", [x, *ends], x.kind, shape)


def gather(d: Draft) -> None:
    x = d.choose(ranks=range(1, 4), least=1)
    axis = d.axis(x, fixed=True)
    index = d.constant(d.numbers.integers(0, fixed(x, axis), d.pick.choice([(), (2,), (2, 1)])))
    shape = [*(x.shape or ())]
    shape[axis : (axis + 1) or None] = list(index.shape or ())
    d.emit("Gather", [x, index], x.kind, tuple(shape), axis=axis)


def pad(d: Draft) -> None:
    x = d.choose({FLOAT, INT32}, ranks=range(1, 5))
    if FREE in (x.shape or ()):
        raise UnfitError
    pads = d.constant(np.array([1] * x.rank + [0] * x.rank))
    d.emit("Pad", [x, pads], x.kind, tuple(s + 1 for s in x.shape or () if isinstance(s, int)))


def expand(d: Draft) -> None:
    x = d.choose(ANY - {UINT8, INT8}, ranks=range(3))
    shape: list[Dim] = [2, *(x.shape or ())]
    target = d.constant(np.array([1 if s == FREE else s for s in shape]))
    d.emit("Expand", [x, target], x.kind, tuple(shape))


def shape_of(d: Draft) -> None:
    x = d.choose()
    d.emit("Shape", [x], INT64, (x.rank,))


def one_hot(d: Draft) -> None:
    x = d.choose({INT64}, ranks=range(1, 4))
    d.emit("OneHot", [x, d.constant(np.array([4])), d.constant(np.float32([0, 1]))], FLOAT, (*(x.shape or ()), 4))


# Operators around which a model cannot be cut.


def non_zero(d: Draft) -> None:
    """Add a NonZero, whose shape depends on the data, as an inner value and sometimes as an output."""
    x = d.choose({FLOAT, BOOL, INT64}, ranks=range(1, 4))
    found = Value(d.new_name(), INT64, (x.rank, None))  # type: ignore[arg-type] # as a graph output declares it
    d.add("NonZero", [x], [found.name])
    d.loose.append(found)
    real = d.new_name()
    d.add("Cast", [found], [real], to=FLOAT)
    d.emit("ReduceSum", [Value(real, FLOAT, None)], FLOAT, (), keepdims=0)


def text(d: Draft) -> None:
    x = d.choose({INT64, INT32})
    strings = d.new_name()
    d.add("Cast", [x], [strings], to=STRING)
    if d.pick.random() < 0.3:
        d.loose.append(Value(strings, STRING, x.shape))
    d.emit("Cast", [Value(strings, STRING, None)], FLOAT, x.shape or (), to=FLOAT)


def sequence(d: Draft) -> None:
    x = d.choose()
    several_ = Value(d.new_name(), x.kind, None)
    d.add("SequenceConstruct", [x, x], [several_.name])
    if d.pick.random() < 0.3:
        d.others.append(helper.make_tensor_sequence_value_info(several_.name, x.kind, None))
    d.emit("SequenceAt", [several_, d.constant(np.int64(0))], x.kind, x.shape or ())


def optional(d: Draft) -> None:
    x = d.choose({FLOAT, INT64, BOOL})
    wrapped = Value(d.new_name(), x.kind, None)
    d.add("Optional", [x], [wrapped.name])
    d.emit("OptionalGetElement", [wrapped], x.kind, x.shape or ())


# Control flow and functions.


def branch(d: Draft) -> None:
    """Add an If, whose branches read values of the outer graph; sometimes one branch contains another If."""
    x = d.choose({FLOAT, INT64})
    other, flag = d.partner(x), condition(d)

    def body(op_type: str, inputs: list[str], *, nested: bool) -> onnx.GraphProto:
        name, inner = d.new_name(), d.new_name()
        if nested:
            arms = {arm: body(op_type, inputs, nested=False) for arm in ("then_branch", "else_branch")}
            nodes = [node("If", [flag.name], [name], **arms)]
        else:
            nodes = [node(op_type, inputs, [inner]), node("Identity", [inner], [name])]
        return helper.make_graph(nodes, op_type, [], [helper.make_tensor_value_info(name, x.kind, None)])

    then = body("Add", [x.name, other.name], nested=d.pick.random() < 0.3)
    d.emit("If", [flag], x.kind, x.shape or (), then_branch=then, else_branch=body("Neg", [x.name], nested=False))


def condition(d: Draft) -> Value:
    flags = [v for v in d.values if v.kind == BOOL and v.shape == ()]
    return (
        d.pick.choice(flags) if flags else d.emit("Cast", [d.choose({FLOAT, INT64}, ranks=range(1))], BOOL, (), to=BOOL)
    )


def loop(d: Draft) -> None:
    """Add a Loop of three iterations with a loop-carried value, an outer value and a scan output."""
    x = d.choose({FLOAT, INT64})
    other, count, inner = d.partner(x), d.constant(np.int64(3)), [d.new_name() for _ in range(5)]
    at, going, state, after, collected = inner
    infos = [(at, INT64, []), (going, BOOL, []), (state, x.kind, None)]
    ends = [(going, BOOL, []), (after, x.kind, None), (collected, x.kind, None)]
    body = helper.make_graph(
        [node("Add", [state, other.name], [after]), node("Identity", [after], [collected])],
        "round",
        [helper.make_tensor_value_info(*info) for info in infos],
        [helper.make_tensor_value_info(*info) for info in ends],
    )
    last, every = Value(d.new_name(), x.kind, x.shape), Value(d.new_name(), x.kind, (3, *(x.shape or ())))
    d.add("Loop", [count, None, x], [last.name, every.name], body=body)
    d.loose += [Value(v.name, v.kind, None) for v in (last, every)]


def scan(d: Draft) -> None:
    """Add a Scan over the first axis with a state."""
    x = d.choose({FLOAT}, ranks=range(2, 4), least=1)
    rest = (x.shape or ())[1:]
    if FREE in rest:
        raise UnfitError
    start = d.weight(FLOAT, tuple(s for s in rest if isinstance(s, int)))
    state, item, after, out = (d.new_name() for _ in range(4))
    body = helper.make_graph(
        [node("Add", [state, item], [after]), node("Tanh", [after], [out])],
        "step",
        [helper.make_tensor_value_info(n, FLOAT, rest) for n in (state, item)],
        [helper.make_tensor_value_info(n, FLOAT, rest) for n in (after, out)],
    )
    last, every = Value(d.new_name(), FLOAT, rest), Value(d.new_name(), FLOAT, x.shape)
    d.add("Scan", [start, x], [last.name, every.name], body=body, num_scan_inputs=1)
    d.values += [last, every]


def function(d: Draft) -> None:
    """Add a call of a function that the model defines."""
    x = d.choose({FLOAT})
    if not any(f.name == "Wave" for f in d.functions):
        d.functions.append(
            helper.make_function(
                "local",
                "Wave",
                ["a", "b"],
                ["c"],
                [node("Sin", ["a"], ["s"]), node("Mul", ["s", "b"], ["c"])],
                [helper.make_opsetid("", d.opset)],
            )
        )
    d.emit("Wave", [x, d.partner(x)], FLOAT, x.shape or (), domain="local")


def dead_end(d: Draft) -> None:
    """Add an operator whose output is not read."""
    d.add("Exp", [d.choose({FLOAT})], [d.new_name()])


STEPS: list[Step] = [
    *[unary, binary, several, compare, where, cast, clip, dropout],
    *[unary, binary, product, unary, binary, product],
    *[reduce, reduce_all, arg, softmax, cumulate, normalise, top],
    *[wide_product, gemm, integers, convolve, recurrent],
    *[transpose, reshape, unsqueeze, concat, split, slice_, gather, pad, expand, shape_of, one_hot],
    *[non_zero, text, sequence, optional, branch, loop, scan, function, dead_end],
    *PATTERNS,
    *PATTERNS,
]
