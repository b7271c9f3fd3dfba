"""Ensembles with the trees of others appended, and parts of ensembles."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.graph.trees import TreeEnsemble, joined
from chrion.graph.trees.joined import part_of
from property_tests import examples
from random_trees import random_ensemble, random_rows, run, tree_model


@pytest.mark.parametrize("kind", ["TreeEnsembleRegressor", "TreeEnsemble"])
@given(seed=st.integers(0, 2**32 - 1), counts=st.lists(st.integers(1, 5), min_size=1, max_size=4))
@examples(20)
def test_scores_are_sums(kind: str, seed: int, counts: list[int]) -> None:
    """The joined ensemble has the sum of the scores of its parts, with single leaves and missing values among them."""
    rng = random.Random(seed)

    def plain(trees: int) -> TreeEnsemble:
        found = random_ensemble(rng, "TreeEnsembleRegressor", trees=trees, depth=rng.choice([0, 3]), targets=1)
        return replace(found, aggregate="SUM", transform="NONE", base=np.zeros(0, np.float32))

    parts = [plain(count) for count in counts]
    x = random_rows(rng, 30)
    whole = joined(parts[0], parts[1:])
    assert whole.trees == sum(counts)
    expected = sum(run(tree_model(part, "TreeEnsembleRegressor"), {"x": x})[0] for part in parts)
    np.testing.assert_allclose(run(tree_model(whole, kind), {"x": x})[0], expected, atol=1e-5)


@given(seed=st.integers(0, 2**32 - 1), at=st.integers(0, 9))
@examples(30)
def test_parts_have_the_leaves_of_their_trees(seed: int, at: int) -> None:
    """Weights that rows reach are those of the whole ensemble, also in sets, with an empty part on one side."""
    rng = random.Random(seed)
    whole = random_ensemble(rng, "TreeEnsemble", trees=9, depth=rng.choice([0, 1, 4]), targets=2)
    x = random_rows(rng, 30)
    expected = whole.leaf_weights[whole.leaves_of(x)]
    for part, trees in ((part_of(whole, slice(0, at)), slice(0, at)), (part_of(whole, slice(at, 9)), slice(at, 9))):
        assert part.trees == len(range(9)[trees])
        np.testing.assert_array_equal(part.leaf_weights[part.leaves_of(x)], expected[:, trees])
