"""Tree ensembles are read, written and run as tensor operators with the results of onnxruntime's kernels."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

import chrion
from chrion.errors import PlanError
from chrion.graph.rewrite import RewriteError
from chrion.graph.trees import FORMS, PARTS, TreeEnsemble, read_ensemble, tensor_trees, tree_variants, write_ensemble
from chrion.graph.trees.tensor_form import with_tensor_trees
from chrion.hardware import hardware
from chrion.profiler.hardware_profile import estimate_profile
from property_tests import examples
from random_trees import FEATURES, VERSIONS, model_of, random_ensemble, random_rows, run, tree_model

TYPES: dict[Any, str] = {
    np.float32: "tensor(float)",
    np.float64: "tensor(double)",
    np.int64: "tensor(int64)",
}
SEEDS = st.integers(0, 2**32)


def random_model(seed: int, trees: Sequence[int] = (1, 2, 3, 7, 40)) -> tuple[onnx.ModelProto, TreeEnsemble, Any, Any]:
    """Return a model of a random ensemble, the ensemble, rows, and the type of their elements."""
    rng = random.Random(seed)
    kind = rng.choice(list(VERSIONS))
    dtype = rng.choice([np.float32] * 4 + [np.float64] + [np.int64] * (kind == "TreeEnsembleClassifier"))
    targets = rng.choice([2, 3, 4] if kind == "TreeEnsembleClassifier" else [1, 2, 3])
    ensemble = random_ensemble(
        rng,
        kind,
        trees=rng.choice(trees),
        depth=rng.randint(0, 5),
        targets=targets,
        dtype=np.float64 if dtype is np.float64 else np.float32,
    )
    model = tree_model(ensemble, kind, dtype, rng.choice([9, 13, 15, 18, 21]))
    rows = random_rows(rng, rng.choice([1, 2, 9]), dtype)
    if ensemble.members:  # onnxruntime truncates features that it looks up in sets
        rows = np.where(np.isfinite(rows), np.floor(rows), rows)
    return model, ensemble, rows, dtype


def assert_same(found: list[Any], expected: list[Any]) -> None:
    """Check that labels are equal, and scores except for the order of sums."""
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        if theirs.dtype == object or np.issubdtype(theirs.dtype, np.integer):
            assert (mine == theirs).all()
        else:
            np.testing.assert_allclose(mine, theirs, atol=1e-5, rtol=1e-5)


@given(seed=SEEDS)
@examples(500)
def test_an_ensemble_that_is_read_and_written_again_has_the_same_results(seed: int) -> None:
    """All operators, rules, aggregates, transforms and types keep their results bit for bit."""
    model, _, rows, dtype = random_model(seed)
    node = model.graph.node[0]
    again = write_ensemble(read_ensemble(node, np.dtype(np.float64) if dtype is np.float64 else None), node)
    texts = any(a.name == "classlabels_strings" for a in node.attribute)
    onnx.checker.check_node(again, _context(again))
    for mine, theirs in zip(
        run(model_of(again, dtype, texts=texts), {"x": rows}), run(model, {"x": rows}), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


def _context(node: onnx.NodeProto) -> Any:
    context = onnx.checker.C.CheckerContext()
    context.ir_version = 8
    context.opset_imports = {"": 18, "ai.onnx.ml": VERSIONS[node.op_type]}
    return context


@given(seed=SEEDS)
@examples(500)
def test_leaves_are_those_that_onnxruntime_reaches(seed: int) -> None:
    """The sums of the leaves' weights are onnxruntime's, whatever the rules and missing values."""
    rng = random.Random(seed)
    ensemble = replace(
        random_ensemble(rng, "TreeEnsembleRegressor", trees=3, depth=4, targets=1),
        aggregate="SUM",
        transform="NONE",
        base=np.zeros(0, np.float32),
    )
    rows = random_rows(rng, 9)
    expected = run(tree_model(ensemble, "TreeEnsembleRegressor"), {"x": rows})[0]
    found = ensemble.leaf_weights[ensemble.leaves_of(rows)].sum(axis=1)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def has_form(ensemble: TreeEnsemble) -> bool:
    """Return whether rows have scores for the same targets where it matters."""
    trees = range(ensemble.trees)
    scored = [
        any(ensemble.leaf_entries[ensemble.leaf_trees == tree, target].all() for tree in trees)
        for target in range(ensemble.targets)
    ]
    if ensemble.aggregate in {"MIN", "MAX"} and not all(scored):
        return False
    if ensemble.labels is None:
        return all(scored) or not len(ensemble.base)
    return [*ensemble.leaf_entries.any(axis=0)] == scored


@pytest.mark.parametrize("form", FORMS)
@given(seed=SEEDS)
@examples(500)
def test_tensor_forms_are_equal_to_the_kernel(form: str, seed: int) -> None:
    """Labels and scores are onnxruntime's, except for ensembles that the forms refuse."""
    model, ensemble, rows, dtype = random_model(seed)
    if not has_form(ensemble):
        with pytest.raises(RewriteError):
            with_tensor_trees(model, form, {"x": TYPES[dtype]})
        return
    tensors = with_tensor_trees(model, form, {"x": TYPES[dtype]})
    assert not any(node.op_type.startswith("TreeEnsemble") for node in tensors.graph.node)
    assert_same(run(tensors, {"x": rows}), run(model, {"x": rows}))


