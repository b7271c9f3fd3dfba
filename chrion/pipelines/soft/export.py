"""Soft trees as ONNX operators, in place of their ensemble, and tables for encoded categories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from chrion.graph.rewrite import Rewriter, with_inputs
from chrion.graph.trees import is_tree_ensemble
from chrion.graph.trees.tensor_form import with_tensor_opset
from chrion.pipelines import leaves
from chrion.pipelines.leaves import Loss
from chrion.pipelines.soft.features import Embedding
from chrion.pipelines.soft.network import LARGEST, LEAST
from chrion.pipelines.soft.soft_trees import SoftTrees

Array = np.ndarray[Any, Any]
#: The version of ``ai.onnx.ml`` from which on its LabelEncoder has keys and values of any type.
_ENCODERS = 2


def with_soft_trees(
    model: onnx.ModelProto,
    trees: SoftTrees,
    parameters: Mapping[str, Array],
    loss: Loss,
    embeddings: Sequence[Embedding] = (),
) -> onnx.ModelProto:
    """Return a model with soft trees in place of its tree ensemble, and with tables for encoded categories.

    Args:
        model: The model.
        trees: Its ensemble as a network.
        parameters: The deviations from the ensemble by name.
        loss: What its scores were fitted with.
        embeddings: The tables; categories that they lack are encoded as before.
    """
    rewriter = Rewriter(with_tensor_opset(model))
    inputs = {info.name: info for info in rewriter.model.graph.input}
    for node in rewriter.model.graph.node:
        if is_tree_ensemble(node):
            writer = _TreeWriter(rewriter, node, trees, parameters)
            writer.write(writer.embed(node.input[0], trees.width, embeddings, inputs), loss)
        else:
            rewriter.nodes.append(node)
    return _with_encoders(rewriter.finish())


def with_embeddings(
    model: onnx.ModelProto, features: str, width: int, embeddings: Sequence[Embedding]
) -> onnx.ModelProto:
    """Return a model in which tables replace some of its features wherever they are read.

    Args:
        model: The model.
        features: The value with the features, [rows, width].
        width: Their number.
        embeddings: The tables; categories that they lack are encoded as before.
    """
    rewriter = Rewriter(with_tensor_opset(model))
    inputs = {info.name: info for info in rewriter.model.graph.input}
    changed = ""
    for node in rewriter.model.graph.node:
        places = [at for at, name in enumerate(node.input) if name == features]
        if places and not changed:
            changed = _Writer(rewriter, f"{features}/soft").embed(features, width, embeddings, inputs)
        rewriter.nodes.append(with_inputs(node, dict.fromkeys(places, changed)))
    return _with_encoders(rewriter.finish())


def _with_encoders(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model, with a version of ``ai.onnx.ml`` that has the encoders of tables."""
    for opset in model.opset_import:
        if opset.domain == "ai.onnx.ml":
            opset.version = max(opset.version, _ENCODERS)
    return model


