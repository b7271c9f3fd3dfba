"""Chains of recurrent operators are folded, with the results of plain onnxruntime."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import chrion
from chrion.graph.folding import fold
from chrion.graph.recurrent import chunk_choices, unroll
from property_tests import examples
from rewrite_checks import check_model
from unfolded_networks import GATES, UnfoldedNetwork


def run(model: onnx.ModelProto, feed: dict[str, Any], folder: object = "") -> list[Any]:
    """Return the outputs of plain onnxruntime."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if folder:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return list(ort.InferenceSession(model.SerializeToString(), options).run(None, feed))


def check(graph: chrion.Graph, model: onnx.ModelProto, feed: dict[str, Any]) -> int:
    """Check the folded graph and one of its chunked forms; return the number of recurrent operators."""
    expected = run(model, feed)
    folded = fold(graph)
    for variant in (folded, *(unroll(graph, chunk) for chunk in chunk_choices(graph)[1:2])):
        check_model(variant.model)
        assert [o.name for o in variant.model.graph.output] == [o.name for o in graph.model.graph.output]
        for found, wanted in zip(run(variant.model, feed, variant.weights_folder), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    return sum(kind in GATES for kind in folded.dag.op_types)


@examples(300, suppress_health_check=[HealthCheck.too_slow])
@given(pick=st.randoms(use_true_random=False))
def test_random_networks_fold_to_one_operator_a_layer(pick: Random) -> None:
    """Every layer and direction becomes one operator, however an exporter writes the steps."""
    network = UnfoldedNetwork(pick, awkward=False)
    assert check(chrion.load(network.model), network.model, network.feed()) == network.folds


@examples(300, suppress_health_check=[HealthCheck.too_slow])
@given(pick=st.randoms(use_true_random=False))
def test_awkward_networks_keep_their_results(pick: Random) -> None:
    """Steps that are read elsewhere, other weights in the middle, and feedback change no result."""
    network = UnfoldedNetwork(pick, awkward=True)
    cells = check(chrion.load(network.model), network.model, network.feed())
    assert network.folds is None or cells == network.folds