@pytest.mark.parametrize("form", PARTS)
@given(seed=SEEDS)
@examples(100)
def test_parts_are_equal_to_the_kernel(form: str, seed: int) -> None:
    """Labels and scores are onnxruntime's; few trees, extremes and sums that are rounded to float32 are refused."""
    model, ensemble, rows, dtype = random_model(seed, (20, 40, 130))
    node = model.graph.node[0]
    rounded = dtype is np.float64 and node.op_type != "TreeEnsemble"
    summed = ensemble.aggregate in {"SUM", "AVERAGE"} and ensemble.trees >= 16 * PARTS[form]
    if not has_form(ensemble) or rounded or not summed:
        with pytest.raises(RewriteError):
            with_tensor_trees(model, form, {"x": TYPES[dtype]})
        return
    parts = with_tensor_trees(model, form, {"x": TYPES[dtype]})
    assert sum(own.op_type.startswith("TreeEnsemble") for own in parts.graph.node) == PARTS[form]
    assert_same(run(parts, {"x": rows}), run(model, {"x": rows}))


def one_tree(**attributes: Any) -> onnx.NodeProto:
    """Return a regressor of one comparison, with other attributes as given; None leaves one out."""
    content = {
        "n_targets": 1,
        "nodes_treeids": [0, 0, 0],
        "nodes_nodeids": [0, 1, 2],
        "nodes_featureids": [0, 0, 0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
        "nodes_values": [0.5, 0.0, 0.0],
        "nodes_truenodeids": [1, 0, 0],
        "nodes_falsenodeids": [2, 0, 0],
        "target_treeids": [0, 0],
        "target_nodeids": [1, 2],
        "target_ids": [0, 0],
        "target_weights": [1.0, 2.0],
    }
    given_here = {name: value for name, value in (content | attributes).items() if value is not None}
    return helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], "t", domain="ai.onnx.ml", **given_here)


