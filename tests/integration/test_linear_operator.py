"""The native operator for matrix products in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from chrion import HybridSession, load, profile
from chrion.graph.native_operators import with_native_operators
from chrion.native import bfloat16_available
from chrion.profiler.precision import relative_error
from chrion.scheduler import fixed_plan, partition
from helpers import FLOAT, make_model, node, run_plain, value
from native_instructions import using_instructions
from property_tests import examples
from recurrent_cells import Array, open_model, run_model

pytestmark = pytest.mark.skipif(not bfloat16_available(), reason="the processor does not multiply bfloat16")


@pytest.fixture(params=[3, 4], ids=["AVX512-BF16", "AMX"])
def instructions(request: pytest.FixtureRequest) -> Iterator[int]:
    """Let the operators use some instructions of the processor."""
    with using_instructions(request.param) as level:
        yield level


def product(kind: str, w: Array, bias: Array | None = None, **attributes: Any) -> onnx.ModelProto:
    """Return a model of one MatMul or Gemm with a constant second factor, and perhaps a constant bias."""
    weights = {"w": w} | ({} if bias is None else {"b": bias})
    return make_model(
        [node(kind, ["x", *weights], ["y"], "product", **attributes)],
        [value("x", FLOAT, None)],
        [value("y", FLOAT, None)],
        weights,
    )


def rounded(array: Array) -> Array:
    """Return the nearest numbers of bfloat16, by an independent library."""
    return array.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def changed(model: onnx.ModelProto, **attributes: int) -> onnx.ModelProto:
    """Return the model with its native operator, which has other attributes."""
    native = with_native_operators(model, bfloat16=True)
    [operator] = native.graph.node
    for name, number in attributes.items():
        operator.attribute.remove(next(a for a in operator.attribute if a.name == name))
        operator.attribute.append(onnx.helper.make_attribute(name, number))
    return native


@examples(300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_any_product(seed: int, instructions: int) -> None:
    """It is that of float64 with rounded factors, for all sizes and numbers of dimensions, with and without a bias."""
    random = np.random.default_rng([seed, instructions])
    inputs, outputs = (int(random.choice([1, 2, 15, 16, 31, 32, 33, 64, 100, 300])) for _ in range(2))
    rows = int(random.choice([0, 1, 1, 2, 5, 16, 17, 40, 300]))
    w = random.standard_normal((inputs, outputs), np.float32)
    bias = random.standard_normal(outputs, np.float32)
    kind = str(random.choice(["MatMul", "Gemm", "transposed Gemm"]))
    if kind == "MatMul":
        shape: tuple[int, ...] = ((rows,), (rows, 2), (1, 3, rows), ())[random.integers(4)]
        model, biased = product("MatMul", w), False
    else:
        shape, biased = (rows,), bool(random.random() < 0.7)
        transposed = kind != "Gemm"
        given_bias = (bias if random.random() < 0.5 else bias[None]) if biased else None
        model = product("Gemm", w.T.copy() if transposed else w, given_bias, transB=int(transposed))
    x = random.standard_normal((*shape, inputs), np.float32)
    [y] = run_model(with_native_operators(model, bfloat16=True), {"x": x})
    assert y.shape == (*shape, outputs)
    expected = rounded(x) @ rounded(w) + (bias if biased else 0)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-6 * inputs**0.5 * 8)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("unusual", [np.nan, np.inf, -np.inf, 1e-42])
def test_unusual_numbers(unusual: float) -> None:
    """NaN and infinities stay in their rows, as in float32; denormals count as zeros."""
    random = np.random.default_rng(1)
    x, w = random.standard_normal((20, 40), np.float32), random.standard_normal((40, 50), np.float32)
    x[3, 5] = unusual
    model = product("MatMul", w)
    [right], [result] = run_model(model, {"x": x}), run_model(with_native_operators(model, bfloat16=True), {"x": x})
    np.testing.assert_array_equal(np.isnan(result), np.isnan(right))
    np.testing.assert_array_equal(np.isinf(result), np.isinf(right))
    np.testing.assert_allclose(result, right, atol=0.2)


def test_both_layouts_of_the_same_numbers_are_apart() -> None:
    """Weights are shared by content, which a matrix and its transpose in memory may have in common."""
    w, x = np.arange(64 * 64, dtype=np.float32).reshape(64, 64) % 7, np.eye(64, dtype=np.float32)
    models = [product("Gemm", w), product("Gemm", w, transB=1)]
    sessions = [open_model(with_native_operators(model, bfloat16=True)) for model in models]
    for session, right in zip(sessions, (w, w.T), strict=True):
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], right)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("width", [50, 64, 200])
def test_several_threads_compute_the_same(threads: int, width: int) -> None:
    """Outputs may be divided among any number of threads."""
    random = np.random.default_rng(2)
    x, w = random.standard_normal((130, 40), np.float32), random.standard_normal((40, width), np.float32)
    whole, *divided = (with_native_operators(product("MatMul", w), bfloat16=True, split=n) for n in (1, 2, 3, 64))
    [expected] = run_model(whole, {"x": x})
    for model in divided:
        np.testing.assert_array_equal(run_model(model, {"x": x}, threads)[0], expected)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"width": 0}, "1 to 4294967296 outputs"),
        ({"width": 1 << 61}, "1 to 4294967296 outputs"),
        ({"width": 7}, "sizes of weights do not match"),
        ({"split": 0}, "expected a split of 1 to 64"),
        ({"split": 65}, "expected a split of 1 to 64"),
        ({"width": 4}, "sizes of weights do not match"),
    ],
)
def test_attributes_that_do_not_fit_are_refused(attributes: dict[str, int], message: str) -> None:
    """A session of such an operator is not opened."""
    with pytest.raises(Exception, match=message):
        open_model(changed(product("Gemm", np.ones((5, 6), "f"), np.ones(6, "f")), **attributes))


@pytest.mark.parametrize("name", ["w", "b"])
def test_weights_that_are_not_constant_are_refused(name: str) -> None:
    """When the session is opened, or at the first run with such an input."""
    model = with_native_operators(product("Gemm", np.ones((5, 6), "f"), np.ones(6, "f")), bfloat16=True)
    tensor = next(t for t in model.graph.initializer if t.name == name)
    model.graph.initializer.remove(tensor)
    model.graph.input.append(value(name, FLOAT, None))
    with pytest.raises(Exception, match=r"expected (a )?constant"):
        run_model(model, {"x": np.ones((2, 5), "f"), name: onnx.numpy_helper.to_array(tensor)})


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.ones((2, 6), "f"), "another number of inputs"),
        (np.ones((), "f"), "another number of inputs"),
        (np.ones((1,) * 16 + (5,), "f"), "too many dimensions"),
    ],
)
def test_inputs_that_do_not_match_are_errors(x: Array, message: str) -> None:
    """Nothing outside is read, and the session serves the next request."""
    session = open_model(with_native_operators(product("MatMul", np.ones((5, 6), "f")), bfloat16=True))
    with pytest.raises(Exception, match=message):
        session.run(None, {"x": x})
    np.testing.assert_array_equal(session.run(None, {"x": np.ones((3, 5), "f")})[0], np.full((3, 6), 5))


def test_a_processor_without_instructions_is_named() -> None:
    """An operator in bfloat16 is never emulated."""
    model = with_native_operators(product("MatMul", np.ones((5, 6), "f")), bfloat16=True)
    with using_instructions(2), pytest.raises(Exception, match="no instructions for bfloat16"):
        open_model(model)


def perceptron(width: int = 64, layers: int = 3) -> onnx.ModelProto:
    """Return a small multilayer perceptron."""
    random, nodes, weights = np.random.default_rng(3), [], dict[str, Array]()
    for at in range(layers):
        weights |= {
            f"w{at}": random.standard_normal((width, width), "f") / 8,
            f"b{at}": random.standard_normal(width, "f"),
        }
        nodes += [
            node("Gemm", [f"h{at}", f"w{at}", f"b{at}"], [f"s{at}"], f"gemm{at}"),
            node("Relu", [f"s{at}"], [f"h{at + 1}"], f"relu{at}"),
        ]
    return make_model(nodes, [value("h0", FLOAT, [40, width])], [value(f"h{layers}", FLOAT, [40, width])], weights)


def test_a_plan_multiplies_in_bfloat16() -> None:
    """Its products are native ones where those are named, and its outputs are near those of float32."""
    model = perceptron()
    graph = load(model)
    products = tuple(name for name, kind in zip(graph.dag.names, graph.dag.op_types, strict=True) if kind == "Gemm")
    plan = fixed_plan(graph, [1] * len(graph.dag))
    plan = type(plan).from_json(plan.to_json() | {"native": products, "precision": "bf16"})
    feed = {"h0": np.random.default_rng(4).standard_normal((40, 64), np.float32)}
    with HybridSession(graph, plan=plan, strict=True) as session:
        assert 0 < relative_error(session.run(None, feed), run_plain(model, feed)) < 0.02
        assert "bf16: 3 of 6 operators" in session.explain()


def test_products_are_measured_in_bfloat16_alone() -> None:
    """A profile in float32 has only onnxruntime's kernel of a product, one in bfloat16 has both, and the error."""
    graph = load(perceptron())
    rounded_costs, exact = profile(graph, precision="bf16", fresh=True), profile(graph, fresh=True)
    for signature, cost in rounded_costs.operators.items():
        assert bool(cost.native_ms) == (0 < cost.native_error < 0.02) == (cost.op_type == "Gemm"), signature
        assert not exact.operators[signature].native_ms
    plan = partition(graph, rounded_costs)
    assert "bf16" in " ".join(plan.remarks)
