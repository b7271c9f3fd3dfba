"""The native recurrent operator with products in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from onnxruntime.capi.onnxruntime_pybind11_state import RuntimeException

from chrion.graph.native_operators import with_native_operators
from chrion.native import bfloat16_available
from native_instructions import using_instructions
from property_tests import examples
from recurrent_cells import GATES, Array, Cell, open_model, run_model

pytestmark = pytest.mark.skipif(not bfloat16_available(), reason="the processor does not multiply bfloat16")
#: As of float32, since sums are.
TOLERANCE = 3e-6
#: Of one step whose factors are rounded after a product of states, which may then be those of the next bfloat16.
ROUNDED_LATER = 4e-3


@pytest.fixture(params=[3, 4], ids=["AVX512-BF16", "AMX"])
def instructions(request: pytest.FixtureRequest) -> Iterator[int]:
    """Let the operators use some instructions of the processor."""
    with using_instructions(request.param) as level:
        yield level


def rounded(array: Array) -> Array:
    """Return the nearest numbers of bfloat16, by an independent library."""
    return array.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def sigmoid(x: Array) -> Array:
    """Return the sigmoid."""
    return 1 / (1 + np.exp(-x))


class Reference:
    """The equations of ONNX for one direction in float64, with weights, inputs and states that are rounded.

    Each step begins with the state that the operator computed, so that no difference grows.
    """

    def __init__(self, cell: Cell, weights: dict[str, Array], direction: int) -> None:
        self.cell, self.hidden = cell, cell.hidden
        self.w, self.r = (rounded(weights[name][direction]).T for name in "WR")
        rows = GATES[cell.kind] * cell.hidden
        bias = weights["B"][direction].astype(float) if "B" in weights else np.zeros(2 * rows)
        self.bias, self.recurrent_bias = bias[:rows], bias[rows:]
        self.peepholes = np.split(weights["P"][direction].astype(float), 3) if "P" in weights else [0.0] * 3

    def step(self, x: Array, h: Array, c: Array) -> tuple[Array, Array]:
        """Return the states after a step."""
        products, width = rounded(x) @ self.w + self.bias, self.hidden
        clip = self.cell.attributes.get("clip", np.inf)
        if self.cell.kind == "GRU":
            recurrent = rounded(h) @ self.r[:, : 2 * width] + self.recurrent_bias[: 2 * width]
            z, r = np.split(sigmoid(np.clip(products[:, : 2 * width] + recurrent, -clip, clip)), 2, axis=1)
            own, own_bias = self.r[:, 2 * width :], self.recurrent_bias[2 * width :]
            if self.cell.attributes["linear_before_reset"]:
                value = products[:, 2 * width :] + r * (rounded(h) @ own + own_bias)
            else:
                value = products[:, 2 * width :] + rounded(r * h) @ own + own_bias
            return (1 - z) * np.tanh(np.clip(value, -clip, clip)) + z * h, c
        sums = products + rounded(h) @ self.r + self.recurrent_bias
        if self.cell.kind == "RNN":
            return np.tanh(np.clip(sums, -clip, clip)), c
        i, o, f, value = np.split(sums, 4, axis=1)
        i = sigmoid(np.clip(i + self.peepholes[0] * c, -clip, clip))
        f = sigmoid(np.clip(f + self.peepholes[2] * c, -clip, clip))
        c = f * c + i * np.tanh(np.clip(value, -clip, clip))
        return sigmoid(np.clip(o + self.peepholes[1] * c, -clip, clip)) * np.tanh(c), c


def check(cell: Cell, steps: int, batch: int, seed: int = 0) -> None:
    """Compare every step of the operator with the equations."""
    weights, feed = cell.weights(seed), cell.feed(steps, batch, seed)
    y = run_model(with_native_operators(cell.model(weights), bfloat16=True, split=1 + seed % 3), feed, 2)[0]
    lengths = feed.get("lens", np.full(batch, steps))
    zeros = np.zeros((cell.directions, batch, cell.hidden))
    plain = cell.kind == "GRU" and not cell.attributes["linear_before_reset"]
    for direction in range(cell.directions):
        reference = Reference(cell, weights, direction)
        backward = cell.direction == "reverse" or direction == 1
        h, c = (feed.get(name, zeros)[direction].astype(float) for name in "hc")
        for step in range(steps):
            rows = np.flatnonzero(step < lengths)
            if not len(rows):
                break
            times = lengths[rows] - 1 - step if backward else np.full(len(rows), step)
            expected, c[rows] = reference.step(feed["X"][times, rows], h[rows], c[rows])
            h[rows] = y[times, direction, rows]
            np.testing.assert_allclose(h[rows], expected, rtol=0, atol=ROUNDED_LATER if plain else TOLERANCE)
            assert np.mean(np.abs(h[rows] - expected)) < 2e-5


@examples(300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_any_operator(seed: int, instructions: int) -> None:
    """Its steps are those of float64 with rounded factors, for all kinds, directions, inputs and sizes."""
    random = np.random.default_rng([seed, instructions])
    kind = str(random.choice([*GATES]))
    optional = [name for name in ("B", "lens", "h") if random.random() < 0.5]
    optional += [name for name in ("c", "P") if kind == "LSTM" and random.random() < 0.5]
    attributes = {"linear_before_reset": int(random.random() < 0.5)} if kind == "GRU" else {}
    if random.random() < 0.3:
        attributes["clip"] = float(random.choice([0.1, 0.7, 3.0]))
    cell = Cell(
        kind,
        int(random.choice([1, 2, 3, 16, 31, 33, 130])),
        int(random.choice([1, 2, 7, 15, 16, 17, 33, 48, 65])),
        str(random.choice(["forward", "reverse", "bidirectional"])),
        " ".join(optional),
        attributes=attributes,
    )
    check(cell, int(random.integers(1, 20)), int(random.choice([1, 1, 2, 3, 7, 16, 17, 35])), seed)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("kind", [*GATES])
def test_no_steps_and_no_rows(kind: str) -> None:
    """Outputs without elements, and final states of zeros."""
    cell = Cell(kind, direction="bidirectional", optional="B lens")
    native = with_native_operators(cell.model(), bfloat16=True)
    for steps, batch in [(0, 3), (4, 0)]:
        assert not any(array.any() for array in run_model(native, cell.feed(steps, batch)))
    y, *_ = run_model(native, cell.feed(4, 3, lengths=[0, 4, 2]))
    assert not y[:, :, 0].any()


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("unusual", [np.nan, np.inf, -np.inf, 1e-42])
@pytest.mark.parametrize("kind", [*GATES])
def test_unusual_numbers(kind: str, unusual: float) -> None:
    """NaN and infinities stay in their rows, as in float32; denormals count as zeros."""
    cell = Cell(kind, 3, 21, "bidirectional")
    feed = cell.feed(4, 4)
    feed["X"][1, 1, 0] = feed["X"][2, 2] = unusual
    model = cell.model()
    expected, results = run_model(model, feed), run_model(with_native_operators(model, bfloat16=True), feed)
    for result, right in zip(results, expected, strict=True):
        np.testing.assert_array_equal(np.isnan(result), np.isnan(right))
        np.testing.assert_allclose(result, right, atol=0.05)


def test_a_processor_without_instructions_is_named() -> None:
    """An operator in bfloat16 is never emulated."""
    model = with_native_operators(Cell("GRU").model(), bfloat16=True)
    with using_instructions(2), pytest.raises(RuntimeException, match="no instructions for bfloat16"):
        open_model(model)


def test_precisions_do_not_share_weights() -> None:
    """Sessions of both precisions compute what each alone computes."""
    cell = Cell("LSTM", 16, 16)
    feed = cell.feed(3, 2)
    models = [with_native_operators(cell.model(), bfloat16=half) for half in (False, True)]
    alone = [run_model(model, feed)[0] for model in models]
    sessions = [open_model(model) for model in models]
    for session, right in zip(sessions, alone, strict=True):
        np.testing.assert_array_equal(session.run(None, feed)[0], right)
    assert 0 < np.abs(alone[0] - alone[1]).max() < 0.02
