"""Merged operators give the same results, and others are not merged."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import chrion
from chrion import Graph, HybridSession
from chrion.errors import ModelError
from chrion.graph.merge import merge_operators, mergeable_groups
from chrion.scheduler import fixed_plan
from helpers import FLOAT, alternating_lanes, assert_equal, make_model, node, run_plain, value

CASES = 60


def run_graph(graph: Graph, feed: dict[str, Any]) -> list[Any]:
    """Return the outputs of a graph's model in plain onnxruntime, in the order of the graph's outputs."""
    options = ort.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(graph.weights_folder))
    return list(ort.InferenceSession(graph.model.SerializeToString(), options).run(None, feed))


def check(model: onnx.ModelProto, feed: dict[str, Any], names: list[tuple[str, ...]]) -> Graph:
    """Check that exactly these operators are merged, with the results of the original model."""
    graph = chrion.load(model)
    groups = mergeable_groups(graph)
    # the order of independent operators is onnxruntime's choice
    assert sorted(tuple(sorted(graph.dag.names[i] for i in group)) for group in groups) == names
    merged = merge_operators(graph, groups)
    for found, expected in zip(run_graph(merged, feed), run_plain(model, feed), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    return merged


def numbers(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def convolutions(
    *options: dict[str, Any],
    size: tuple[int | str, ...] = (2, 3, 9, 8),
    kernels: list[tuple[int, ...]],
    biased: tuple[bool, ...] = (),
) -> onnx.ModelProto:
    """Return convolutions ``c0``, ``c1``, ... of one input ``x``, each with a kernel, attributes and an output."""
    nodes, weights = [], {}
    for at, (kernel, given) in enumerate(zip(kernels, options, strict=True)):
        inputs = ["x", f"w{at}"]
        weights[f"w{at}"] = numbers(at, 2 + at, int(size[1]) // given.get("group", 1), *kernel)
        if at < len(biased) and biased[at]:
            inputs.append(f"b{at}")
            weights[f"b{at}"] = numbers(100 + at, 2 + at)
        nodes.append(node("Conv", inputs, [f"y{at}"], name=f"c{at}", **given))
    results = [value(f"y{at}", FLOAT, None) for at in range(len(options))]
    return make_model(nodes, [value("x", FLOAT, list(size))], results, weights)


def random_convolutions(seed: int) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """Return two to five random convolutions of one input, some followed by an activation, and a request."""
    pick = np.random.default_rng(seed)
    rank = int(pick.integers(1, 4))
    stride = [int(s) for s in pick.integers(1, 3, rank)]
    sizes = [int(s) for s in pick.integers(8, 12, rank)]
    nodes, weights, results = [], {}, []
    for at in range(int(pick.integers(2, 6))):
        kernel = [int(k) for k in pick.choice([1, 1, 2, 3, 5], rank)]
        dilation = [int(d) for d in pick.choice([1, 1, 1, 2], rank)]
        given: dict[str, Any] = {"strides": stride, "dilations": dilation, "group": int(pick.choice([1, 1, 1, 1, 2]))}
        match pick.integers(4):
            case 0:
                given["dilations"] = [1] * rank  # onnxruntime supports no other with SAME
                given["auto_pad"] = str(pick.choice(["SAME_UPPER", "SAME_LOWER", "VALID"]))
            case 1:  # any padding
                given["pads"] = [int(p) for p in pick.integers(0, 3, 2 * rank)]
            case _:  # padding that preserves the size, on either side
                total = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
                before = [int(pick.integers(0, t + 1)) for t in total]
                given["pads"] = [*before, *(t - b for t, b in zip(total, before, strict=True))]
        inputs = ["x", f"w{at}"]
        weights[f"w{at}"] = pick.standard_normal((2 * (at + 1), 4 // given["group"], *kernel)).astype(np.float32)
        if pick.random() < 0.5:
            inputs.append(f"b{at}")
            weights[f"b{at}"] = pick.standard_normal(2 * (at + 1)).astype(np.float32)
        nodes.append(node("Conv", inputs, [f"y{at}"], name=f"c{at}", **given))
        if pick.random() < 0.5:
            nodes.append(node("Relu", [f"y{at}"], [f"r{at}"]))
            results.append(value(f"r{at}", FLOAT, None))
        if pick.random() < 0.7 or not results:
            results.append(value(f"y{at}", FLOAT, None))
    shape = [2, 4, *sizes]
    free = seed % 3 == 0
    declared = ["n", 4, *(f"s{axis}" for axis in range(rank))] if free else shape
    return make_model(nodes, [value("x", FLOAT, declared)], results, weights), {
        "x": pick.standard_normal(shape).astype(np.float32)
    }


def test_merged_random_convolutions_give_the_same_outputs() -> None:
    """Merged convolutions with random attributes give plain onnxruntime's outputs.

    Strides, dilations, paddings, biases, groups, activations, ranks and free dimensions are random.
    """
    merged = 0
    for seed in range(CASES):
        model, feed = random_convolutions(seed)
        graph = chrion.load(model)
        groups = mergeable_groups(graph)
        if not groups:
            continue
        merged += 1
        assert all(integer_attribute(graph, i, "group") == 1 for group in groups for i in group)
        for found, expected in zip(
            run_graph(merge_operators(graph, groups), feed), run_plain(model, feed), strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4, err_msg=f"seed {seed}")
    assert merged > CASES // 5


def integer_attribute(graph: Graph, operator: int, name: str) -> int:
    found = graph.model.graph.node[graph.nodes[operator][0]].attribute
    return next((a.i for a in found if a.name == name), 1)


def test_groups_are_maximal() -> None:
    """No operator could join a group that precedes its own."""
    for seed in range(0, CASES, 3):
        graph = chrion.load(random_convolutions(seed)[0])
        groups = mergeable_groups(graph)
        rest = set(range(len(graph.dag))).difference(*groups)
        for a, b in itertools.combinations(sorted([*groups, *((i,) for i in rest)]), 2):
            assert not any(mergeable_groups(graph, {*a, i}) == [tuple(sorted({*a, i}))] for i in b)


def test_a_small_kernel_is_embedded_by_its_padding() -> None:
    """Kernels of 2 with padding after the input start at 1 of 3, not at (3 - 2) // 2; a point is centred."""
    late, early, middle, point = [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]
    options = [{"pads": late}, {"pads": early}, {"pads": middle}, {"pads": point}]
    model = convolutions(*options, kernels=[(2, 2), (2, 2), (3, 3), (1, 1)])
    graph = check(model, {"x": numbers(9, 2, 3, 9, 8)}, [("c0", "c1", "c2", "c3")])
    merged = next(n for n in graph.model.graph.node if n.op_type == "Conv")
    assert list(next(a.ints for a in merged.attribute if a.name == "pads")) == [1, 1, 1, 1]
    weight = graph.constant(merged.input[1])
    assert weight is not None
    assert weight.shape == (2 + 3 + 4 + 5, 3, 3, 3)
    counts = {"c0": 2, "c1": 3, "c2": 4, "c3": 5}
    at = 0
    for name in merged.name.split("+"):
        outside = {"c0": weight[:, :, 0], "c1": weight[:, :, 2], "c2": weight[:, :, :0], "c3": weight[:, :, ::2]}[name]
        assert not outside[at : at + counts[name]].any()
        at += counts[name]


