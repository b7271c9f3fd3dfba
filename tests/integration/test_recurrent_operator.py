"""The native recurrent operator: equal to onnxruntime's LSTM, GRU and RNN."""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from chrion.graph.native_operators import with_native_operators
from chrion.graph.native_recurrent import OPERATOR
from chrion.native import operators_available
from chrion.native.library import path_of
from property_tests import examples
from recurrent_cells import FUNCTIONS, GATES, STATES, Array, Cell, draw_cell, draw_feed, open_model, run_model

pytestmark = pytest.mark.skipif(not operators_available(), reason="native operators are not compiled")
#: Of outputs of about 1 of sigmoids and tanh in float32: of some hundred products, and a few times the error of both.
TOLERANCE = 2e-6
#: Of any functions, some of which amplify differences from step to step; relative to outputs above 1.
AMPLIFIED = 1e-4


def compare(cell: Cell, feed: dict[str, Array], tolerance: float = TOLERANCE, threads: int = 1) -> None:
    """Check that the native operator has the outputs of onnxruntime's."""
    model = cell.model()
    native = with_native_operators(model)
    assert [node.op_type for node in native.graph.node] == [OPERATOR]
    expected, results = run_model(model, feed, threads), run_model(native, feed, threads)
    assert [array.shape for array in results] == [array.shape for array in expected]
    for result, right in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, right, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", [*GATES])
def test_all_inputs_of_each_kind(kind: str, direction: str) -> None:
    """Units that do not fill the last vector, and batches of one, of a block of rows, and of several."""
    optional = "B lens h c P" if kind == "LSTM" else "B lens h"
    for hidden, batch, linear in [(20, 1, 0), (16, 4, 1), (37, 13, 0), (5, 8, 1)]:
        attributes = {"linear_before_reset": linear} if kind == "GRU" else {}
        cell = Cell(kind, 11, hidden, direction, optional, attributes=attributes)
        compare(cell, cell.feed(7, batch))