#: The lists of a regressor.
LISTS = [
    *(
        f"nodes_{name}"
        for name in ("treeids", "nodeids", "featureids", "modes", "values", "truenodeids", "falsenodeids")
    ),
    *(f"target_{name}" for name in ("treeids", "nodeids", "ids", "weights")),
]
#: A tree of a single leaf among the nodes of another one.
APART: dict[str, Any] = {
    "nodes_treeids": [0, 0, 1, 0],
    "nodes_nodeids": [0, 1, 0, 2],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF", "LEAF"],
    "target_treeids": [0, 1, 0],
    "target_nodeids": [1, 0, 2],
    "target_ids": [0, 0, 0],
    "target_weights": [1.0, 2.0, 3.0],
    "nodes_featureids": [0, 0, 0, 0],
    "nodes_values": [0.0, 0.0, 0.0, 0.0],
    "nodes_truenodeids": [1, 0, 0, 0],
    "nodes_falsenodeids": [2, 0, 0, 0],
}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nodes_modes": None}, "nodes_treeids has 3 values, expected 0"),
        (dict.fromkeys(LISTS), "it has no nodes"),
        ({"nodes_modes": ["BRANCH_MEMBER", "LEAF", "LEAF"]}, "unknown mode 'BRANCH_MEMBER'"),
        ({"nodes_modes": ["LEQ", "LEAF", "LEAF"]}, "unknown mode 'LEQ'"),
        ({"nodes_values": [0.5]}, "nodes_values has 1 values, expected 3"),
        ({"nodes_featureids": [0, 0]}, "nodes_featureids has 2 values, expected 3"),
        ({"nodes_featureids": [-1, 0, 0]}, "nodes_featureids has -1, expected at least 0 and below 2147483647"),
        ({"nodes_nodeids": [0, 1, 1]}, "two of its nodes have the same number"),
        ({"nodes_truenodeids": [7, 0, 0]}, "nodes_truenodeids names a node that does not exist"),
        ({"nodes_truenodeids": [0, 0, 0]}, "its nodes form a cycle"),
        ({"nodes_truenodeids": [2, 0, 0]}, "a leaf has several parents or none"),
        (APART, "the nodes of a tree do not follow each other"),
        ({"target_ids": [0, 1]}, "target_ids has 1, expected at least 0 and below 1"),
        ({"target_weights": [1.0]}, "target_treeids has 2 values, expected 1"),
        ({"target_nodeids": [1, 9]}, "target_nodeids names a node that does not exist"),
        ({"target_nodeids": [1, 1]}, "a leaf has several weights for one target"),
        ({"target_treeids": [0], "target_nodeids": [1], "target_ids": [0], "target_weights": [1.0]}, "no weight"),
        ({"n_targets": None}, "expected at least 0 and below 0, the number of targets"),
        ({"base_values": [1.0, 2.0]}, "base_values has 2 values, expected 1 or none"),
        ({"aggregate_function": "MEDIAN"}, "unknown aggregate_function 'MEDIAN'"),
        ({"post_transform": "CUBE"}, "unknown post_transform 'CUBE'"),
        ({"nodes_values": ["a", "b", "c"]}, "is malformed"),
        ({"n_targets": [1, 2]}, "is malformed"),
        ({"n_targets": 1 << 30}, "too many leaves for 1073741824 targets"),
    ],
)
def test_a_malformed_ensemble_is_refused_in_one_line(changes: dict[str, Any], reason: str) -> None:
    """The message names the operator and what is wrong."""
    with pytest.raises(RewriteError) as refusal:
        read_ensemble(one_tree(**changes))
    message = str(refusal.value)
    assert message.startswith("TreeEnsembleRegressor 't' ")
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nodes_trueleafs": [1]}, "nodes_trueleafs has 1 values, expected 2"),
        (
            {"nodes_truenodeids": [1, 5]},
            "nodes_truenodeids has 5, expected at least 0 and below 3, the number of leaves",
        ),
        ({"tree_roots": [4]}, "tree_roots has 4, expected at least 0 and below 2, the number of nodes"),
        ({"tree_roots": None}, "it has no trees"),
        ({"tree_roots": [0, 0]}, "a node is in several places"),
        ({"aggregate_function": 9}, "aggregate_function is 9, expected 0 to 3"),
        ({"nodes_modes": np.array([0, 9], np.uint8)}, "nodes_modes has 9, expected at least 0 and below 7"),
        ({"nodes_modes": np.array([6, 6], np.uint8)}, "membership_values has no members for one of 2 nodes"),
        ({"leaf_weights": np.array([1, 2], np.float32)}, "leaf_targetids has 3 values, expected 2"),
    ],
)
def test_a_malformed_ensemble_of_version_5_is_refused_in_one_line(changes: dict[str, Any], reason: str) -> None:
    """The message names the operator and what is wrong."""
    content: dict[str, Any] = {
        "n_targets": 1,
        "tree_roots": [0],
        "nodes_featureids": [0, 1],
        "nodes_splits": np.array([0.5, 1.5], np.float32),
        "nodes_modes": np.array([0, 0], np.uint8),
        "nodes_truenodeids": [1, 0],
        "nodes_trueleafs": [0, 1],
        "nodes_falsenodeids": [2, 1],
        "nodes_falseleafs": [1, 1],
        "leaf_targetids": [0, 0, 0],
        "leaf_weights": np.array([1, 2, 3], np.float32),
    }

    def node(content: dict[str, Any]) -> onnx.NodeProto:
        tensors = {n: onnx.numpy_helper.from_array(v) if isinstance(v, np.ndarray) else v for n, v in content.items()}
        return helper.make_node("TreeEnsemble", ["x"], ["y"], "t", domain="ai.onnx.ml", **tensors)

    assert read_ensemble(node(content)).depth == 2
    with pytest.raises(RewriteError) as refusal:
        read_ensemble(node(content | changes))
    assert str(refusal.value).startswith("TreeEnsemble 't' is malformed: ")
    assert reason in str(refusal.value)