def test_opposite_padding_needs_a_larger_kernel() -> None:
    """A kernel of three with padding before the input and one with padding after it need a kernel of five."""
    model = convolutions({"pads": [2, 2, 0, 0]}, {"pads": [0, 0, 2, 2]}, kernels=[(3, 3), (3, 3)])
    graph = check(model, {"x": numbers(9, 2, 3, 9, 8)}, [("c0", "c1")])
    merged = next(n for n in graph.model.graph.node if n.op_type == "Conv")
    assert list(next(a.ints for a in merged.attribute if a.name == "kernel_shape")) == [5, 5]


@pytest.mark.parametrize(
    ("left", "right", "kernels"),
    [
        ({}, {}, [(3, 3), (1, 1)]),  # outputs of other sizes
        ({"strides": [2, 2]}, {}, [(1, 1), (1, 1)]),
        ({"group": 3}, {}, [(1, 1), (1, 1)]),
        ({"group": 3}, {"group": 3}, [(1, 1), (1, 1)]),
        ({"dilations": [2, 2], "pads": [2] * 4}, {"pads": [1] * 4}, [(3, 3), (3, 3)]),
        ({"dilations": [2, 2], "pads": [2] * 4}, {"dilations": [2, 2], "pads": [1, 1, 3, 3]}, [(3, 3), (3, 3)]),
    ],
)
def test_incompatible_convolutions_are_not_merged(left: Any, right: Any, kernels: Any) -> None:
    """Different output sizes, strides, groups and dilations prevent merging.

    So does an offset that is no multiple of the dilation.
    """
    if left.get("group") == 3:  # three channels in, so as many out
        model = convolutions(left, right, kernels=kernels, size=(2, 3, 9, 8))
        for tensor in model.graph.initializer:
            if tensor.name in {"w0", "w1"}:
                channels = 1 if tensor.name == "w0" or "group" in right else 3
                tensor.CopyFrom(onnx.numpy_helper.from_array(numbers(1, 3, channels, 1, 1), tensor.name))
    else:
        model = convolutions(left, right, kernels=kernels)
    graph = chrion.load(model)
    assert mergeable_groups(graph) == []
    with pytest.raises(ModelError, match=r"'c.', 'c.' cannot be merged"):
        merge_operators(graph, [(0, 1)])


