"""Recurrent models: stacks, and all variants of the operators, against plain onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from chrion import HybridSession, load
from chrion.errors import ModelError, OptionError
from chrion.scheduler import fixed_plan
from chrion.zoo import RecurrentSpec, build, build_recurrent, names, specification
from helpers import FLOAT, alternating_lanes, assert_equal, make_model, node, run_plain, value

CELLS = ["LSTM", "GRU", "RNN"]


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_the_chunk_does_not_change_the_result(cell: str, bidirectional: bool) -> None:  # noqa: FBT001
    """Unfolded, chunked (also unevenly) and folded stacks give equal outputs, in plain onnxruntime and on lanes."""
    x = np.random.default_rng(1).standard_normal((5, 2, 6)).astype(np.float32)
    spec: dict[str, Any] = {"cell": cell, "layers": 2, "batch": 2, "io": 6, "seq": 5, "bidirectional": bidirectional}
    folded = run_plain(build_recurrent(RecurrentSpec(**spec, chunk=5)), {"X": x})
    assert folded[0].shape == (5, 2, 12 if bidirectional else 6)
    for chunk in (1, 2):
        model = build_recurrent(RecurrentSpec(**spec, chunk=chunk))
        assert_equal(run_plain(model, {"X": x}), folded)
        graph = load(model)
        with HybridSession(graph, plan=fixed_plan(graph, alternating_lanes(graph))) as session:
            assert_equal(session.run(None, {"X": x}), folded)


def test_the_unfolded_stack_is_the_recurrence() -> None:
    """The stack computes a simple RNN, h = tanh(x W' + h R' + b), for each layer."""
    spec = RecurrentSpec(cell="RNN", layers=2, batch=2, io=3, seq=4)
    model = build_recurrent(spec)
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    x = np.random.default_rng(2).standard_normal((4, 2, 3)).astype(np.float32)
    rows = list(x)
    for layer in range(2):
        w, r, b = (weights[f"l{layer}.{part}"][0] for part in "WRB")
        h = np.zeros((2, 3), np.float32)
        for t in range(4):
            rows[t] = h = np.tanh(rows[t] @ w.T + h @ r.T + b[:3] + b[3:])
    assert_equal(run_plain(model, {"X": x}), [np.stack(rows)])


def test_the_baseline_is_the_papers() -> None:
    """The baseline has 1152 LSTM cells of at most 12 signatures, and X and Y are [96, 8, 64]."""
    model = build("lstm-baseline")
    assert sum(n.op_type == "LSTM" for n in model.graph.node) == 12 * 96 == 1152
    graph = load(model)
    assert graph.dag.op_types.count("LSTM") == 1152
    assert len(set(graph.dag.signatures)) <= 12
    assert [i.shape for i in (*graph.inputs, *graph.outputs)] == [(96, 8, 64)] * 2


#: Table 6: layers, batch, width, steps.
TABLE_6 = {
    "lstm-baseline": (12, 8, 64, 96),
    "lstm-layers-4": (4, 8, 64, 96),
    "lstm-layers-8": (8, 8, 64, 96),
    "lstm-layers-16": (16, 8, 64, 96),
    "lstm-batch-1": (12, 1, 64, 96),
    "lstm-batch-2": (12, 2, 64, 96),
    "lstm-batch-4": (12, 4, 64, 96),
    "lstm-batch-16": (12, 16, 64, 96),
    "lstm-io-32": (12, 8, 32, 96),
    "lstm-io-128": (12, 8, 128, 96),
    "lstm-seq-32": (12, 8, 64, 32),
    "lstm-seq-64": (12, 8, 64, 64),
    "lstm-seq-128": (12, 8, 64, 128),
}


def test_the_specifications_are_table_6() -> None:
    """The thirteen specifications have the structures of Table 6, with one operator per step."""
    for name, sizes in TABLE_6.items():
        assert name in names()
        spec = specification(name)
        assert (spec.layers, spec.batch, spec.io, spec.seq) == sizes, name
        assert (spec.cell, spec.chunk, spec.bidirectional) == ("LSTM", 1, False), name


def test_equal_seeds_give_equal_weights() -> None:
    """Equal seeds give equal weights, and other seeds give others."""
    made = [build("gru", {"layers": 1, "seq": 2, "io": 4, "seed": s}).SerializeToString() for s in (0, 0, 1)]
    assert made[0] == made[1] != made[2]


@pytest.mark.parametrize(
    "parameters",
    [{"layers": 0}, {"batch": -1}, {"chunk": 97}, {"seed": -1}, {"nothing": 1}, {"layers": True}, {"layers": 1.5}],
)
def test_parameters_out_of_range_are_refused(parameters: dict[str, Any]) -> None:
    """Sizes that are not whole numbers above zero, and chunks longer than the sequence, are refused."""
    with pytest.raises(OptionError):
        build("lstm", parameters)


def test_unknown_and_damaged_specifications_are_refused(tmp_path: Any) -> None:
    """An unknown name and a file that is not a specification are refused."""
    with pytest.raises(OptionError, match="unknown model 'transformer'"):
        build("transformer")
    for text in ("not toml [", 'builder = "cnn"', 'builder = "lstm"\nparameters = 3'):
        path = tmp_path / "m.toml"
        path.write_text(text)
        with pytest.raises(ModelError, match=r"m\.toml"):
            build(str(path))


GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def variant(cell: str, options: dict[str, Any]) -> tuple[onnx.ModelProto, dict[str, np.ndarray[Any, Any]]]:
    """Return a model of two branches of one recurrent operator with the given options, and a request."""
    seq, batch, width, hidden = 5, 3, 4, 6
    pick = np.random.default_rng(3)
    options = dict(options)
    initial, lengths, peepholes = (options.pop(k, False) for k in ("initial", "lengths", "peepholes"))
    directions = 2 if options.get("direction") == "bidirectional" else 1
    gates, layout = GATES[cell], options.get("layout", 0)

    def numbers(*shape: int) -> np.ndarray[Any, Any]:
        return pick.uniform(-0.5, 0.5, shape).astype(np.float32)

    weights = {
        "w": numbers(directions, gates * hidden, width),
        "r": numbers(directions, gates * hidden, hidden),
        "b": numbers(directions, 2 * gates * hidden),
    }
    x_shape = [batch, seq, width] if layout else [seq, batch, width]
    state = [batch, directions, hidden] if layout else [directions, batch, hidden]
    inputs = [value("x", FLOAT, x_shape)]
    feed = {"x": numbers(*x_shape)}
    states = ["first_h", "first_c"][: 2 if cell == "LSTM" else 1]
    slots = ["", *("" for _ in states)]
    if lengths:
        weights["lengths"] = np.array([5, 2, 4], np.int32)
        slots[0] = "lengths"
    for at, name in enumerate(states):
        if initial:
            inputs.append(value(name, FLOAT, state))
            feed[name] = numbers(*state)
            slots[1 + at] = name
    if peepholes:
        weights["p"] = numbers(directions, 3 * hidden)
    results = ["y", "h", "c"][: 3 if cell == "LSTM" else 2]
    nodes, outputs = [node("Neg", ["x"], ["n"])], []
    for branch, source in (("0", "x"), ("1", "n")):
        last = ["p"] if peepholes else []
        made = [name + branch for name in results]
        nodes.append(node(cell, [source, "w", "r", "b", *slots, *last], made, hidden_size=hidden, **options))
        outputs += [value(name, FLOAT, None) for name in made]
    nodes.append(node("Add", ["h0", "h1"], ["sum"]))
    return make_model(nodes, inputs, [*outputs, value("sum", FLOAT, None)], weights), feed


@pytest.mark.parametrize(
    ("cells", "options"),
    [
        (CELLS, {}),
        (CELLS, {"direction": "reverse"}),
        (CELLS, {"direction": "bidirectional"}),
        (CELLS, {"initial": True}),
        (CELLS, {"initial": True, "direction": "bidirectional", "lengths": True}),
        (CELLS, {"clip": 0.2}),
        (CELLS, {"lengths": True}),
        (["LSTM"], {"peepholes": True}),
        (["LSTM"], {"peepholes": True, "clip": 0.3, "direction": "bidirectional"}),
        (["LSTM"], {"input_forget": 1}),
        (["GRU"], {"linear_before_reset": 1}),
        (["GRU"], {"linear_before_reset": 1, "direction": "bidirectional", "initial": True}),
        (["RNN"], {"activations": ["Relu"]}),
    ],
)
def test_variants_of_recurrent_operators(cells: list[str], options: dict[str, Any]) -> None:
    """Each variant on two lanes gives plain onnxruntime's outputs."""
    for cell in cells:
        model, feed = variant(cell, options)
        expected = run_plain(model, feed)
        graph = load(model)
        with HybridSession(graph, plan=fixed_plan(graph, alternating_lanes(graph))) as session:
            for _ in range(2):
                assert_equal(session.run(None, feed), expected)


@pytest.mark.parametrize("cell", CELLS)
def test_batch_major_layout_behaves_as_in_onnxruntime(cell: str) -> None:
    """The session raises InferenceSession's error if the CPU provider lacks layout 1."""
    model, feed = variant(cell, {"layout": 1})
    try:
        expected = run_plain(model, feed)
    except Exception as error:  # noqa: BLE001 - any error, which has to be the same
        with pytest.raises(type(error)):
            HybridSession(model).run(None, feed)
    else:
        with HybridSession(model) as session:
            assert_equal(session.run(None, feed), expected)
