"""Pipelines whose trees or encoders are damaged: planning and fine-tuning refuse them in one line, or use them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import chrion
from chrion.errors import ChrionError
from chrion.hardware import hardware
from chrion.profiler.hardware_profile import estimate_profile
from damaged_trees import damaged, damaged_trees
from property_tests import examples
from random_trees import FEATURES, random_ensemble, tree_model

SEEDS = st.integers(0, 2**32)


def in_one_line(error: ChrionError) -> None:
    """Check a refusal."""
    assert str(error)
    assert "\n" not in str(error)


@given(seed=SEEDS)
@examples(150)
def test_damaged_trees_are_planned_or_refused_in_one_line(seed: int) -> None:
    """A plan for an accelerator needs the trees as tensors, and the estimate their size."""
    try:
        graph = chrion.load(damaged_trees(seed), {"rows": 1000})
        chrion.partition(graph, estimate_profile(graph, hardware("l4+epyc-16"), 2))
    except ChrionError as error:
        in_one_line(error)


@given(seed=SEEDS)
@examples(100)
def test_damaged_trees_are_tuned_or_refused_in_one_line(seed: int) -> None:
    """Fine-tuning of a damaged ensemble reads no value beyond the features, and ends."""
    pytest.importorskip("scipy", reason="no SciPy in this environment")
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
