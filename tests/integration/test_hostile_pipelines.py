"""Pipelines whose trees or encoders are damaged: planning and fine-tuning refuse them in one line, or use them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

import chrion
from chrion.errors import ChrionError
from chrion.hardware import hardware
from chrion.profiler.hardware_profile import estimate_profile
from model_repository import columns
from property_tests import examples
from random_trees import FEATURES, random_ensemble, tree_model

SEEDS = st.integers(0, 2**32)
NUMBERS = [-(1 << 63), -1, 0, 1, 5, 1 << 20, 1 << 31, (1 << 62) + 1]
FLOATS = [float("nan"), float("inf"), -float("inf"), 3e38, 1e-45, 0.0]


def damaged(model: onnx.ModelProto, rng: random.Random) -> onnx.ModelProto:
    """Return a model in which some attributes of ``ai.onnx.ml`` have other values, lengths or types, or are gone."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    nodes = [node for node in changed.graph.node if node.domain == "ai.onnx.ml"]
    for _ in range(rng.choice([1, 1, 2, 4])):
        node = rng.choice(nodes)
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
    name, values = next(
        ((name, list(getattr(attribute, name))) for name in ("ints", "floats", "strings") if getattr(attribute, name)),
        ("", []),
    )
    if not name:
        if attribute.type == onnx.AttributeProto.INT:
            attribute.i = rng.choice(NUMBERS)
        return
    choices: dict[str, list[Any]] = {
        "ints": NUMBERS,
        "floats": FLOATS,
        "strings": [b"", b"\xff", b"BRANCH_GT", b"LEAF"],
    }
    if kind == "value":
        values[rng.randrange(len(values))] = rng.choice(choices[name])
    else:
        values = values[: len(values) // 2] if kind == "shorter" else values + values[-1:]
    del getattr(attribute, name)[:]
    getattr(attribute, name).extend(values)


def in_one_line(error: ChrionError) -> None:
    """Check a refusal."""
    assert str(error)
    assert "\n" not in str(error)


@given(seed=SEEDS)
@examples(150)
def test_damaged_trees_are_planned_or_refused_in_one_line(seed: int) -> None:
    """A plan for an accelerator needs the trees as tensors, and the estimate their size."""
    rng = random.Random(seed)
    kind = rng.choice(["TreeEnsembleRegressor", "TreeEnsembleClassifier", "TreeEnsemble"])
    made = random_ensemble(
        rng, kind, trees=3, depth=3, targets=rng.choice([1, 2, 3]) if kind != "TreeEnsembleClassifier" else 2
    )
    model = columns() if rng.random() < 0.3 else tree_model(made, kind)
    try:
        graph = chrion.load(damaged(model, rng), {"rows": 1000})
        chrion.partition(graph, estimate_profile(graph, hardware("l4+epyc-16"), 2))
    except ChrionError as error:
        in_one_line(error)


@given(seed=SEEDS)
@examples(100)
def test_damaged_trees_are_tuned_or_refused_in_one_line(seed: int) -> None:
    """Fine-tuning of a damaged ensemble reads no value beyond the features, and ends."""
    pa = pytest.importorskip("pyarrow", reason="no pyarrow in this environment")
    rng = random.Random(seed)
    kind = rng.choice(["TreeEnsembleRegressor", "TreeEnsembleClassifier"])
    model = tree_model(random_ensemble(rng, kind, trees=3, depth=3, targets=2 if "Class" in kind else 1), kind)
    x = np.random.default_rng(seed).standard_normal((600, FEATURES)).astype(np.float32)
    labels = next(
        (a.strings or a.ints for a in model.graph.node[0].attribute if a.name.startswith("classlabels")), [0, 1]
    )
    names = [label.decode() if isinstance(label, bytes) else label for label in labels]
    y = [names[at % len(names)] for at in range(600)]
    table = pa.table({**{f"f{at}": x[:, at] for at in range(FEATURES)}, "y": y})
    try:
        chrion.finetune(damaged(model, rng), table)
    except ChrionError as error:
        in_one_line(error)