class _Writer:
    """Writes operators whose values have a common beginning of their names."""

    def __init__(self, rewriter: Rewriter, name: str) -> None:
        self._rewriter, self._name = rewriter, name

    def _add(self, kind: str, inputs: Sequence[Any], output: str, **attributes: Any) -> str:
        return self._rewriter.add(kind, inputs, f"{self._name}/{output}", **attributes)

    def _weight(self, name: str, value: Array) -> str:
        return self._rewriter.weight(f"{self._name}/{name}", value)

    def _number(self, value: float) -> str:
        return self._rewriter.constant(np.array(value, np.float32))

    def embed(
        self, features: str, width: int, embeddings: Sequence[Embedding], inputs: Mapping[str, onnx.ValueInfoProto]
    ) -> str:
        """Return the features, [rows, width], with those of embeddings from their tables."""
        x = self._add("Cast", [features], "x", to=onnx.TensorProto.FLOAT)
        if not embeddings:
            return x
        kept = np.setdiff1d(np.arange(width), np.concatenate([own.features for own in embeddings]))
        parts, order = [], []
        if len(kept):
            parts.append(self._add("Gather", [x, kept], "kept", axis=1))
            order.append(kept)
        for at, own in enumerate(embeddings):
            parts.append(self._embedding(own, x, f"table{at}", inputs[own.source]))
            order.append(own.features)
        joined = self._add("Concat", parts, "joined", axis=1)
        return self._add("Gather", [joined, np.argsort(np.concatenate(order))], "features", axis=1)

    def _embedding(self, own: Embedding, x: str, name: str, info: onnx.ValueInfoProto) -> str:
        """Return the features of one table; for a category without a row, as the encoder makes them."""
        column = self._add("Gather", [own.source, np.array([own.column])], f"{name}/column", axis=1)
        texts = info.type.tensor_type.elem_type == onnx.TensorProto.STRING
        if not texts and info.type.tensor_type.elem_type != onnx.TensorProto.INT64:
            column = self._add("Cast", [column], f"{name}/int64", to=onnx.TensorProto.INT64)
        code = f"{self._name}/{name}/code"
        encoder = helper.make_node(
            "LabelEncoder", [column], [code], f"LabelEncoder:{code}", domain="ai.onnx.ml", default_int64=-1,
            values_int64s=list(range(len(own.keys))),
            keys_strings=list(own.keys) if texts else None, keys_int64s=None if texts else list(own.keys),
        )  # fmt: skip
        self._rewriter.nodes.append(encoder)
        known = self._add("GreaterOrEqual", [code, np.array(0)], f"{name}/known")
        place = self._add("Max", [code, np.array(0)], f"{name}/place")
        flat = self._add("Reshape", [place, np.array([-1])], f"{name}/flat")
        rows = self._add("Gather", [self._weight(name, own.table.astype(np.float32)), flat], f"{name}/rows", axis=0)
        before = self._add("Gather", [x, own.features], f"{name}/before", axis=1)
        return self._add("Where", [known, rows, before], f"{name}/features")


