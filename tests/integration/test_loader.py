"""Loading of ONNX files as graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf.message import EncodeError

from chrion import HybridSession, load
from chrion.errors import ModelError, ShapeError
from chrion.scheduler import fixed_plan
from helpers import (
    BOOL,
    FLOAT,
    INT64,
    alternating_lanes,
    assert_same_as_plain,
    branches,
    make_model,
    node,
    run_plain,
    value,
)
from seams.execution import fail, limit

X = np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)
ONE = [value("x", FLOAT, [2, 4])], [value("y", FLOAT, [2, 4])]


def run_cut(model: onnx.ModelProto | str, feed: dict[str, Any]) -> None:
    """Spread a model over two lanes and compare with plain onnxruntime."""
    graph = load(model)
    with HybridSession(graph, plan=fixed_plan(graph, alternating_lanes(graph))) as session:
        assert_same_as_plain(session, model, feed)


def test_operators_edges_and_bytes_by_hand() -> None:
    """Edges, bytes and weights of a diamond of 32-byte tensors with a shared weight of 64 bytes are those by hand."""
    nodes = [
        node("Relu", ["x"], ["a"], name="A"),
        node("MatMul", ["a", "w"], ["b"], name="B"),
        node("MatMul", ["w2", "w"], ["c"], name="C"),
        node("Max", ["b", "a", "c"], ["y"], name="D"),
    ]
    inputs = [*ONE[0], value("w2", FLOAT, [2, 4])]
    graph = load(make_model(nodes, inputs, ONE[1], {"w": np.ones((4, 4), np.float32)}))
    dag = graph.dag
    at = {name: i for i, name in enumerate(dag.names)}
    assert set(at) == set("ABCD")
    assert [dag.names[m] for m in dag.predecessors[at["D"]]] == ["B", "A", "C"]  # in the order of its inputs
    assert dag.edge_bytes[at["D"]] == (32, 32, 32)
    assert dag.predecessors[at["A"]] == dag.predecessors[at["C"]] == ()
    assert dag.weights[at["B"]] == dag.weights[at["C"]] == (0,)
    assert dag.weight_bytes == (64,)
    assert (dag.input_bytes[at["B"]], dag.output_bytes[at["B"]], dag.weight_total(at["B"])) == (32, 32, 64)
    assert dag.flops[at["B"]] == 2 * 2 * 4 * 4
    assert dag.signatures[at["B"]] == dag.signatures[at["C"]]


def test_signatures_depend_on_attributes_shapes_and_integer_weights() -> None:
    """Operators of different cost have different signatures."""
    nodes = [
        node("Softmax", ["x"], ["a"], name="a", axis=0),
        node("Softmax", ["x"], ["b"], name="b", axis=1),
        node("Softmax", ["a"], ["c"], name="c", axis=1),
        node("ReduceSum", ["x", "zero"], ["d"], name="d"),
        node("ReduceSum", ["x", "one"], ["e"], name="e"),
    ]
    outputs = [value(n, FLOAT, None) for n in "abcde"]
    weights = {"zero": np.array([0]), "one": np.array([1])}
    dag = load(make_model(nodes, ONE[0], outputs, weights)).dag
    signature = dict(zip(dag.names, dag.signatures, strict=True))
    assert signature["b"] == signature["c"]
    assert len({signature[name] for name in "abde"}) == 4


def test_missing_names_are_generated_and_unique() -> None:
    """Generated names are unique, and existing names are kept."""
    nodes = [node("Relu", ["x"], ["a"]), node("Neg", ["a"], ["b"], name="Relu_0"), node("Relu", ["b"], ["y"])]
    names = load(make_model(nodes, *ONE)).dag.names
    assert "Relu_0" in names
    assert len(set(names)) == 3
    assert all(names)


def test_repeated_names_are_refused_as_onnxruntime_refuses_them() -> None:
    """The error contains the name that two nodes have."""
    model = make_model([node("Relu", ["x"], ["a"], name="same"), node("Neg", ["a"], ["y"], name="same")], *ONE)
    with pytest.raises(Exception, match="same"):
        run_plain(model, {"x": X})
    with pytest.raises(ModelError, match=r"same node name \(same\)"):
        load(model)


def test_external_data_is_found_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is loaded by an absolute or relative path, and its file is not needed afterwards."""
    model = branches(size=32)
    reference = branches(size=32)
    feed = {"x": np.ones((2, 32), np.float32)}
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    assert (tmp_path / "w.bin").stat().st_size == 32 * 32 * 4
    run_cut(str(tmp_path / "m.onnx"), feed)
    monkeypatch.chdir(tmp_path)
    graph = load("m.onnx")
    Path("w.bin").unlink()
    with HybridSession(graph, plan=fixed_plan(graph, alternating_lanes(graph))) as session:
        assert_same_as_plain(session, reference, feed)


def test_missing_external_data_is_a_model_error(tmp_path: Path) -> None:
    """The error of a missing weight file names the model's file."""
    onnx.save(branches(size=32), tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelError, match=r"m\.onnx"):
        load(tmp_path / "m.onnx")


