"""The work of nodes, counted by hand from their shapes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from onnx import helper

from chrion.graph.model import TensorInfo
from chrion.graph.work import NodeWork, Product, Setup, node_flops, node_work

F = "tensor(float)"


def work(op_type: str, inputs: list[Any], outputs: list[Any], kind: str = F, **attributes: Any) -> NodeWork:
    """Return the work of a node with inputs and outputs of these shapes, or pairs of a type and a shape."""
    values = {}
    names: list[list[str]] = []
    for prefix, given in (("i", inputs), ("o", outputs)):
        names.append([])
        for at, shape in enumerate(given):
            name = f"{prefix}{at}" if shape is not None else ""
            names[-1].append(name)
            if shape is not None:
                own, sizes = shape if isinstance(shape, tuple) else (kind, shape)
                values[name] = TensorInfo(name, own, tuple(sizes))
    return node_work(helper.make_node(op_type, *names, **attributes), values)


def test_a_matrix_product_by_hand() -> None:
    """[8, 256] x [256, 1024]: 2 * 8 * 256 * 1024 operations on (8 * 256 + 256 * 1024 + 8 * 1024) numbers."""
    found = work("MatMul", [[8, 256], [256, 1024]], [[8, 1024]])
    assert found.products == (Product(4194304.0, 8),)
    assert found.traffic == found.footprint == 4 * (2048 + 262144 + 8192)
    assert found.flops / found.traffic == pytest.approx(4194304 / (4 * 272384))


def test_products_of_other_types_by_hand() -> None:
    """Types halve or quarter the bytes, not the operations; a Gemm with transA reduces over the first dimension."""
    half = work("MatMul", [[8, 256], [256, 1024]], [[8, 1024]], "tensor(float16)")
    assert (half.element, half.flops, half.traffic) == ("float16", 4194304.0, 2 * 272384)
    bytes_ = ("tensor(uint8)", [8, 256]), ("tensor(int8)", [256, 1024])
    int8 = work("MatMulInteger", list(bytes_), [("tensor(int32)", [8, 1024])])
    assert (int8.element, int8.flops, int8.traffic) == ("int8", 4194304.0, 2048 + 262144 + 4 * 8192)
    gemm = work("Gemm", [[256, 8], [1024, 256], [1024]], [[8, 1024]], transA=1, transB=1)
    assert gemm.products == (Product(4194304.0, 8),)
    einsum = work("Einsum", [[8, 256], [256, 1024]], [[8, 1024]], equation="mk, kn -> mn")
    assert einsum.flops == 4194304.0


def test_a_stack_of_products_shares_no_weights() -> None:
    """Twelve heads of [128, 64] x [64, 128] have 128 rows each; with one weight for all, there are 12 * 128."""
    heads = work("MatMul", [[1, 12, 128, 64], [1, 12, 64, 128]], [[1, 12, 128, 128]])
    assert heads.products == (Product(2.0 * 12 * 128 * 64 * 128, 128),)
    shared = work("MatMul", [[1, 12, 128, 64], [64, 128]], [[1, 12, 128, 128]])
    assert shared.products == (Product(2.0 * 12 * 128 * 64 * 128, 12 * 128),)


def test_convolutions_by_hand() -> None:
    """[1, 64, 56, 56] with 128 filters of 3 x 3, plain, in 2 groups and depthwise."""
    attributes = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    plain = work("Conv", [[1, 64, 56, 56], [128, 64, 3, 3], [128]], [[1, 128, 56, 56]], **attributes)
    assert plain.products == (Product(2.0 * 128 * 56 * 56 * 64 * 9, 56 * 56),)
    grouped = work("Conv", [[1, 64, 56, 56], [128, 32, 3, 3]], [[1, 128, 56, 56]], group=2, **attributes)
    assert grouped.products == (Product(2.0 * 128 * 56 * 56 * 32 * 9, 56 * 56),)
    depthwise = work("Conv", [[1, 64, 56, 56], [64, 1, 3, 3]], [[1, 64, 56, 56]], group=64, **attributes)
    assert depthwise.products == (Product(2.0 * 64 * 56 * 56 * 9, 0.0),)
    transposed = work("ConvTranspose", [[1, 64, 7, 7], [64, 32, 2, 2]], [[1, 32, 14, 14]], strides=[2, 2])
    assert transposed.products == (Product(2.0 * 64 * 49 * 32 * 4, 49),)
    types = [("tensor(uint8)", [1, 64, 8, 8]), [], [], ("tensor(int8)", [128, 64, 1, 1]), [], [], [], []]
    quantised = work("QLinearConv", types, [("tensor(uint8)", [1, 128, 8, 8])])
    assert (quantised.element, quantised.flops) == ("int8", 2.0 * 128 * 64 * 64)


@pytest.mark.parametrize(("kind", "gates", "functions"), [("LSTM", 4, 5), ("GRU", 3, 3), ("RNN", 1, 1)])
def test_recurrent_operators_by_hand(kind: str, gates: int, functions: int) -> None:
    """Ten steps, batch 8, 64 to 32, two directions: both products, the functions, and R read once a step."""
    w, r = [2, gates * 32, 64], [2, gates * 32, 32]
    found = work(kind, [[10, 8, 64], w, r], [[10, 2, 8, 32]], hidden_size=32, direction="bidirectional")
    by_input = 2 * (2 * gates * 32 * 64) * 80
    by_state = 2 * (2 * gates * 32 * 32) * 80
    assert found.products == (Product(by_input, 80), Product(by_state, 8))
    assert found.operations == pytest.approx(31 * functions * 2 * 32 * 80)
    once = 4 * (10 * 8 * 64 + math.prod(w) + math.prod(r) + 10 * 2 * 8 * 32)
    assert found.footprint == once
    assert found.traffic == once + 9 * 4 * math.prod(r)
    assert found.steps == 10


def test_the_batch_of_a_batch_first_recurrent_operator() -> None:
    """With layout 1 the first dimension is the batch."""
    found = work("LSTM", [[8, 10, 64], [1, 128, 64], [1, 128, 32]], [[8, 10, 1, 32]], hidden_size=32, layout=1)
    assert (found.steps, found.products[1].rows) == (10, 8)


def test_element_wise_operators_by_hand() -> None:
    """An addition reads two tensors and writes one; a function costs more operations and the same traffic."""
    add = work("Add", [[4, 100], [4, 100]], [[4, 100]])
    assert (add.operations, add.traffic) == (400, 3 * 1600)
    relu, tanh = work("Relu", [[4, 100]], [[4, 100]]), work("Tanh", [[4, 100]], [[4, 100]])
    assert relu.traffic == tanh.traffic == 2 * 1600
    assert relu.operations == 400 < tanh.operations
    three = work("Sum", [[4, 100]] * 3, [[4, 100]])
    assert (three.operations, three.traffic) == (800, 2 * 3 * 1600)
    reduced = work("ReduceMean", [[4, 100]], [[4, 1]])
    assert (reduced.operations, reduced.traffic) == (400, 1616)


def test_selections_do_not_read_whole_tables() -> None:
    """A Gather of 5 rows of 64 numbers reads and writes 5 rows, whatever the size of the table."""
    found = work("Gather", [[1_000_000, 64], ("tensor(int64)", [5])], [[5, 64]])
    assert (found.operations, found.traffic, found.footprint) == (0, 2 * 1280 + 40, 2 * 1280 + 40)
    assert (found.pieces, found.singles) == (5, 0)
    axis = work("Gather", [[2, 1000], ("tensor(int64)", [5])], [[2, 5]], axis=1)
    assert (axis.pieces, axis.singles) == (10, 0)


@pytest.mark.parametrize(
    ("op_type", "inputs", "outputs", "attributes", "pieces"),
    [
        ("Concat", [[2, 3, 8], [2, 5, 8]], [[2, 8, 8]], {"axis": 1}, 4),
        ("Concat", [[2, 3, 8], [2, 3, 8]], [[2, 3, 16]], {"axis": -1}, 12),
        ("Split", [[2, 6, 8]], [[2, 3, 8], [2, 3, 8]], {"axis": 1}, 4),
        ("Transpose", [[5, 6, 8]], [[6, 5, 8]], {"perm": [1, 0, 2]}, 30),
        ("Transpose", [[5, 6, 8]], [[5, 8, 6]], {"perm": [0, 2, 1]}, 240),
        ("Transpose", [[5, 1, 8]], [[1, 5, 8]], {"perm": [1, 0, 2]}, 1),
        ("Reshape", [[5, 6, 8]], [[30, 8]], {}, 1),
        ("Slice", [[4, 10, 8]], [[4, 5, 8]], {}, 4),
        ("Slice", [[4, 10, 8]], [[4, 10, 7]], {}, 40),
    ],
)
def test_contiguous_pieces_by_hand(
    op_type: str, inputs: list[Any], outputs: list[Any], attributes: dict[str, Any], pieces: float
) -> None:
    """The runs of memory that keep their order, counted on paper."""
    found = work(op_type, inputs, outputs, **attributes)
    assert found.operations == 0
    assert found.pieces + found.singles == pieces
    assert bool(found.singles) == (pieces == sum(math.prod(shape) for shape in outputs))


def test_unknown_shapes_and_operators_count_as_little() -> None:
    """A value without a shape is empty; an unknown operator reads, writes and computes one operation per element."""
    node = helper.make_node("MatMul", ["a", "b"], ["y"])
    assert node_work(node, {}).flops == 0
    free = {"a": TensorInfo("a", F, ("batch", 4)), "y": TensorInfo("y", F, (2, 4))}
    assert node_work(node, free).flops == 8
    assert work("Mystery", [[3, 4]], [[3, 4]]).flops == 12
    assert work("Shape", [[3, 4]], [("tensor(int64)", [2])]).traffic == 16


def test_flops_count_products_or_elements() -> None:
    """The count of profiles has no weights of functions: 2 * 8 * 4 * 4 for a product, 32 for its activation."""
    values = {n: TensorInfo(n, F, s) for n, s in {"x": (8, 4), "w": (4, 4), "y": (8, 4)}.items()}
    assert node_flops(helper.make_node("MatMul", ["x", "w"], ["y"]), values) == 256
    assert node_flops(helper.make_node("Tanh", ["x"], ["y"]), values) == 32


def test_a_pool_of_whole_blocks_of_channels_is_brought_into_their_layout_and_back() -> None:
    """32 channels of 8 x 8 to 4 x 4 by windows of 3 x 3: a load and a comparison for each element of a window."""
    found = work("MaxPool", [[2, 32, 8, 8]], [[2, 32, 4, 4]], kernel_shape=[3, 3], strides=[2, 2])
    touched = 4 * 2 * 32 * (64 + 16)
    assert (found.operations, found.short_vectors) == (2 * 2 * 32 * 16 * 9, 0)
    assert (found.traffic, found.relaid, found.footprint, found.kernels) == (touched, touched, touched, 3)


@pytest.mark.parametrize(
    ("op_type", "shape", "result", "attributes", "rows", "steps"),
    [
        # 10 elements are 2 vectors and 2 single ones, in 3 rows; 5 outputs are 3 vectors of 2, of 3 columns each.
        ("MaxPool", [1, 8, 10, 10], [1, 8, 5, 5], {"kernel_shape": [3, 3], "strides": [2, 2]}, 40, 3 * 4 + 3 * 3),
        ("MaxPool", [1, 8, 12, 12], [1, 8, 11, 11], {"kernel_shape": [2, 2]}, 88, 2 * 3 + 2 * 3),
        # Three divisions of two steps each.
        ("AveragePool", [1, 8, 12, 12], [1, 8, 11, 11], {"kernel_shape": [2, 2]}, 88, 2 * 3 + 2 * 3 + 6),
        # 49 elements are 12 vectors and one single element.
        ("GlobalAveragePool", [1, 24, 7, 7], [1, 24, 1, 1], {}, 24, 13),
        # A stride of 3 has no kernel by rows: 9 elements, two cycles each.
        ("MaxPool", [1, 8, 9, 9], [1, 8, 3, 3], {"kernel_shape": [3, 3], "strides": [3, 3]}, 72, 2 * 9),
    ],
)
def test_other_pools_take_steps_of_short_vectors(
    op_type: str, shape: list[int], result: list[int], attributes: dict[str, Any], rows: int, steps: int
) -> None:
    """The vectors of one row of the output, or of one output, counted on paper."""
    found = work(op_type, [shape], [result], **attributes)
    assert (found.pieces, found.short_vectors) == (rows, rows * steps)
    assert (found.relaid, found.kernels) == (0, 1)


def test_an_rnn_transposes_its_weights_and_calls_its_activation() -> None:
    """In each of 10 steps all of R, and W once; 80 x 32 calls of tanh. The kernels of LSTM and GRU do neither."""
    shapes = [[10, 8, 64], [1, 32, 64], [1, 32, 32]]
    found = work("RNN", shapes, [[10, 1, 8, 32]], hidden_size=32)
    assert found.calls == 80 * 32
    assert found.relaid == 4 * (32 * 64 + 10 * 32 * 32)
    assert found.setup is Setup.NONE
    lstm = work("LSTM", [shapes[0], [1, 128, 64], [1, 128, 32]], [[10, 1, 8, 32]], hidden_size=32)
    assert (lstm.calls, lstm.relaid, lstm.setup) == (0, 0, Setup.RECURRENT)


def test_operators_that_run_as_several_kernels_or_copy_single_elements() -> None:
    """A sum of 10 values is 9 additions; a scatter walks its 6 updates; a reduction prepares its loops."""
    assert work("Sum", [[4]] * 10, [[4]]).kernels == 9
    indices = ("tensor(int64)", [2, 3])
    assert work("ScatterElements", [[2, 6], indices, [2, 3]], [[2, 6]], axis=1).pieces == 6
    assert work("ReduceSum", [[4, 100]], [[4, 1]]).setup is Setup.LOOPS
    assert work("Concat", [[1, 4]] * 10, [[10, 4]], axis=0).joined == 9
    assert work("Softmax", [[3, 8, 100]], [[3, 8, 100]]).pieces == 24


def test_a_convolution_without_blocks_of_channels_expands_its_input() -> None:
    """24 channels, depthwise: 9 elements for each of 24 x 64 positions, in vectors of 4, or one by one."""
    same = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "group": 24}
    found = work("Conv", [[1, 24, 8, 8], [24, 1, 3, 3]], [[1, 24, 8, 8]], **same)
    assert (found.short_vectors, found.relaid) == (24 * 64 * 9 * 2 / 4, 0)
    strided = work("Conv", [[1, 24, 16, 16], [24, 1, 3, 3]], [[1, 24, 8, 8]], strides=[2, 2], **same)
    assert strided.short_vectors == 24 * 64 * 9 * 5 / 4


@pytest.mark.parametrize(
    ("channels", "filters", "groups", "blocked"),
    [
        (3, 24, 1, True),  # fewer than 16 channels are read as they are
        (32, 24, 1, True),  # filters are filled up to a block
        (24, 32, 1, False),
        (32, 32, 32, True),
        (24, 24, 24, False),
        (32, 64, 2, True),
        (32, 48, 2, False),
        (16, 32, 2, False),
    ],
)
def test_convolutions_in_blocks_of_channels(channels: int, filters: int, groups: int, *, blocked: bool) -> None:
    """The conditions of onnxruntime's NCHWc optimisation, case by case."""
    shapes = [[1, channels, 8, 8], [filters, channels // groups, 3, 3]]
    found = work("Conv", shapes, [[1, filters, 8, 8]], group=groups, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    assert (found.relaid > 0, found.short_vectors == 0) == (blocked, blocked)