def test_a_point_fits_any_dilation() -> None:
    """Convolutions of kernels 3 and 5 with dilation 2 are merged with one of kernel 1."""
    options = [{"dilations": [2, 2], "pads": [2] * 4}, {"dilations": [2, 2], "pads": [4] * 4}, {"dilations": [3, 3]}]
    model = convolutions(*options, kernels=[(3, 3), (5, 5), (1, 1)], biased=(True, False, True))
    check(model, {"x": numbers(9, 2, 3, 9, 8)}, [("c0", "c1", "c2")])


def test_free_dimensions_are_merged_if_sizes_always_agree() -> None:
    """Explicit padding of equal growth is merged; SAME with a stride of 2 depends on the size and is not."""
    pads: dict[str, Any] = {"strides": [2, 2], "pads": [1] * 4}
    point: dict[str, Any] = {"strides": [2, 2]}
    same: dict[str, Any] = {"strides": [2, 2], "auto_pad": "SAME_UPPER"}
    model = convolutions(pads, point, same, same, kernels=[(3, 3), (1, 1), (3, 3), (1, 1)], size=("n", 3, "h", "w"))
    for size in ((1, 3, 9, 8), (2, 3, 6, 7)):
        check(model, {"x": numbers(1, *size)}, [("c0", "c1")])
    fixed = convolutions(pads, point, same, same, kernels=[(3, 3), (1, 1), (3, 3), (1, 1)], size=(1, 3, 9, 9))
    check(fixed, {"x": numbers(1, 1, 3, 9, 9)}, [("c0", "c1", "c2", "c3")])


@pytest.mark.parametrize("side", ["SAME_UPPER", "SAME_LOWER"])
def test_same_padding_with_a_stride_of_one_is_merged_for_any_size(side: str) -> None:
    """The total padding is then the kernel's reach less one, whatever the size of the input."""
    same = {"auto_pad": side}
    model = convolutions(same, same, kernels=[(3, 3), (5, 2)], size=("n", 3, "h", "w"))
    for size in ((1, 3, 9, 8), (2, 3, 6, 7)):
        check(model, {"x": numbers(1, *size)}, [("c0", "c1")])


def test_shared_weights_and_weights_of_a_request() -> None:
    """A weight with other readers is kept; an operator whose weight is an input is not merged."""
    nodes = [
        node("Neg", ["x"], ["n"], name="n"),
        node("Conv", ["x", "w"], ["a"], name="a"),
        node("Conv", ["x", "v"], ["b"], name="b"),
        node("Conv", ["n", "w"], ["c"], name="c"),
        node("Conv", ["x", "fed"], ["d"], name="d"),
    ]
    shapes = {"x": (1, 2, 5, 5), "fed": (3, 2, 1, 1)}
    inputs = [value(name, FLOAT, list(shape)) for name, shape in shapes.items()]
    results = [value(name, FLOAT, None) for name in "abcd"]
    model = make_model(nodes, inputs, results, {"w": numbers(0, 4, 2, 1, 1), "v": numbers(1, 3, 2, 1, 1)})
    feed = {name: numbers(5, *shape) for name, shape in shapes.items()}
    merged = check(model, feed, [("a", "b")])
    assert "chrion/w" in merged.weight_names
    assert "v" not in merged.weight_names


def test_weights_with_a_default_and_old_opsets() -> None:
    """A weight that is also an input counts as constant; before opset 13 a split has its sizes as an attribute."""
    nodes = [node("MatMul", ["x", f"w{at}"], [f"y{at}"], name=f"m{at}") for at in range(2)]
    weights = {f"w{at}": numbers(at, 6, 3 + at) for at in range(2)}
    inputs = [value("x", FLOAT, [2, 6]), value("w0", FLOAT, [6, 3])]
    results = [value(f"y{at}", FLOAT, None) for at in range(2)]
    model = make_model(nodes, inputs, results, weights, opset=11)
    merged = check(model, {"x": numbers(5, 2, 6)}, [("m0", "m1")])
    split = next(n for n in merged.model.graph.node if n.op_type == "Split")
    assert len(split.input) == 1


def products(*matrices: np.ndarray[Any, Any], shape: list[int | str]) -> onnx.ModelProto:
    nodes = [node("MatMul", ["x", f"w{at}"], [f"y{at}"], name=f"m{at}") for at in range(len(matrices))]
    results = [value(f"y{at}", FLOAT, None) for at in range(len(matrices))]
    return make_model(nodes, [value("x", FLOAT, shape)], results, {f"w{at}": m for at, m in enumerate(matrices)})


