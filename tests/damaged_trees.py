"""Models with damaged tree ensembles."""

from __future__ import annotations

import random
from typing import Any

import onnx
from onnx import helper

from model_repository import columns
from random_trees import random_ensemble, tree_model

KINDS = ("TreeEnsembleRegressor", "TreeEnsembleClassifier", "TreeEnsemble")
_NUMBERS = [-(1 << 63), -1, 0, 1, 5, 1 << 20, 1 << 31, (1 << 62) + 1]
_FLOATS = [float("nan"), float("inf"), -float("inf"), 3e38, 1e-45, 0.0]
_CHANGES = {"ints": _NUMBERS, "floats": _FLOATS, "strings": [b"", b"\xff", b"BRANCH_GT", b"LEAF"]}


def damaged_trees(seed: int) -> onnx.ModelProto:
    """Return a model of random trees, or a pipeline of columns, with some attributes changed."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    targets = 2 + (rng.random() < 0.5) if kind == "TreeEnsembleClassifier" else rng.choice([1, 2, 3])
    made = random_ensemble(rng, kind, trees=3, depth=3, targets=targets)
    return damaged(columns() if rng.random() < 0.3 else tree_model(made, kind), rng)


def damaged(model: onnx.ModelProto, rng: random.Random) -> onnx.ModelProto:
    """Return a model in which some attributes of ``ai.onnx.ml`` have other values, lengths or types, or are gone."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    nodes = [node for node in changed.graph.node if node.domain == "ai.onnx.ml"]
    for _ in range(rng.choice([1, 1, 2, 4])):
        node = rng.choice([node for node in nodes if node.attribute])
        own = rng.randrange(len(node.attribute))
        attribute = node.attribute[own]
        kind = rng.choice(["value", "value", "value", "shorter", "longer", "type", "gone"])
        if kind == "gone":
            del node.attribute[own]
        elif kind == "type":
            other: Any = rng.choice([[1.5], ["a"], 3, "text", [*range(4)]])
            attribute.CopyFrom(helper.make_attribute(attribute.name, other))
        else:
            _damage(attribute, kind, rng)
    return changed


def _damage(attribute: onnx.AttributeProto, kind: str, rng: random.Random) -> None:
    name = next((name for name in _CHANGES if getattr(attribute, name)), "")
    if not name:
        if attribute.type == onnx.AttributeProto.INT:
            attribute.i = rng.choice(_NUMBERS)
        return
    values = list(getattr(attribute, name))
    if kind == "value":  # that of another node may close a cycle
        values[rng.randrange(len(values))] = rng.choice([*_CHANGES[name], rng.choice(values)])
    else:
        values = values[: len(values) // 2] if kind == "shorter" else values + values[-1:]
    del getattr(attribute, name)[:]
    getattr(attribute, name).extend(values)
