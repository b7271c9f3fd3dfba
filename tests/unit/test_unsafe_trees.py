"""Tree ensembles that would end the process: refused before a session is opened; what converters write is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from chrion import HybridSession, load
from chrion.errors import UnsafeModelError
from chrion.graph.opened_model import OpenedModel
from chrion.serving.server.repository import BadVersion, scan
from helpers import branches
from model_repository import put
from random_trees import VERSIONS, model_of

REGRESSOR, CLASSIFIER, ENSEMBLE = VERSIONS
#: A tree of one comparison for each operator.
STUMPS: dict[str, dict[str, Any]] = {
    kind: {
        "nodes_treeids": [0, 0, 0],
        "nodes_nodeids": [0, 1, 2],
        "nodes_featureids": [0, 0, 0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
        "nodes_truenodeids": [1, 0, 0],
        "nodes_falsenodeids": [2, 0, 0],
        "nodes_values": [0.5, 0.0, 0.0],
        f"{entry}_treeids": [0, 0],
        f"{entry}_nodeids": [1, 2],
        f"{entry}_ids": ids,
        f"{entry}_weights": [1.0, 1.0],
        **own,
    }
    for kind, entry, ids, own in (
        (REGRESSOR, "target", [0, 0], {"n_targets": 1}),
        (CLASSIFIER, "class", [0, 1], {"classlabels_int64s": [0, 1]}),
    )
} | {
    ENSEMBLE: {
        "n_targets": 1,
        "tree_roots": [0],
        "nodes_featureids": [0],
        "nodes_splits": np.array([0.5], np.float32),
        "nodes_modes": np.zeros(1, np.uint8),
        "nodes_truenodeids": [0],
        "nodes_falsenodeids": [1],
        "nodes_trueleafs": [1],
        "nodes_falseleafs": [1],
        "leaf_targetids": [0, 0],
        "leaf_weights": np.array([1, 2], np.float32),
    }
}
GONE: Any = None


def stump(kind: str, **changes: Any) -> onnx.ModelProto:
    """Return a model of a tree of one comparison, with changed attributes."""
    node = helper.make_node(
        kind, ["x"], ["label", "scores"] if kind == CLASSIFIER else ["scores"], "trees", domain="ai.onnx.ml"
    )
    for name, value in {**STUMPS[kind], **changes}.items():
        if value is not GONE:
            tensor = numpy_helper.from_array(value, name) if isinstance(value, np.ndarray) else value
            node.attribute.append(helper.make_attribute(name, tensor))
    return model_of(node, texts="classlabels_strings" in changes)


def path_of(nodes: int) -> dict[str, Any]:
    """Return the changes to a ``TreeEnsemble`` for one path of inner nodes, each with a leaf."""
    return {
        "nodes_featureids": [0] * nodes,
        "nodes_splits": np.arange(nodes, dtype=np.float32),
        "nodes_modes": np.zeros(nodes, np.uint8),
        "nodes_truenodeids": [*range(nodes)],
        "nodes_falsenodeids": [*range(1, nodes), nodes],
        "nodes_trueleafs": [1] * nodes,
        "nodes_falseleafs": [0] * (nodes - 1) + [1],
        "leaf_targetids": [0] * (nodes + 1),
        "leaf_weights": np.ones(nodes + 1, np.float32),
    }


#: A third class that some rows have a score for, and a loop of two nodes, and three texts for two numbers.
NO_SCORE = {
    "classlabels_int64s": [0, 1, 2],
    **{f"class_{name}": [value] for name, value in {"treeids": 0, "nodeids": 1, "ids": 0, "weights": 1.0}.items()},
}
LOOP = {
    "nodes_treeids": [0] * 7,
    "nodes_nodeids": [*range(7)],
    "nodes_featureids": [0] * 7,
    "nodes_modes": ["BRANCH_LEQ"] * 3 + ["LEAF"] * 4,
    "nodes_values": [0.5] * 7,
    "nodes_truenodeids": [1, 2, 1, 0, 0, 0, 0],
    "nodes_falsenodeids": [3, 4, 5, 0, 0, 0, 0],
}
MEMBER = np.array([6], np.uint8)
REFUSED = [
    (CLASSIFIER, {"classlabels_int64s": GONE, "classlabels_strings": ["a"], "class_ids": [0, 0]}, "a single label"),
    (CLASSIFIER, {"classlabels_strings": ["a", "b", "c"]}, "3 labels that are texts and 2 that are numbers"),
    (CLASSIFIER, NO_SCORE, "no score for any class"),
    (CLASSIFIER, {"class_ids": [0, 2]}, "class_ids has 2, expected at least 0 and below 2"),
    (CLASSIFIER, {"base_values": [0.5] * 3}, "base_values has 3 values, expected 2 or none"),
    (REGRESSOR, LOOP, "its nodes form a cycle"),
    (REGRESSOR, {"nodes_falsenodeids": [0, 0, 0]}, "its nodes form a cycle"),
    (REGRESSOR, {"nodes_truenodeids": [7, 0, 0]}, "nodes_truenodeids names a node that does not exist"),
    (REGRESSOR, {"nodes_truenodeids": [(1 << 32) + 1, 0, 0]}, "nodes_truenodeids has 4294967297"),
    (REGRESSOR, {"nodes_nodeids": [0, 1, 1]}, "two of its nodes have the same number"),
    (REGRESSOR, {"nodes_featureids": [-(1 << 30), 0, 0]}, "nodes_featureids has -1073741824"),
    (REGRESSOR, {"nodes_modes": ["BRANCH_MEMBER_BIGSET", "LEAF", "LEAF"]}, "unknown mode 'BRANCH_MEMBER_BIGSET'"),
    (REGRESSOR, {"nodes_values": [0.5]}, "nodes_values has 1 values, expected 3"),
    (REGRESSOR, {"target_nodeids": [1, 5]}, "target_nodeids names a node that does not exist"),
    (REGRESSOR, {"target_ids": [0, -1]}, "target_ids has -1"),
    (REGRESSOR, {"nodes_treeids": [0.0, 0.0, 0.0]}, "nodes_treeids is no list of integers"),
    (ENSEMBLE, path_of(20000), "a path has more than 4096 nodes"),
    (ENSEMBLE, {"nodes_falseleafs": [0], "nodes_falsenodeids": [0]}, "its nodes form a cycle"),
    (ENSEMBLE, {"nodes_falsenodeids": [9]}, "nodes_falsenodeids has 9, expected at least 0 and below 2"),
    (ENSEMBLE, {"tree_roots": [1 << 40]}, "tree_roots has 1099511627776"),
    (ENSEMBLE, {"tree_roots": [0, 0]}, "a node is in several places"),
    (ENSEMBLE, {"nodes_falseleafs": GONE}, "nodes_falseleafs has 0 values, expected 1"),
    (ENSEMBLE, {"leaf_targetids": [0, 3]}, "leaf_targetids has 3"),
    (ENSEMBLE, {"nodes_modes": np.array([200], np.uint8)}, "nodes_modes has 200"),
    (ENSEMBLE, {"nodes_modes": onnx.TensorProto(data_type=999, dims=[1])}, "KeyError(999)"),
    (ENSEMBLE, {"nodes_modes": MEMBER}, "membership_values has no members"),
    (ENSEMBLE, {"nodes_modes": MEMBER, "membership_values": np.array([np.nan], np.float32)}, "has no members"),
]


@pytest.mark.parametrize(("kind", "changes", "reason"), REFUSED)
def test_trees_that_would_end_the_process_are_refused(kind: str, changes: dict[str, Any], reason: str) -> None:
    """The line names the operator and what is wrong with it, whoever opens the model."""
    model = stump(kind, **changes)
    for opens in (load, HybridSession, lambda content: OpenedModel(content).use(len)):
        with pytest.raises(UnsafeModelError) as refused:
            opens(model.SerializeToString())
        assert str(refused.value).startswith(f"model: {kind} 'trees' cannot be run safely: ")
        assert reason in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *((kind, {}) for kind in VERSIONS),
        (CLASSIFIER, {"classlabels_int64s": [7], "class_ids": [0, 0]}),  # fitted on one class
        (CLASSIFIER, {**NO_SCORE, "base_values": [0.1, 0.2, 0.3]}),
        (CLASSIFIER, {"base_values": [0.5]}),
        (REGRESSOR, {**LOOP, "nodes_truenodeids": [1, 6, 6, 0, 0, 0, 0], "nodes_falsenodeids": [3, 2, 5, 0, 0, 0, 0]}),
        (REGRESSOR, {"nodes_falsenodeids": [1, 0, 0]}),  # one leaf on both sides
        (REGRESSOR, {"nodes_featureids": [0, -1, -1]}),  # leaves read no feature
        (ENSEMBLE, path_of(1000)),
        (ENSEMBLE, {"nodes_falsenodeids": [0], "tree_roots": [0, 0]}),  # trees of a single leaf
        (ENSEMBLE, {"nodes_modes": MEMBER, "membership_values": np.array([1, 2, np.nan], np.float32)}),
    ],
)
def test_unusual_trees_run(kind: str, changes: dict[str, Any]) -> None:
    """What converters write is accepted: shared children, single classes, leaves without features, long paths."""
    with HybridSession(stump(kind, **changes).SerializeToString()) as session:
        assert len(session.run(None, {"x": np.zeros((3, 5), np.float32)})[-1]) == 3


def test_trees_of_nested_graphs_and_functions_are_checked() -> None:
    """An ensemble in a branch or in a function is checked like others; one with an argument of the function is not."""
    model = stump(REGRESSOR, **LOOP)
    trees = model.graph.node[0]
    output = helper.make_tensor_value_info("scores", TensorProto.FLOAT, None)
    body = helper.make_graph([trees], "body", [], [output])
    branch = helper.make_node("If", ["flag"], ["scores"], then_branch=body, else_branch=body)
    opsets = [*model.opset_import]
    local = helper.make_function("local", "F", ["x"], ["scores"], [trees], opsets)
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, [])
    for nodes, functions in (
        ([branch], []),
        ([helper.make_node("F", ["x"], ["scores"], domain="local")], [local]),
    ):
        graph = helper.make_graph(nodes, "g", [*model.graph.input, flag], [output])
        made = helper.make_model(graph, functions=functions, opset_imports=[*opsets, helper.make_opsetid("local", 1)])
        with pytest.raises(UnsafeModelError, match="form a cycle"):
            load(made)
    argument = onnx.AttributeProto(name="nodes_modes", ref_attr_name="modes", type=onnx.AttributeProto.STRINGS)
    trees.attribute.append(argument)
    with pytest.raises(UnsafeModelError, match="nodes_modes occurs twice"):
        load(model)


def test_a_server_lists_the_reason(tmp_path: Path) -> None:
    """A version with such trees is not served, and the reason is its line."""
    put(tmp_path, "m", stump(REGRESSOR, **LOOP))
    found = scan(tmp_path, accelerator=False)["m", "1"]
    assert isinstance(found, BadVersion)
    assert "its nodes form a cycle" in found.reason


def test_a_file_with_such_trees_is_refused_with_its_path(tmp_path: Path) -> None:
    """A session names the file, also if it is opened before the model is analysed."""
    path = tmp_path / "m.onnx"
    onnx.save(stump(REGRESSOR, **LOOP), path)
    with pytest.raises(UnsafeModelError, match=r"m\.onnx: TreeEnsembleRegressor 'trees'"):
        HybridSession(path, tune="background")


def test_trees_in_ort_format_are_refused(tmp_path: Path) -> None:
    """They cannot be checked; the line tells what to give instead. Other models in this format are opened."""
    for kind, model in ((REGRESSOR, stump(REGRESSOR)), ("", branches())):
        path, options = tmp_path / f"m{kind}.ort", ort.SessionOptions()
        options.optimized_model_filepath = str(path)
        options.add_session_config_entry("session.save_model_format", "ORT")
        ort.InferenceSession(model.SerializeToString(), options)
        for source in (path, path.read_bytes()):
            if kind:
                with pytest.raises(UnsafeModelError, match=r"in ORT format .* \(give its \.onnx file\)"):
                    HybridSession(source, tune="never")
            else:
                HybridSession(source, tune="never").close()
