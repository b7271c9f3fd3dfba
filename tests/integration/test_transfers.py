"""Transfers of values to and from a device that supports some types only."""

from __future__ import annotations

from typing import cast

from chrion import load
from chrion.devices import Device
from chrion.graph.extract import Extractor
from chrion.runtime.execution.program import Transfer
from chrion.runtime.execution.transfers import find_transfers
from helpers import FLOAT, INT64, make_model, node, value


class FloatDevice:
    """A device that supports single precision only."""

    def supports(self, kind: str) -> bool:
        return kind == "tensor(float)"


def test_a_value_is_copied_once_to_each_memory_that_reads_it() -> None:
    """Inputs, inner values and outputs are copied, but not indices, empty tensors, or values read in one memory."""
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
    on_device = {"relu", "gather", "abs"}
    lanes = [0 if name in on_device else 1 for name in names]
    at = {name: i for i, name in enumerate(names)}
    device = cast("Device", FloatDevice())
    assert find_transfers(extractor, lanes, device) == (
        Transfer("x", None, (at["relu"],), upload=True),
        Transfer("a", at["relu"], (at["neg"],), upload=False),
        Transfer("b", at["neg"], (at["gather"],), upload=True),
        Transfer("g", at["gather"], (at["exp"],), upload=False),
    )
    # The Dag has the request's inputs and outputs of all types, so that a schedule can account for their copies.
    assert dag.request_inputs == ((2 * 2 * 4, (at["relu"],)),)
    sizes = {names[i]: dag.value_bytes[v] for i, v in dag.request_outputs}
    assert sizes == {"exp": 2 * 2 * 4, "gather": 2 * 2 * 4, "argmax": 2 * 8}
    assert find_transfers(extractor, lanes, None) == ()
    assert find_transfers(extractor, [1] * len(names), device) == ()


def test_an_output_on_the_device_is_copied_to_the_host() -> None:
    """An output of the device that no operator reads is copied to the host for the caller."""
    extractor = Extractor(
        load(make_model([node("Relu", ["x"], ["y"])], [value("x", FLOAT, [2])], [value("y", FLOAT, [2])]))
    )
    device = cast("Device", FloatDevice())
    assert [transfer.value for transfer in find_transfers(extractor, [0], device)] == ["x", "y"]
