"""Which values are to be copied, on a model and a device that holds some types."""

from __future__ import annotations

from typing import cast

from chrion import load
from chrion.devices import Device
from chrion.graph.extract import Extractor
from chrion.runtime.execution.program import Transfer
from chrion.runtime.execution.transfers import find_transfers
from helpers import FLOAT, INT64, make_model, node, value


class Floats:
    """A device that holds floating point numbers alone."""

    def supports(self, kind: str) -> bool:
        return kind == "tensor(float)"


def test_values_cross_once_for_each_side_that_wants_them() -> None:
    """Inputs of the request, inner values and outputs; not indices, nor what is empty, nor what stays on its side."""
    nodes = [
        node("Relu", ["x"], ["a"], name="relu"),
        node("Neg", ["a"], ["b"], name="neg"),
        node("ArgMax", ["b"], ["i"], name="argmax", axis=1, keepdims=0),
        node("Gather", ["b", "i"], ["g"], name="gather", axis=1),
        node("Exp", ["g"], ["y"], name="exp"),
        node("Abs", ["none"], ["n"], name="abs"),
    ]
    inputs = [value("x", FLOAT, [2, 2]), value("none", FLOAT, [0, 2])]
    outputs = [value("y", FLOAT, [2, 2]), value("g", FLOAT, [2, 2]), value("i", INT64, [2]), value("n", FLOAT, [0, 2])]
    extractor = Extractor(load(make_model(nodes, inputs, outputs)))
    dag = extractor.graph.dag
    names = extractor.graph.dag.names
    there = {"relu", "gather", "abs"}
    lanes = [0 if name in there else 1 for name in names]
    at = {name: i for i, name in enumerate(names)}
    device = cast("Device", Floats())
    assert find_transfers(extractor, lanes, device) == (
        Transfer("x", None, (at["relu"],), upload=True),
        Transfer("a", at["relu"], (at["neg"],), upload=False),
        Transfer("b", at["neg"], (at["gather"],), upload=True),
        Transfer("g", at["gather"], (at["exp"],), upload=False),
    )
    # The graph of operators knows the request's values of any type, so that their copies can be charged.
    assert dag.request_inputs == ((2 * 2 * 4, (at["relu"],)),)
    sizes = {names[i]: dag.value_bytes[v] for i, v in dag.request_outputs}
    assert sizes == {"exp": 2 * 2 * 4, "gather": 2 * 2 * 4, "argmax": 2 * 8}
    assert find_transfers(extractor, lanes, None) == ()
    assert find_transfers(extractor, [1] * len(names), device) == ()


def test_an_output_made_there_comes_back_though_nobody_reads_it() -> None:
    """The caller wants it."""
    extractor = Extractor(
        load(make_model([node("Relu", ["x"], ["y"])], [value("x", FLOAT, [2])], [value("y", FLOAT, [2])]))
    )
    device = cast("Device", Floats())
    assert [c.value for c in find_transfers(extractor, [0], device)] == ["x", "y"]
