"""The rewrite of matrix products to native ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from chrion.graph.native_linear import OPERATOR
from chrion.graph.native_operators import may_be_native, with_native_operators
from chrion.graph.rewrite import NATIVE, RewriteError
from helpers import FLOAT, make_model, node, value
from rewrite_checks import check_model

W, B = np.ones((5, 6), np.float32), np.ones(6, np.float32)


def product(kind: str = "Gemm", weights: dict[str, Any] | None = None, **attributes: Any) -> onnx.ModelProto:
    """Return a model of one product."""
    weights = {"w": W, "b": B} if weights is None else weights
    names = ["x", "w", *(["b"] if kind == "Gemm" else [])]
    inputs = [value(name, FLOAT, None) for name in names if name not in weights]
    given = {name: array for name, array in weights.items() if name in names}
    return make_model([node(kind, names, ["y"], "product", **attributes)], inputs, [value("y", FLOAT, None)], given)


@pytest.mark.parametrize("kind", ["MatMul", "Gemm"])
def test_the_rewritten_model_keeps_names(kind: str) -> None:
    """Inputs, outputs, weights and the name of the operator stay."""
    model = product(kind)
    native = with_native_operators(model, bfloat16=True)
    check_model(native)
    [before], [after] = model.graph.node, native.graph.node
    assert (after.op_type, after.domain, after.name) == (OPERATOR, NATIVE, before.name)
    assert list(after.input) == list(before.input)
    assert list(after.output) == list(before.output)
    assert {a.name: a.i for a in after.attribute} == {"width": 6, "columns": 1, "split": 1}


def test_a_transposed_factor() -> None:
    """Its rows are the outputs."""
    [after] = with_native_operators(product(transB=1, weights={"w": W, "b": B[:5]}), bfloat16=True).graph.node
    assert {a.name: a.i for a in after.attribute} == {"width": 5, "columns": 0, "split": 1}


def test_only_bfloat16_has_native_products() -> None:
    """Those of float32 are onnxruntime's."""
    model = product()
    assert with_native_operators(model) is model
    assert [may_be_native(model.graph.node[0], bfloat16=bfloat16) for bfloat16 in (False, True)] == [False, True]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (product("MatMul", {}), "has no constant second factor"),
        (product("MatMul", {"w": W[None]}), "expected a matrix"),
        (product("MatMul", {"w": W.astype(np.float64)}), "of type DOUBLE"),
        (product(transA=1), "transposes its first factor"),
        (product(alpha=0.5), "has alpha or beta"),
        (product(beta=0.5), "has alpha or beta"),
        (product(weights={"w": W}), "has no constant bias"),
        (product(weights={"w": W, "b": B[:1]}), "expected 6 elements"),
        (product(weights={"w": W, "b": B[:, None]}), "expected 6 elements"),
    ],
)
def test_products_that_are_refused(model: onnx.ModelProto, message: str) -> None:
    """The error names the operator."""
    with pytest.raises(RewriteError, match=f"'product' .*{message}"):
        with_native_operators(model, bfloat16=True)


def test_an_old_opset_is_refused() -> None:
    """The bias of a Gemm had an attribute then."""
    model = product()
    model.opset_import[0].version = 6
    with pytest.raises(RewriteError, match="is of opset 6"):
        with_native_operators(model, bfloat16=True)
