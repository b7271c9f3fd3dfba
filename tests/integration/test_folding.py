"""Chains of recurrent operators are folded, with the results of plain onnxruntime."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import chrion
from chrion.graph.folding import fold
from chrion.graph.recurrent import chunk_choices, unroll
from chrion.hardware import hardware
from chrion.profiler.hardware_profile import estimate_profile
from chrion.zoo import build
from helpers import FLOAT, make_model, node, value
from property_tests import examples
from rewrite_checks import check_model
from unfolded_networks import GATES, UnfoldedNetwork


def run(model: onnx.ModelProto, feed: dict[str, Any], folder: object = "") -> list[Any]:
    """Return the outputs of plain onnxruntime."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if folder:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return list(ort.InferenceSession(model.SerializeToString(), options).run(None, feed))


def check(graph: chrion.Graph, model: onnx.ModelProto, feed: dict[str, Any]) -> int:
    """Check the folded graph and one of its chunked forms; return the number of recurrent operators."""
    expected = run(model, feed)
    folded = fold(graph)
    for variant in (folded, *(unroll(graph, chunk) for chunk in chunk_choices(graph)[1:2])):
        check_model(variant.model)
        assert [o.name for o in variant.model.graph.output] == [o.name for o in graph.model.graph.output]
        for found, wanted in zip(run(variant.model, feed, variant.weights_folder), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    return sum(kind in GATES for kind in folded.dag.op_types)


@examples(300, suppress_health_check=[HealthCheck.too_slow])
@given(pick=st.randoms(use_true_random=False))
def test_random_networks_fold_to_one_operator_a_layer(pick: Random) -> None:
    """Every layer and direction becomes one operator, however an exporter writes the steps."""
    network = UnfoldedNetwork(pick, awkward=False)
    assert check(chrion.load(network.model), network.model, network.feed()) == network.folds


@examples(300, suppress_health_check=[HealthCheck.too_slow])
@given(pick=st.randoms(use_true_random=False))
def test_awkward_networks_keep_their_results(pick: Random) -> None:
    """Steps that are read elsewhere, other weights in the middle, and feedback change no result."""
    network = UnfoldedNetwork(pick, awkward=True)
    cells = check(chrion.load(network.model), network.model, network.feed())
    assert network.folds is None or cells == network.folds


WIDTH, BATCH = 3, 2
RNG = np.random.default_rng(1)


class Steps:
    """GRU or LSTM operators of single steps with equal weights."""

    def __init__(self, cell: str, count: int) -> None:
        rows = GATES[cell] * WIDTH
        self.cell, self.count = cell, count
        self.weights = {name: RNG.standard_normal((1, rows, WIDTH)).astype(np.float32) for name in ("w", "r")}
        self.inputs = [value(f"x{t}", FLOAT, [1, BATCH, WIDTH]) for t in range(count)]
        states = ("h", "c")[: 2 if cell == "LSTM" else 1]
        self.nodes = []
        for t in range(count):
            before = [f"{s}{t - 1}" for s in states] if t else []
            inputs = [f"x{t}", "w", "r", *(["", "", *before] if before else [])]
            outputs = ["", *(f"{s}{t}" for s in states)]
            self.nodes.append(node(cell, inputs, outputs, f"cell{t}", hidden_size=WIDTH))

    def cells(self, *outputs: str, more: tuple[onnx.NodeProto, ...] = (), **rest: Any) -> int:
        """Check the folded model with some outputs; return the number of its recurrent operators."""
        results = [value(name, FLOAT, None) for name in outputs]
        model = make_model([*self.nodes, *more], [*self.inputs, *rest.get("inputs", ())], results, self.weights)
        feed = {i.name: RNG.standard_normal((1, BATCH, WIDTH)).astype(np.float32) for i in self.inputs}
        return check(chrion.load(model), model, feed | rest.get("feed", {}))


def test_a_cell_state_that_is_read_in_the_middle_ends_a_chain() -> None:
    """An LSTM returns its last cell state only, but all hidden states."""
    assert Steps("LSTM", 6).cells("h5", "c5", "h2") == 1
    assert Steps("LSTM", 6).cells("h5", "c2") == 2
    assert Steps("LSTM", 6).cells("h5", "c0") == 2
    assert Steps("LSTM", 6).cells("h5", "read", more=(node("Neg", ["c2"], ["read"], "read"),)) == 2


def test_steps_that_depend_on_earlier_results_are_not_folded() -> None:
    """A decoder that reads its own last output, and two chains that read each other, stay as they are."""
    steps = Steps("GRU", 4)
    steps.nodes.insert(2, node("Tanh", ["h1"], ["fed"], "feedback"))
    steps.nodes[3].input[0] = "fed"
    assert steps.cells("h3") == 4
    pair = Steps("GRU", 4)
    pair.weights["other"] = -pair.weights["w"]
    other = [onnx.NodeProto.FromString(n.SerializeToString()) for n in pair.nodes]
    for at, copy in enumerate(other):
        copy.name = f"other{at}"
        copy.input[1], copy.output[1] = "other", f"g{at}"
        if at:
            copy.input[5] = f"g{at - 1}"
    other[3].input[0], pair.nodes[2].input[0] = "h0", "g0"
    pair.nodes = [pair.nodes[0], other[0], pair.nodes[1], other[1], *pair.nodes[2:], *other[2:]]
    assert pair.cells("h3", "g3") == 8


def test_two_operators_that_go_on_from_one_state() -> None:
    """One of them belongs to the chain, and the other starts from a step of it."""
    steps = Steps("GRU", 4)
    branch = node("GRU", ["x3", "w", "r", "", "", "h1"], ["", "branch"], "branch", hidden_size=WIDTH)
    assert steps.cells("h3", "branch", more=(branch,)) == 2


def test_a_body_that_reads_a_step() -> None:
    """The branches of an If read values of the graph by their names."""
    arms: dict[str, Any] = {
        f"{name}_branch": onnx.helper.make_graph([node(kind, ["h1"], ["z"])], name, [], [value("z", FLOAT, None)])
        for name, kind in (("then", "Neg"), ("else", "Abs"))
    }
    nodes = tuple(node("If", ["flag"], [name], name, **arms) for name in ("first", "second"))
    flag = value("flag", onnx.TensorProto.BOOL, [])
    cells = Steps("GRU", 4).cells("h3", "first", "second", more=nodes, inputs=[flag], feed={"flag": np.ones((), bool)})
    assert cells == 1


def test_weights_are_compared_by_value() -> None:
    """A copy of the weights continues a chain; another value does not."""
    steps = Steps("GRU", 4)
    steps.weights["copy"] = steps.weights["w"].copy()
    steps.nodes[2].input[1] = "copy"
    assert steps.cells("h3") == 1
    steps = Steps("GRU", 4)
    steps.weights["copy"] = steps.weights["w"] + 1
    steps.nodes[2].input[1] = "copy"
    assert steps.cells("h3") == 3


def test_large_weights_in_files_and_a_free_batch(tmp_path: Path) -> None:
    """Weights are read from files, copies of them too, and the shapes are those that are given."""
    model = build("lstm", {"layers": 2, "seq": 6, "batch": 2, "io": 24})
    [copied] = [t for t in model.graph.initializer if t.name == "l0.R"]
    copy = model.graph.initializer.add()
    copy.CopyFrom(copied)
    copy.name = "copy"
    model.graph.node[3].input[2] = "copy"
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.shape.dim[1].dim_param = "batch"  # which the initial states, of two rows, do not say
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, size_threshold=100)
    graph = chrion.load(path, {"batch": 2})
    feed = {"X": RNG.standard_normal((6, 2, 24)).astype(np.float32)}
    assert check(graph, build("lstm", {"layers": 2, "seq": 6, "batch": 2, "io": 24}), feed) == 2