def test_a_file_above_two_gigabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """The error of a file that protobuf cannot parse has a hint."""
    path = tmp_path / "big.onnx"
    with path.open("wb") as file:
        file.truncate((1 << 31) + 1)  # takes no room on the disk
    with pytest.raises(ModelError, match="2 GB") as caught:
        load(path)
    assert "external data" in caught.value.hint


@pytest.mark.parametrize("error", [ValueError, EncodeError])
def test_a_proto_above_two_gigabytes_is_refused(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    """Any error of the protobuf library when it serialises the model becomes a ModelError."""
    model = branches()
    fail(monkeypatch, "serialise a model", error("too large"))
    with pytest.raises(ModelError, match="2 GB"):
        load(model)


def test_a_proto_that_protobuf_writes_but_cannot_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of the library raise no error for more than 2 GB; here the limit is lower."""
    model = branches()
    limit(monkeypatch, "bytes of a model", model.ByteSize() - 1)
    with pytest.raises(ModelError, match="2 GB"):
        load(model)


@pytest.mark.parametrize(
    "content",
    [b"", b"not a model", b"\x00" * 100, branches().SerializeToString()[:-40], branches().SerializeToString()[:10]],
)
def test_other_files_than_models_are_refused(tmp_path: Path, content: bytes) -> None:
    """Empty files, text, zeros and truncated models are refused, as files and as bytes."""
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.onnx"):
        load(path)
    with pytest.raises(ModelError):
        load(content)


@pytest.mark.parametrize("path", ["missing.onnx", "."])
def test_a_missing_file_is_refused(tmp_path: Path, path: str) -> None:
    """A missing file and a folder are refused."""
    with pytest.raises(ModelError, match="cannot be read"):
        load(tmp_path / path)


def test_shapes_fix_free_dimensions() -> None:
    """Shapes are given by input or by dimension, and apply to all inputs that share the dimension."""
    inputs = [value("a", FLOAT, ["n", 4]), value("b", FLOAT, ["n", "m"])]
    model = make_model([node("Concat", ["a", "b"], ["y"], axis=1)], inputs, [value("y", FLOAT, None)])
    assert load(model).free_dimensions == ("a[n x 4]", "b[n x m]")
    for shapes in ({"a": (2, 4), "m": (3,)}, {"n": (2,), "m": (3,)}, {"b": (2, 3)}, {"n": 2, "m": np.int64(3)}):
        graph = load(model, shapes)
        assert [i.shape for i in graph.inputs] == [(2, 4), (2, 3)]
        assert graph.outputs[0].shape == (2, 7)
        assert [i.shape for i in graph.declared_inputs] == [("n", 4), ("n", "m")]


@pytest.mark.parametrize(
    "shapes",
    [{"z": (1,)}, {"x": (3, 4)}, {"x": (2, 4, 1)}, {"x": (2,)}, {"batch": 2}, {"y": (2, 4)}, {"x": "2x4"}, {"x": 2.0}],
)
def test_shapes_that_do_not_fit_are_refused(shapes: dict[str, tuple[int, ...]]) -> None:
    """An unknown input, another size and another rank are refused."""
    with pytest.raises(ShapeError):
        load(branches(), shapes)


def test_loading_does_not_change_the_callers_proto() -> None:
    """Shapes are written into a copy of the proto."""
    model = make_model([node("Relu", ["x"], ["y"])], [value("x", FLOAT, ["n"])], [value("y", FLOAT, ["n"])])
    before = model.SerializeToString()
    load(model, {"n": (3,)})
    assert model.SerializeToString() == before


def test_model_local_functions() -> None:
    """Models with local functions give the results of plain onnxruntime."""
    opsets = [onnx.helper.make_opsetid("", 17)]
    body = [node("Add", ["p", "p"], ["t"]), node("Relu", ["t"], ["q"])]
    twice = onnx.helper.make_function("local", "Twice", ["p"], ["q"], body, opsets)
    nodes = [
        node("Twice", ["x"], ["a"], domain="local"),
        node("Neg", ["x"], ["b"]),
        node("Twice", ["b"], ["c"], domain="local"),
        node("Sub", ["a", "c"], ["y"]),
    ]
    run_cut(make_model(nodes, *ONE, functions=[twice]), {"x": X})


def test_control_flow_is_one_operator_that_reads_its_captures() -> None:
    """A Loop and a nested If are one operator each, whose predecessors include the values that its bodies capture."""

    def graph_of(nodes: list[onnx.NodeProto], *outputs: str) -> onnx.GraphProto:
        return onnx.helper.make_graph(nodes, "body", [], [value(o, FLOAT, [2, 4]) for o in outputs])

    inner = node(
        "If",
        ["c"],
        ["i"],
        then_branch=graph_of([node("Abs", ["r"], ["i1"])], "i1"),
        else_branch=graph_of([node("Neg", ["n"], ["i2"])], "i2"),
    )
    loop = onnx.helper.make_graph(
        [node("Add", ["state", "r"], ["next"]), node("Identity", ["go"], ["on"])],
        "loop",
        [value("turn", INT64, []), value("go", BOOL, []), value("state", FLOAT, [2, 4])],
        [value("on", BOOL, []), value("next", FLOAT, [2, 4])],
    )
    nodes = [
        node("Relu", ["x"], ["r"], name="r"),
        node("Neg", ["x"], ["n"], name="n"),
        node(
            "If",
            ["c"],
            ["f"],
            name="f",
            then_branch=graph_of([inner], "i"),
            else_branch=graph_of([node("Exp", ["n"], ["e"])], "e"),
        ),
        node("Loop", ["three", "", "n"], ["l"], name="l", body=loop),
        node("Add", ["f", "l"], ["y"], name="y"),
    ]
    model = make_model(nodes, [*ONE[0], value("c", BOOL, [])], ONE[1], {"three": np.array(3)})
    graph = load(model)
    at = {name: i for i, name in enumerate(graph.dag.names)}
    before = {name: {graph.dag.names[m] for m in graph.dag.predecessors[i]} for name, i in at.items()}
    assert before["f"] == {"r", "n"}
    assert before["l"] == {"n", "r", "f"}  # a Loop may change its state's shape, so that the Add stays with it
    for c in (True, False):
        run_cut(model, {"x": X, "c": np.array(c)})


def test_nodes_that_share_a_sequence_are_one_operator() -> None:
    """All nodes on paths between a sequence's producers and readers belong to one operator, and no others."""
    nodes = [
        node("SequenceConstruct", ["x", "x"], ["s"], name="s"),
        node("SequenceLength", ["s"], ["n"], name="n"),
        node("Neg", ["n"], ["m"], name="m"),
        node("SequenceAt", ["s", "m"], ["v"], name="v"),
        node("Relu", ["x"], ["r"], name="r"),
        node("Add", ["v", "r"], ["y"], name="y"),
    ]
    model = make_model(nodes, *ONE)
    graph = load(model)
    kept = next(names for names in _operators(graph.nodes, graph.model) if "s" in names)
    assert {"s", "n", "m", "v"} <= kept
    assert "r" not in kept
    run_cut(model, {"x": X})


def quantised_layer() -> onnx.ModelProto:
    """Return a layer of 8-bit weights between quantisations."""
    weights = {
        "s": np.array(0.02, np.float32),
        "z": np.array(128, np.uint8),
        "w8": np.full((4, 4), 126, np.int8),
        "ws": np.full(4, 0.005, np.float32),
        "wz": np.zeros(4, np.int8),
        "b": np.ones(4, np.float32),
        "t": np.array(0.1, np.float32),
    }
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"], name="x8"),
        node("DequantizeLinear", ["q", "s", "z"], ["f"], name="xf"),
        node("DequantizeLinear", ["w8", "ws", "wz"], ["w"], name="wf", axis=1),
        node("MatMul", ["f", "w"], ["p"], name="product"),
        node("Add", ["p", "b"], ["a"], name="bias"),
        node("Relu", ["a"], ["r"], name="relu"),
        node("QuantizeLinear", ["r", "t", "z"], ["r8"], name="r8"),
        node("DequantizeLinear", ["r8", "t", "z"], ["y"], name="rf"),
    ]
    return make_model(nodes, *ONE, weights)