def test_an_ensemble_that_an_operator_cannot_express_is_not_written() -> None:
    """A ``TreeEnsemble`` has no base values."""
    rng = random.Random(0)
    with_base = replace(
        random_ensemble(rng, "TreeEnsembleRegressor", trees=1, depth=1, targets=1), base=np.ones(1, np.float32)
    )
    with pytest.raises(RewriteError, match="has no base values"):
        tree_model(with_base, "TreeEnsemble")


@given(seed=SEEDS)
@examples(200)
def test_sets_are_chains_of_comparisons_in_operators_without_them(seed: int) -> None:
    """Written for a regressor and read again, membership has the results of ``TreeEnsemble``, and the same nodes."""
    rng = random.Random(seed)
    made = random_ensemble(rng, "TreeEnsemble", trees=3, depth=4, targets=1)
    ensemble = replace(made, aggregate="SUM", transform="NONE")
    rows = random_rows(rng, 9)
    rows = np.where(np.isfinite(rows), np.floor(rows), rows)  # onnxruntime truncates features that it looks up in sets
    expected = run(tree_model(ensemble, "TreeEnsemble"), {"x": rows})[0]
    chained = tree_model(ensemble, "TreeEnsembleRegressor")
    np.testing.assert_allclose(run(chained, {"x": rows})[0], expected, atol=1e-6)
    again = read_ensemble(chained.graph.node[0])
    assert len(again.features) == len(ensemble.features)
    found = again.leaf_weights[again.leaves_of(rows)].sum(axis=1)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def chain_of(members: Sequence[float]) -> onnx.NodeProto:
    """Return a regressor that tests membership by comparisons with each member, as converters write it."""
    count = len(members)
    return one_tree(
        nodes_treeids=[0] * (count + 2),
        nodes_nodeids=[*range(count + 2)],
        nodes_featureids=[0] * (count + 2),
        nodes_modes=["BRANCH_EQ"] * count + ["LEAF", "LEAF"],
        nodes_values=[*members, 0.0, 0.0],
        nodes_truenodeids=[count] * count + [0, 0],
        nodes_falsenodeids=[*range(1, count), count + 1, 0, 0],
        target_nodeids=[count, count + 1],
    )


@pytest.mark.parametrize("form", FORMS)
def test_sets_of_any_integers_have_tensor_forms(form: str) -> None:
    """Members, integers between and beyond them, and numbers that are no integers lead where the kernel leads."""
    model = model_of(chain_of([1000.0, -7.0, 3.0, 40.0]))
    rows = np.zeros((2032, FEATURES), np.float32)
    values = [*np.arange(-8, 1002), *np.arange(-7.5, 1000), 1e9, -1e30, np.inf, -np.inf, np.nan, -0.0]
    rows[: len(values), 0] = values
    tensors = with_tensor_trees(model, form, {"x": "tensor(float)"})
    expected = run(model, {"x": rows})[0]
    assert sorted(rows[expected.ravel() == 1.0, 0]) == [-7, 3, 40, 1000]
    assert_same(run(tensors, {"x": rows}), [expected])


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([1.5, 2.0], "sets of numbers that are no integers"),
        ([2.0, 3e7], "members too far apart"),
        ([2.0, np.inf], "no integers"),
    ],
)
def test_other_sets_have_no_tensor_form(members: Sequence[float], reason: str) -> None:
    """The message names the ensemble."""
    for form in FORMS:
        with pytest.raises(RewriteError, match=f"TreeEnsembleRegressor 't' tests membership in .*{reason}"):
            with_tensor_trees(model_of(chain_of(members)), form, {"x": "tensor(float)"})


@pytest.mark.parametrize("form", FORMS)
def test_forms_refuse_what_other_operators_do_not_have(form: str) -> None:
    """The message names the ensemble; the graph has no such variant."""
    model = model_of(one_tree(post_transform="PROBIT"))
    with pytest.raises(RewriteError, match="TreeEnsembleRegressor 't' has the transform PROBIT"):
        with_tensor_trees(model, form, {"x": "tensor(float)"})
    assert tree_variants(chrion.load(model, {"rows": 2})) == {}