@examples(500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_any_operator(seed: int, instructions: int) -> None:
    """Any attributes, functions, optional inputs and outputs, and sizes, zero among them."""
    random = np.random.default_rng([seed, instructions])
    cell = draw_cell(random)
    compare(cell, draw_feed(cell, random, seed), AMPLIFIED, threads=int(random.integers(1, 3)))


@examples(200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_units_divided_among_threads(seed: int, instructions: int) -> None:
    """The outputs are those of one thread, bit for bit, for any number of parts and of threads that compute them."""
    random = np.random.default_rng([seed, instructions, 1])
    cell = draw_cell(random)
    cell.hidden = int(random.choice([cell.hidden, 40, 130]))
    feed = cell.feed(int(random.integers(0, 60)), int(random.choice([0, 1, 1, 2, 7])), seed, shortest=0)
    whole, divided = (with_native_operators(cell.model(), split=split) for split in (1, int(random.integers(2, 8))))
    session = open_model(divided, int(random.choice([1, 2, 4])))
    expected = run_model(whole, feed)
    for _ in range(3):
        for result, right in zip(session.run(None, feed), expected, strict=True):
            np.testing.assert_array_equal(result, right)


@pytest.mark.parametrize("kind", [*GATES])
def test_divided_operators_of_concurrent_requests(kind: str) -> None:
    """Requests on one session share its threads, of which each may be late."""
    cell = Cell(kind, 24, 130, "bidirectional")
    feeds = [cell.feed(30, 1, seed) for seed in range(4)]
    expected = [run_model(with_native_operators(cell.model()), feed) for feed in feeds]
    session = open_model(with_native_operators(cell.model(), split=4), 2)

    def serve(at: int) -> None:
        for _ in range(20):
            results[at].append(session.run(None, feeds[at]))

    results: list[list[list[Array]]] = [[] for _ in feeds]
    threads = [threading.Thread(target=serve, args=(at,)) for at in range(len(feeds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own, right in zip(results, expected, strict=True):
        assert len(own) == 20
        for outputs in own:
            for result, array in zip(outputs, right, strict=True):
                np.testing.assert_array_equal(result, array)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("batch", [1, 7])
def test_blocks_of_inputs_and_of_depth(batch: int) -> None:
    """More steps than are multiplied at once, and more inputs and units than a part of a panel has rows."""
    for cell in (Cell("LSTM", 600, 9, "bidirectional", scale=0.04), Cell("GRU", 3, 530)):
        compare(cell, cell.feed(60, batch))


@pytest.mark.parametrize("unusual", [np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-42])
@pytest.mark.parametrize("optional", ["", "B"])
@pytest.mark.parametrize("kind", [*GATES])
def test_unusual_numbers(kind: str, optional: str, unusual: float) -> None:
    """NaN, infinities and denormals have the consequences that they have in onnxruntime, in the same rows."""
    cell = Cell(kind, 3, 20, optional=optional)
    feed = cell.feed(4, 4)
    feed["X"] *= np.float32(1e-40 if abs(unusual) < 1 else 1)
    feed["X"][1, 1, 0] = feed["X"][2, 2] = unusual
    compare(cell, feed)
    clipped = Cell(kind, 3, 20, optional=optional, attributes={"clip": 0.5})
    compare(clipped, feed)


@pytest.mark.parametrize("name", ["Relu", "HardSigmoid", "LeakyRelu", "ThresholdedRelu", "Softplus", "Affine"])
@pytest.mark.parametrize("kind", [*GATES])
def test_nan_in_other_functions(kind: str, name: str) -> None:
    """It stays, or becomes a number, as in onnxruntime."""
    cell = Cell(kind, 3, 20, optional="", attributes={"activations": [name] * FUNCTIONS[kind]})
    feed = cell.feed(2, 3)
    feed["X"][0, 1, 0] = np.nan
    compare(cell, feed, AMPLIFIED)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", [*GATES])
def test_rows_of_length_zero(kind: str, direction: str) -> None:
    """Their final states are zeros, whatever the initial ones."""
    cell = Cell(kind, direction=direction, optional="B lens h")
    compare(cell, cell.feed(4, 3, lengths=[0, 4, 2]))
    compare(cell, cell.feed(4, 2, lengths=[0, 0]))


@pytest.mark.parametrize("kind", [*GATES])
def test_no_steps_and_no_rows(kind: str) -> None:
    """Outputs without elements, and final states of zeros, also where onnxruntime ends the process."""
    cell = Cell(kind, direction="bidirectional")
    native = with_native_operators(cell.model())
    sizes = {(0, 3): [(0, 2, 3, 6), (2, 3, 6), (2, 3, 6)], (4, 0): [(4, 2, 0, 6), (2, 0, 6), (2, 0, 6)]}
    for (steps, batch), shapes in sizes.items():
        results = run_model(native, cell.feed(steps, batch))
        assert [array.shape for array in results] == shapes[: 1 + STATES[kind]]
        assert not any(array.any() for array in results)


@pytest.mark.parametrize("direction", ["reverse", "bidirectional"])
@pytest.mark.parametrize("kind", [*GATES])
def test_layout_of_rows(kind: str, direction: str) -> None:
    """With layout 1, which onnxruntime does not run, the outputs are those of layout 0 with the batch first."""
    optional = "B lens h c" if kind == "LSTM" else "B lens h"
    cell = Cell(kind, 4, 9, direction, optional)
    feed = cell.feed(5, 3)
    expected = run_model(cell.model(), feed)
    order = {"X": (1, 0, 2), "h": (1, 0, 2), "c": (1, 0, 2), "lens": (0,)}
    feed = {name: np.ascontiguousarray(array.transpose(order[name])) for name, array in feed.items()}
    cell.attributes["layout"] = 1
    results = run_model(with_native_operators(cell.model()), feed)
    for result, right, axes in zip(results, expected, [(2, 0, 1, 3), (1, 0, 2), (1, 0, 2)], strict=False):
        np.testing.assert_allclose(result, right.transpose(axes), atol=TOLERANCE)


def test_threads_do_not_change_the_result() -> None:
    """The directions are computed by two threads, or one after the other."""
    cell = Cell("LSTM", 64, 64, "bidirectional", "B h c")
    native, feed = with_native_operators(cell.model()), cell.feed(40, 3)
    for one, two in zip(run_model(native, feed), run_model(native, feed, threads=2), strict=True):
        np.testing.assert_array_equal(one, two)


def test_requests_at_the_same_time() -> None:
    """Runs of one session on several threads do not share scratch memory, whatever their sizes."""
    cell = Cell("GRU", 24, 24)
    session = open_model(with_native_operators(cell.model()))
    feeds = [cell.feed(1 + 3 * at, 1 + at, at) for at in range(4)]
    expected = [session.run(None, feed)[0] for feed in feeds]
    wrong: list[int] = []

    def run(at: int) -> None:
        same = [np.array_equal(session.run(None, feeds[at])[0], expected[at]) for _ in range(50)]
        wrong.extend([at] * same.count(False))

    threads = [threading.Thread(target=run, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def packed_bytes() -> int:
    """Return the bytes of all packed weights of the process."""
    count = ctypes.CDLL(str(path_of("operators"))).chrion_packed_bytes
    count.restype = ctypes.c_size_t
    gc.collect()
    return int(count())


def test_equal_weights_are_packed_once() -> None:
    """Sessions share them, also those of one direction; the last one frees them."""
    before = packed_bytes()
    both = Cell("LSTM", 30, 50, "bidirectional", "B")
    weights = both.weights()
    first = open_model(with_native_operators(both.model(weights)))
    size = packed_bytes() - before
    assert size >= sum(weights[name].nbytes for name in "WR")
    second = open_model(with_native_operators(both.model(weights)))
    one = Cell("LSTM", 30, 50, "reverse", "B")
    back = open_model(with_native_operators(one.model({name: array[1:] for name, array in weights.items()})))
    assert packed_bytes() - before == size
    del first, second
    assert packed_bytes() - before == size // 2
    del back
    assert packed_bytes() == before


@pytest.mark.parametrize("change", ["W", "R", "inputs", "kind"])
def test_different_weights_are_not_shared(change: str) -> None:
    """Not even if a single element differs, or if the same numbers mean something else."""
    cell = Cell("RNN", 8, 8, optional="")
    weights: dict[str, Any] = cell.weights()
    session = open_model(with_native_operators(cell.model(weights)))
    before = packed_bytes()
    other, changed = cell, {name: array.copy() for name, array in weights.items()}
    if change == "inputs":
        other = Cell("RNN", 7, 8, optional="")
        changed["W"] = changed["W"][..., :7]
    elif change == "kind":
        other = Cell("LSTM", 8, 2, optional="")
        changed["R"] = changed["R"][:, :, :2]
    else:
        changed[change][0, 7, 7] += 1
    second = open_model(with_native_operators(other.model(changed)))
    assert packed_bytes() > before
    feed = other.feed(3, 1)
    np.testing.assert_allclose(second.run(None, feed)[0], run_model(other.model(changed), feed)[0], atol=TOLERANCE)
    feed = cell.feed(3, 1)
    np.testing.assert_allclose(session.run(None, feed)[0], run_model(cell.model(weights), feed)[0], atol=TOLERANCE)