def test_what_is_not_folded() -> None:
    """Sequence lengths, weights that a request gives, and both directions in one operator leave a chain as it is."""
    steps = Steps("GRU", 3)
    for each in steps.nodes:
        each.input.extend([""] * (5 - len(each.input)))
        each.input[4] = "lengths"
    lengths = value("lengths", onnx.TensorProto.INT32, [BATCH])
    feed = {"lengths": np.ones(BATCH, np.int32)}
    assert steps.cells("h2", inputs=[lengths], feed=feed) == 3
    steps = Steps("GRU", 3)
    given = steps.weights.pop("r")
    assert steps.cells("h2", inputs=[value("r", FLOAT, given.shape)], feed={"r": given}) == 3


@pytest.mark.parametrize("tune", ["never", "now"])
def test_a_session_runs_the_folded_network_as_one_segment(tune: str, tmp_path: Path) -> None:
    """A plan of one segment is not the plain session if it runs the folded network."""
    model = build("gru", {"layers": 2, "seq": 24, "batch": 1, "io": 8})
    graph = chrion.load(model)
    plan = chrion.partition(graph, estimate_profile(graph, hardware("epyc-16"), 1))
    assert (plan.chunk, len(plan.segments), plan.is_plain) == (24, 1, False)
    plan.save(tmp_path / "plan.json")
    x = {"X": RNG.standard_normal((24, 1, 8)).astype(np.float32)}
    given = {"plan": tmp_path / "plan.json", "strict": True} if tune == "never" else {"tune": tune}
    with chrion.HybridSession(model.SerializeToString(), **given) as session:
        np.testing.assert_allclose(session.run(None, x)[0], run(model, x)[0], atol=1e-6)
        assert session.plan is not None, session.explain()
        assert session.plan.chunk is not None


def test_the_unfolded_network_is_planned_folded_unless_the_profile_is_of_its_cells() -> None:
    """The default policy chooses the folded form; a stored profile of cells, and other policies, keep the graph."""
    graph = chrion.load(build("lstm", {"layers": 4, "seq": 24, "batch": 1, "io": 64}))
    measured = estimate_profile(graph, hardware("epyc-16"), 2)
    plan = chrion.partition(graph, measured)
    assert plan.chunk is not None
    assert len(plan.operators) < len(graph.dag)
    assert plan.uncut == (plan.chunk == 24) == ("chains of recurrent operators folded" in plan.operator_counts)
    assert chrion.partition(graph, measured, policy="chrion-paper").chunk is None
    cells = {s: measured.operators[s] for s in graph.dag.signatures}
    as_it_is = chrion.partition(graph, replace(measured, operators=cells, _estimators={}))
    assert (as_it_is.chunk, as_it_is.operators) == (None, graph.dag.names)
    x = {"X": RNG.standard_normal((24, 1, 64)).astype(np.float32)}
    with chrion.HybridSession(graph, plan=plan, strict=True) as session:
        np.testing.assert_allclose(session.run(None, x)[0], run(graph.model, x, graph.weights_folder)[0], atol=1e-6)