def test_a_chain_of_many_levels_has_no_form_of_gathers() -> None:
    """Each level is several operators, so a model of a few kilobytes could become one of millions."""
    count = 300
    leaves = {"nodes_trueleafs": [1] * count, "nodes_falseleafs": [0] * (count - 1) + [1]}
    chain = helper.make_node(
        "TreeEnsemble", ["x"], ["y"], "chain", domain="ai.onnx.ml", n_targets=1, tree_roots=[0], **leaves,
        nodes_featureids=[0] * count, nodes_splits=onnx.numpy_helper.from_array(np.zeros(count, np.float32)),
        nodes_modes=onnx.numpy_helper.from_array(np.zeros(count, np.uint8)), nodes_truenodeids=[*range(count)],
        nodes_falsenodeids=[*range(1, count), count], leaf_targetids=[0] * (count + 1),
        leaf_weights=onnx.numpy_helper.from_array(np.zeros(count + 1, np.float32)),
    )  # fmt: skip
    with pytest.raises(RewriteError, match="TreeEnsemble 'chain' has 300 levels"):
        with_tensor_trees(model_of(chain), "gathers", {"x": "tensor(float)"})


def test_an_unknown_form_is_refused_with_those_that_exist() -> None:
    """A form that does not exist is named, and the hint has those that do."""
    with pytest.raises(RewriteError, match=r"no form 'sparse' \(one of gathers, gemm, 2 parts, 4 parts, 8 parts\)"):
        with_tensor_trees(model_of(one_tree()), "sparse", {})