@pytest.mark.parametrize("shape", [[6], [4, 6], [2, 4, 6], ["n", "t", 6]])
def test_products_of_one_value(shape: list[int | str]) -> None:
    """Queries, keys and values are merged, with large weights in a file; a stack of matrices is not merged."""
    model = products(numbers(0, 6, 300), numbers(1, 6, 5), numbers(2, 6, 1), numbers(3, 2, 6, 6), shape=shape)
    fed = [d if isinstance(d, int) else 2 for d in shape]
    check(model, {"x": numbers(4, *fed)}, [("m0", "m1", "m2")])


@pytest.mark.parametrize("transposed", [0, 1])
def test_gemms_of_one_value(transposed: int) -> None:
    """The bias may be missing, a number or a row; matrices may be transposed; alpha and beta are kept."""
    weights = {"w0": numbers(0, 6, 5), "w1": numbers(1, 4, 6), "w2": numbers(2, 6, 3), "w3": numbers(3, 6, 2)}
    weights |= {"b1": numbers(4, 4), "b2": numbers(5, 1), "b3": numbers(6, 3, 2)}
    options: dict[str, Any] = {"transA": transposed, "alpha": 0.5, "beta": 2.0}
    nodes = [
        node("Gemm", ["x", "w0"], ["y0"], name="g0", **options),
        node("Gemm", ["x", "w1", "b1"], ["y1"], name="g1", transB=1, **options),
        node("Gemm", ["x", "w2", "b2"], ["y2"], name="g2", **options),
        node("Gemm", ["x", "w3", "b3"], ["y3"], name="g3", **options),  # adds a matrix
        node("Gemm", ["x", "w2", "b2"], ["y4"], name="g4", **{**options, "alpha": 1.0}),
    ]
    shape = [6, 3] if transposed else [3, 6]
    results = [value(f"y{at}", FLOAT, None) for at in range(5)]
    model = make_model(nodes, [value("x", FLOAT, shape)], results, weights)
    check(model, {"x": numbers(7, *shape)}, [("g0", "g1", "g2")])


def test_fused_convolutions_merge_with_those_of_the_same_activation() -> None:
    """Onnxruntime's fused operators, which an optimised model has, are merged."""
    nodes = [
        node("FusedConv", ["x", f"w{at}"], [f"y{at}"], name=f"c{at}", domain="com.microsoft", **given)
        for at, given in enumerate(
            [
                {"activation": "Relu"},
                {"activation": "Relu"},
                {"activation": "Tanh"},
                {"activation": "LeakyRelu", "activation_params": [0.1]},
                {"activation": "LeakyRelu", "activation_params": [0.2]},
            ]
        )
    ]
    results = [value(f"y{at}", FLOAT, None) for at in range(5)]
    weights = {f"w{at}": numbers(at, 2, 3, 1, 1) for at in range(5)}
    model = make_model(nodes, [value("x", FLOAT, [1, 3, 5, 5])], results, weights)
    model.opset_import.add(domain="com.microsoft", version=1)
    check(model, {"x": numbers(7, 1, 3, 5, 5)}, [("c0", "c1")])


def test_groups_are_restricted_deterministic_and_checked() -> None:
    """Groups have only the given operators, with equal names each time.

    A part of a group is valid, a repeated operator is not.
    """
    model = products(*(numbers(at, 6, 4) for at in range(4)), shape=[2, 6])
    graph = chrion.load(model)
    assert mergeable_groups(graph, [3, 1]) == [(1, 3)]
    assert mergeable_groups(graph, [2]) == []
    assert merge_operators(graph, []) is graph
    merged = merge_operators(graph, [(3, 1)])
    assert merged is merge_operators(graph, [(1, 3)])
    one, other = graph.dag.names[1], graph.dag.names[3]
    assert set(merged.dag.names) == {*graph.dag.names, f"{one}+{other}", f"{one}+{other}/split"} - {one, other}
    assert merged.digest == merge_operators(chrion.load(model), [(1, 3)]).digest
    for groups in ([(0, 1), (1, 2)], [(0, 4)], [(0,)]):
        with pytest.raises(ModelError):
            merge_operators(graph, groups)


def test_a_merged_graph_runs_on_lanes() -> None:
    """A merged graph that is cut into segments, with weights in separate files, gives the model's results."""
    model, feed = random_convolutions(1)
    graph = chrion.load(model)
    merged = merge_operators(graph, mergeable_groups(graph))
    assert len(merged.dag) > 2
    with HybridSession(merged, plan=fixed_plan(merged, alternating_lanes(merged))) as session:
        assert_equal(session.run(None, feed), run_plain(model, feed))