class _TreeWriter(_Writer):
    """Writes the operators of one ensemble."""

    def __init__(
        self, rewriter: Rewriter, node: onnx.NodeProto, trees: SoftTrees, parameters: Mapping[str, Array]
    ) -> None:
        super().__init__(rewriter, f"{node.name or node.output[0]}/soft")
        self._node, self._trees, self._parameters = node, trees, parameters

    def write(self, x: str, loss: Loss) -> None:
        """Write the operators from features to the outputs of the node."""
        decisions = self._decisions(x)
        trees, given = self._trees, self._parameters
        paths = trees.paths + given.get("paths", np.float32(0))
        offsets = (trees.offsets + given.get("offsets", np.float32(0)))[..., None]
        heat = np.float32(trees.leaf_temperature)
        agreeing = self._add("MatMul", [self._weight("paths", paths / heat), decisions], "agreeing")
        reached = self._add(
            "Tanh", [self._add("Add", [agreeing, self._weight("offsets", offsets / heat)], "sum")], "reached"
        )
        values = trees.values + np.float32(trees.unit) * np.where(
            trees.entries, given.get("values", np.float32(0)), np.float32(0)
        )
        bias = trees.bias + np.float32(trees.unit) * given.get("bias", np.float32(0))
        flat = self._add("Reshape", [reached, np.array([values.shape[0] * values.shape[1], -1])], "flat")
        if trees.leaf_of is None:
            half = self._weight("values", np.ascontiguousarray(values.reshape(-1, values.shape[2]).T))
            by_target = self._add("MatMul", [half, flat], "by_target")
        else:
            whole = self._add("Add", [self._add("Gather", [flat, trees.leaf_of], "own_leaf", axis=0), 1.0], "whole")
            by_target = self._add(
                "Mul", [self._weight("values", values.reshape(-1, 1)[trees.leaf_of]), whole], "by_target"
            )
        scores = self._add("Transpose", [by_target], "scores", perm=[1, 0])
        self._finish(self._add("Add", [scores, self._weight("bias", bias)], "raw"), loss)

    def _decisions(self, x: str) -> str:
        """Return all decisions, [trees, nodes, rows]."""
        trees, given = self._trees, self._parameters
        missing = self._add("IsNaN", [x], "missing")
        parts = [self._add("Where", [missing, self._number(np.inf), x], "high")]
        if (trees.features >= trees.width).any():
            parts.append(self._add("Where", [missing, self._number(-np.inf), x], "low"))
        wide = self._add("Concat", parts, "wide", axis=1) if len(parts) > 1 else parts[0]
        turned = self._add("Transpose", [wide], "by_feature", perm=[1, 0])
        values = self._add("Gather", [turned, self._weight("feature", trees.features.astype(np.int64))], "own", axis=0)
        thresholds = trees.thresholds + trees.temperatures * given.get("shifts", np.float32(0))
        above = self._add("Sub", [self._weight("threshold", thresholds[..., None]), values], "above")
        excess = self._add("Div", [above, self._weight("temperature", trees.temperatures[..., None])], "excess")
        if "mix" in given:
            excess = self._add("Sub", [excess, self._mixed(x, missing)], "with_mix")
        soft = self._add("Tanh", [excess], "soft")
        if not trees.exact.any():
            return soft
        equal = self._add("Equal", [values, self._weight("original", trees.thresholds[..., None])], "equal")
        sign = self._add("Where", [equal, self._number(1.0), self._number(-1.0)], "sign")
        return self._add("Where", [self._weight("exact", trees.exact[..., None]), sign, soft], "decisions")

    def _mixed(self, x: str, missing: str) -> str:
        """Return the weighted features of all decisions, [trees, nodes, rows]."""
        trees = self._trees
        present = self._add("Where", [missing, self._weight("centre", trees.centre), x], "present")
        moved = self._add("Sub", [present, self._weight("centre", trees.centre)], "moved")
        scaled = self._add("Div", [moved, self._weight("spread", trees.spread)], "scaled")
        kept = self._add("Clip", [scaled, self._number(-LARGEST), self._number(LARGEST)], "clipped")
        turned = self._add("Transpose", [kept], "scaled_by_feature", perm=[1, 0])
        return self._add("MatMul", [self._weight("mix", self._parameters["mix"]), turned], "mix_of")

    def _finish(self, raw: str, loss: Loss) -> None:
        """Write the outputs: numbers, or labels and probabilities."""
        labels = self._trees.ensemble.labels
        if labels is None:
            double = self._node.op_type == "TreeEnsemble" and self._trees.ensemble.dtype == np.float64
            kind = onnx.TensorProto.DOUBLE if double else onnx.TensorProto.FLOAT
            self._rewriter.add("Cast", [raw], self._node.output[0], to=kind)
            return
        names = [*self._node.output, ""]
        scores = names[1] or f"{self._name}/probabilities"
        if loss is leaves.SOFTMAX:
            self._rewriter.add("Softmax", [raw], scores, axis=1)
        elif loss is leaves.BRIER:
            kept = self._add("Max", [raw, self._number(LEAST)], "positive")
            total = self._add("ReduceSum", [kept, np.array([1])], "total", keepdims=1)
            self._rewriter.add("Div", [kept, total], scores)
        else:
            if loss is leaves.LOGISTIC:
                second = self._add("Sigmoid", [raw], "second")
                first = self._add("Sigmoid", [self._add("Neg", [raw], "opposite")], "first")
            else:
                second = self._add("Clip", [raw, self._number(LEAST), self._number(1 - LEAST)], "second")
                first = self._add("Sub", [self._number(1.0), second], "first")
            self._rewriter.add("Concat", [first, second], scores, axis=1)
        if names[0]:
            at = self._add("ArgMax", [scores], "class", axis=1, keepdims=0)
            kinds = np.array(labels, object if isinstance(labels[0], str) else np.int64)
            self._rewriter.add("Gather", [self._weight("labels", kinds), at], names[0])