def stacked(rows: int) -> onnx.ModelProto:
    """Return a model with an ensemble on the scores of another one and ordinary operators around both."""
    rng = random.Random(4)
    first = random_ensemble(rng, "TreeEnsembleClassifier", trees=30, depth=5, targets=3)
    second = replace(
        random_ensemble(rng, "TreeEnsembleRegressor", trees=5, depth=3, targets=1),
        aggregate="SUM",
        transform="NONE",
    )
    second = replace(second, features=second.features % 3)
    nodes = [
        helper.make_node("Mul", ["x", "two"], ["scaled"]),
        tree_model(first, "TreeEnsembleClassifier").graph.node[0],
        tree_model(second, "TreeEnsembleRegressor").graph.node[0],
        helper.make_node("Sigmoid", ["second"], ["y"]),
    ]
    nodes[1].input[0], nodes[1].name = "scaled", "first"
    nodes[2].input[0], nodes[2].output[0], nodes[2].name = "scores", "second", "last"
    graph = helper.make_graph(
        nodes,
        "stacked",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, FEATURES])],
        [
            helper.make_tensor_value_info("label", TensorProto.STRING if isinstance(first.labels[0], str) else 7, None),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
        ],
        [helper.make_tensor("two", TensorProto.FLOAT, [], [2.0])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.mark.parametrize("form", FORMS)
def test_stacked_ensembles_become_tensors_in_a_graph(form: str) -> None:
    """Shapes after ensembles are known, outputs keep their names, large constants are in files, results are equal."""
    model = stacked(20)
    graph = chrion.load(model)
    assert {graph.values[name].shape for name in ("scores", "second")} == {(20, 3), (20, 1)}
    tensors = tensor_trees(graph, form)
    assert tensors is tensor_trees(graph, form)
    assert [info.name for info in tensors.outputs] == ["label", "y"]
    assert all(
        t.data_location == TensorProto.EXTERNAL or len(t.raw_data) < 1024 for t in tensors.model.graph.initializer
    )
    assert all(info.shape is not None and None not in info.shape for info in tensors.values.values())
    rows = random_rows(random.Random(1), 20)
    whole = onnx.ModelProto()
    whole.CopyFrom(tensors.model)
    onnx.external_data_helper.load_external_data_for_model(whole, str(tensors.weights_folder))
    assert_same(run(whole, {"x": rows}), run(model, {"x": rows}))


def test_operators_that_keep_a_shape_do_not_hide_that_of_trees() -> None:
    """A Scaler is one of them. Each is an operator of its own, and trees have all of their rows."""
    ensemble = random_ensemble(random.Random(2), "TreeEnsembleRegressor", trees=10, depth=4, targets=1)
    model = tree_model(ensemble, "TreeEnsembleRegressor")
    plain = chrion.load(model, {"rows": 1000})
    scaler = helper.make_node("Scaler", ["x"], ["scaled"], domain="ai.onnx.ml", offset=[0.5], scale=[2.0])
    model.graph.node[0].input[0] = "scaled"
    model.graph.node.insert(0, scaler)
    scaled = chrion.load(model, {"rows": 1000})
    assert scaled.dag.op_types == ("Scaler", *plain.dag.op_types)
    assert scaled.values["scaled"].shape == plain.inputs[0].shape


def test_the_planner_keeps_the_kernel_for_a_row_and_takes_tensors_for_many(tmp_path: Path) -> None:
    """On an accelerator, a large batch runs as tensor operators, one row on a core; a plan file keeps the choice."""
    machine = hardware("l4+epyc-16")
    ensemble = random_ensemble(random.Random(2), "TreeEnsembleRegressor", trees=100, depth=6, targets=1)
    model = tree_model(replace(ensemble, aggregate="SUM"), "TreeEnsembleRegressor")
    plans = {}
    for rows in (1, 20_000):
        graph = chrion.load(model, {"rows": rows})
        plans[rows] = plan = chrion.partition(graph, estimate_profile(graph, machine, 2))
        path = tmp_path / f"{rows}.plan.json"
        plan.save(path)
        assert chrion.Plan.load(path).apply(graph).digest == plan.digest
    assert (plans[1].trees, plans[1].on_accelerator) == ("", 0)
    assert plans[20_000].trees in FORMS
    assert plans[20_000].on_accelerator > 0
    assert f"tree ensembles as {plans[20_000].trees}" in plans[20_000].operator_counts
    content = json.loads((tmp_path / "20000.plan.json").read_text())
    (tmp_path / "damaged.plan.json").write_text(json.dumps(content | {"trees": "sparse"}))
    with pytest.raises(PlanError, match="trees must be one of gathers, gemm"):
        chrion.Plan.load(tmp_path / "damaged.plan.json")
    cpu = estimate_profile(chrion.load(model, {"rows": 20_000}), hardware("epyc-16"), 2)
    assert not chrion.partition(chrion.load(model, {"rows": 20_000}), cpu).trees


def test_the_planner_takes_parts_where_they_are_measured_to_be_faster() -> None:
    """Two cores run a half each; costs that are not known do not compete."""
    made = random_ensemble(random.Random(2), "TreeEnsembleRegressor", trees=100, depth=6, targets=1)
    model = tree_model(replace(made, aggregate="AVERAGE"), "TreeEnsembleRegressor")
    graph = chrion.load(model, {"rows": 40})
    machine, variants = hardware("epyc-16"), tree_variants(graph, 2)
    assert list(variants) == ["2 parts"]
    profile = estimate_profile(graph, machine, 2, variants=list(variants.values()))
    for whole_ms, form in ((1.0, "2 parts"), (0.3, "")):
        times = {graph.dag.signatures[0]: whole_ms}
        costs = {
            name: replace(cost, cpu_ms=(times.get(name, 0.5),) * 2, wide_ms=())
            if cost.op_type.startswith("TreeEnsemble")
            else cost
            for name, cost in profile.operators.items()
        }
        plan = chrion.partition(graph, replace(profile, operators=costs))
        assert plan.trees == form
        rows = random_rows(random.Random(1), 40)
        with chrion.HybridSession(graph, plan=plan, strict=True) as session:
            assert_same(session.run(None, {"x": rows}), run(model, {"x": rows}))


@pytest.mark.parametrize("form", FORMS)
def test_a_plan_of_tensors_in_one_segment_runs_them(form: str) -> None:
    """A session runs the tensor form that the plan names, and not the kernel, even if one lane has all operators."""
    model = stacked(20)
    graph = chrion.load(model)
    tensors = tensor_trees(graph, form)
    plan = chrion.partition(tensors, estimate_profile(tensors, hardware("epyc-16"), 1), policy="heft")
    assert len(plan.segments) == 1
    rows = random_rows(random.Random(1), 20)
    with chrion.HybridSession(graph, plan=replace(plan, trees=form), strict=True) as session:
        assert session.plan is not None
        assert session.plan.trees == form
        assert_same(session.run(None, {"x": rows}), run(model, {"x": rows}))
