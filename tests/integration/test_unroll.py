"""Unrolled recurrent operators give the same results."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import chrion
from chrion.graph.recurrent import chunk_choices, unroll, unrollable
from chrion.hardware import hardware
from chrion.profiler.hardware_profile import estimate_profile
from chrion.zoo import build
from helpers import FLOAT, branches, make_model, node, value
from property_tests import examples

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
SEQ, BATCH, WIDTH, HIDDEN = 12, 2, 5, 4
RNG = np.random.default_rng(0)


def operator(
    cell: str,
    direction: str,
    *,
    states: str = "none",
    peepholes: bool = False,
    bias: bool = True,
    kept: tuple[bool, ...] = (True, True, True),
    **attributes: Any,
) -> onnx.ModelProto:
    """Return a model of one recurrent operator with the outputs that are kept."""
    both = 2 if direction == "bidirectional" else 1
    gates, count = GATES[cell], 2 if cell == "LSTM" else 1
    weights = {
        "w": RNG.standard_normal((both, gates * HIDDEN, WIDTH)).astype(np.float32),
        "r": RNG.standard_normal((both, gates * HIDDEN, HIDDEN)).astype(np.float32),
        "b": RNG.standard_normal((both, 2 * gates * HIDDEN)).astype(np.float32),
    }
    inputs = [value("x", FLOAT, [SEQ, BATCH, WIDTH])]
    names = ["x", "w", "r", "b" if bias else "", ""]
    if not bias:
        del weights["b"]
    for state in ("h", "c")[:count] if states != "none" else ():
        names.append(f"{state}0")
        if states == "constant":
            weights[f"{state}0"] = RNG.standard_normal((both, BATCH, HIDDEN)).astype(np.float32)
        else:
            inputs.append(value(f"{state}0", FLOAT, [both, BATCH, HIDDEN]))
    if peepholes:
        names += [""] * (7 - len(names)) + ["p"]
        weights["p"] = RNG.standard_normal((both, 3 * HIDDEN)).astype(np.float32)
    outputs = ["y", "yh", "yc"][: 1 + count]
    shapes = [[SEQ, both, BATCH, HIDDEN], [both, BATCH, HIDDEN], [both, BATCH, HIDDEN]]
    shapes = [shape for shape, keep in zip(shapes, kept, strict=True) if keep]
    outputs = [name if keep else "" for name, keep in zip(outputs, kept, strict=False)]
    made = node(cell, names, outputs, name="cell", hidden_size=HIDDEN, direction=direction, **attributes)
    results = [value(name, FLOAT, shape) for name, shape in zip(filter(None, outputs), shapes, strict=False)]
    return make_model([made], inputs, results, weights)


def run(model: onnx.ModelProto, feed: dict[str, Any], folder: str = "") -> list[Any]:
    """Return the outputs of plain onnxruntime."""
    options = ort.SessionOptions()
    if folder:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    return list(ort.InferenceSession(model.SerializeToString(), options).run(None, feed))


def check(model: onnx.ModelProto, *chunks: int) -> None:
    """Check that the model gives the same outputs, unrolled into chunks of each length."""
    graph = chrion.load(model)
    feed = {i.name: np.asarray(RNG.standard_normal(i.shape), np.float32) for i in graph.inputs}
    outputs = run(model, feed)
    for chunk in chunks:
        cut = unroll(graph, chunk)
        cells = [t for t in cut.dag.op_types if t in GATES]
        assert len(cells) >= -(-SEQ // chunk)
        for found, expected in zip(run(cut.model, feed, str(cut.weights_folder)), outputs, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=f"chunks of {chunk}")


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("cell", GATES)
def test_every_cell_direction_and_chunk(cell: str, direction: str) -> None:
    """Outputs are those of plain onnxruntime, also if the chunk does not divide the sequence."""
    check(operator(cell, direction), 12, 5, 1)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("cell", GATES)
def test_initial_states(cell: str, direction: str) -> None:
    """Initial states may be weights or inputs of the request."""
    for states in ("constant", "input"):
        check(operator(cell, direction, states=states), 5)


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_peepholes_clip_and_other_options(direction: str) -> None:
    """Peepholes, clip and other attributes are kept for each direction."""
    check(operator("LSTM", direction, peepholes=True, clip=0.3), 4)
    check(operator("LSTM", direction, peepholes=True, states="constant"), 4)
    check(operator("GRU", direction, linear_before_reset=1), 4)
    names = {"forward": ["Tanh"], "bidirectional": ["Tanh", "Relu"]}[direction]
    check(operator("RNN", direction, activations=names), 4)


def test_sequence_lengths_and_variable_weights_are_not_unrolled() -> None:
    """Such operators cannot be cut along time, or would have to be copied."""
    whole = operator("LSTM", "forward")
    whole.graph.node[0].input[4] = "lengths"
    whole.graph.input.append(value("lengths", onnx.TensorProto.INT32, [BATCH]))
    graph = chrion.load(whole)
    assert unrollable(graph) == ()
    assert unroll(graph, 4) is graph
    fed = operator("GRU", "forward")
    kept = [t for t in fed.graph.initializer if t.name != "r"]
    del fed.graph.initializer[:]
    fed.graph.initializer.extend(kept)
    fed.graph.input.append(value("r", FLOAT, [1, 3 * HIDDEN, HIDDEN]))
    assert unrollable(chrion.load(fed)) == ()


def test_layers_follow_each_other_chunk_by_chunk() -> None:
    """The first chunk of the second layer does not depend on the last chunk of the first layer."""
    graph = unroll(chrion.load(build("lstm", {"layers": 3, "seq": 12, "batch": 1, "io": 8, "chunk": 12})), 4)
    dag = graph.dag
    cells = [i for i, t in enumerate(dag.op_types) if t == "LSTM"]
    assert len(cells) == 9
    before: set[int] = set()
    todo = [next(i for i in cells if "l1" in dag.names[i] and dag.names[i].endswith("f0"))]
    while todo:
        i = todo.pop()
        before.add(i)
        todo.extend(dag.predecessors[i])
    assert len([i for i in before if dag.op_types[i] == "LSTM"]) == 2


def test_chunk_choices_are_few_and_below_the_length() -> None:
    """Choices are fractions of the sequence; the whole sequence is one if that changes the graph."""
    one = chrion.load(build("lstm", {"layers": 1, "seq": 96, "batch": 1, "io": 8, "chunk": 96}))
    assert chunk_choices(one) == (48, 32, 24, 16, 12, 8)
    assert chunk_choices(chrion.load(build("lstm", {"layers": 1, "seq": 4, "batch": 1, "io": 8}))) == (4, 2, 1)
    assert chunk_choices(chrion.load(branches())) == ()
    assert chunk_choices(chrion.load(operator("LSTM", "bidirectional"))) == (12, 6, 4, 3, 2, 1)


@pytest.mark.parametrize(("cell", "both"), [("lstm", False), ("gru", False), ("lstm", True)])
def test_a_plan_with_chunks_gives_the_results_of_plain_onnxruntime(cell: str, *, both: bool) -> None:
    """The plan is made from the folded model by the default policy; directions run side by side in any case."""
    parameters = {"layers": 4, "seq": 12, "batch": 1, "io": 64, "chunk": 12, "bidirectional": both}
    model = build(cell, parameters)
    graph = chrion.load(model)
    plan = chrion.partition(graph, estimate_profile(graph, hardware("epyc-16"), 2))
    assert bool(plan.chunk) != both
    x = RNG.standard_normal((12, 1, 64)).astype(np.float32)
    with chrion.HybridSession(graph, plan=plan, strict=True) as session:
        np.testing.assert_allclose(session.run(None, {"X": x})[0], run(model, {"X": x})[0], rtol=1e-5, atol=1e-6)


#: Activation functions, and whether each has an alpha and a beta (ONNX, LSTM).
PARAMETERS = {
    "Sigmoid": (False, False),
    "Tanh": (False, False),
    "Relu": (False, False),
    "Softsign": (False, False),
    "Softplus": (False, False),
    "LeakyRelu": (True, False),
    "ThresholdedRelu": (True, False),
    "Elu": (True, False),
    "HardSigmoid": (True, True),
    "Affine": (True, True),
    "ScaledTanh": (True, True),
}
FUNCTIONS = {"LSTM": 3, "GRU": 2, "RNN": 1}


def random_attributes(pick: Random) -> dict[str, Any]:
    """Return a random cell with attributes and optional inputs of every kind."""
    cell = pick.choice(list(GATES))
    direction = pick.choice(["forward", "reverse", "bidirectional"])
    chosen: dict[str, Any] = {"cell": cell, "direction": direction}
    chosen["states"] = pick.choice(["none", "constant", "input"])
    chosen["bias"] = pick.random() < 0.7
    chosen["kept"] = pick.choice([(True, True, True), (True, False, False), (False, True, True), (True, False, True)])
    chosen["peepholes"] = cell == "LSTM" and pick.random() < 0.5
    if pick.random() < 0.4:
        chosen["clip"] = pick.choice([0.3, 2.0])
    if cell == "GRU":
        chosen["linear_before_reset"] = pick.randint(0, 1)
    if cell == "LSTM" and pick.random() < 0.3:
        chosen["input_forget"] = 1
    if pick.random() < 0.7:
        names = pick.choices(list(PARAMETERS), k=FUNCTIONS[cell] * (1 + (direction == "bidirectional")))
        chosen["activations"] = names
        for at, attribute in enumerate(("activation_alpha", "activation_beta")):
            takers = [name for name in names if PARAMETERS[name][at]]
            given = pick.choice([0, len(takers), pick.randint(0, len(takers))])
            if given:  # otherwise functions use their defaults
                chosen[attribute] = [round(pick.uniform(0.1, 0.5), 2) for _ in range(given)]
    return chosen


@examples(120, suppress_health_check=[HealthCheck.too_slow])
@given(pick=st.randoms(use_true_random=False), chunk=st.sampled_from([SEQ, 5, 1]))
def test_random_attributes_give_the_same_results(pick: Random, chunk: int) -> None:
    """Operators that are unrolled equal plain onnxruntime; those with ambiguous attributes are not unrolled."""
    model = operator(**random_attributes(pick))
    graph = chrion.load(model)
    feed = {i.name: np.asarray(RNG.standard_normal(i.shape), np.float32) for i in graph.inputs}
    cut = unroll(graph, chunk)
    for found, expected in zip(run(cut.model, feed, str(cut.weights_folder)), run(model, feed), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parameters", [{"activation_alpha": [0.5]}, {"activation_beta": [0.5]}])
def test_directions_that_share_activation_parameters_are_not_unrolled(parameters: dict[str, list[float]]) -> None:
    """Half of a list of parameters is not that of one direction, since lists skip functions without parameters."""
    model = operator("RNN", "bidirectional", activations=["HardSigmoid", "Tanh"], **parameters)
    graph = chrion.load(model)
    assert unroll(graph, 3) is graph
    check(operator("RNN", "forward", activations=["HardSigmoid"], **parameters), 3)