def test_a_quantised_operator_is_not_cut_off_from_its_activation() -> None:
    """Onnxruntime computes the whole layer in floating point, but a product without its activation in integers.

    For this input, sums of two integer products overflow on x86 processors without VNNI.
    """
    model, x = quantised_layer(), np.full((2, 4), 2.5, np.float32)
    graph = load(model)
    product = next(names for names in _operators(graph.nodes, graph.model) if "relu" in names)
    assert {"xf", "wf", "r8"} < product
    assert not {"x8", "rf"} & product
    for placed in ([1, 2, 1], [2, 1, 1], [1, 1, 2]):
        with HybridSession(graph, plan=fixed_plan(graph, placed), strict=True) as session:
            assert_same_as_plain(session, model, {"x": x})


def _operators(groups: tuple[tuple[int, ...], ...], model: onnx.ModelProto) -> list[set[str]]:
    return [{model.graph.node[i].name for i in group} for group in groups]


def test_the_digest_depends_on_structure_not_on_weights() -> None:
    """A plan fits a retrained model, but not one with another attribute."""

    def model(scale: float, slope: float) -> onnx.ModelProto:
        nodes = [node("LeakyRelu", ["x"], ["a"], alpha=slope), node("MatMul", ["a", "w"], ["y"])]
        return make_model(nodes, *ONE, {"w": np.full((4, 4), scale, np.float32)})

    assert load(model(1, 0.1)).digest == load(model(2, 0.1)).digest
    assert load(model(1, 0.1)).digest != load(model(1, 0.2)).digest


@pytest.mark.parametrize("make", [lambda p: p, str, lambda p: p.read_bytes(), onnx.load])
def test_all_sources_give_the_same_graph(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    """A path, its text, bytes and a ModelProto give the same graph."""
    path = tmp_path / "m.onnx"
    onnx.save(branches(), path)
    assert load(make(path)).digest == load(branches()).digest
