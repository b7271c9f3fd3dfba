"""Explanations of placements, and the names that they accept."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import onnx
import pytest

from chrion import Graph, Plan, Profile, load
from chrion.errors import OptionError
from chrion.graph.recurrent import unroll
from chrion.profiler.widths import measured_widths
from chrion.scheduler import fixed_plan
from chrion.scheduler.explain import explain_placement, find_operators
from chrion.zoo import build
from helpers import FLOAT, branches, make_model, node, value
from random_profiles import coarse_random_profile


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Return two branches; onnxruntime fuses the last MatMul, ``right_product``, with the Add, ``sum``."""
    return load(branches())


@pytest.fixture(scope="module")
def profile(graph: Graph) -> Profile:
    """Return random costs of that model."""
    return coarse_random_profile(graph, Random(0))


@pytest.fixture(scope="module")
def plan(graph: Graph) -> Plan:
    """Return a plan with the branches on two cores."""
    return fixed_plan(graph, [1 + graph.dag.names[i].startswith("right") for i in range(len(graph.dag))])


def names_of(graph: Graph, name: str) -> list[str]:
    """Return the names of the operators that a name stands for."""
    return [graph.dag.names[i] for i in find_operators(graph, name)]


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("left", "left"),  # a node
        ("l", "left_product"),  # a value
        ("right_product", "right_product/MatMulAddFusion"),  # a node that was fused with its reader
        ("sum", "right_product/MatMulAddFusion"),  # a node that was fused with its input
        ("r", "right_product/MatMulAddFusion"),  # a value inside the fused operator
        ("y", "right_product/MatMulAddFusion"),
    ],
)
def test_names_of_the_models_file_are_accepted(graph: Graph, name: str, operator: str) -> None:
    """Names of nodes and of values are accepted, as in the file and as after optimisation."""
    assert names_of(graph, name) == [operator]


def test_a_name_of_a_node_precedes_that_of_a_value() -> None:
    """If a node has the name of a value that another node makes, the name stands for the node alone."""
    nodes = [node("Neg", ["x"], ["b"], name="n"), node("Cos", ["b"], ["y"], name="b")]
    graph = load(make_model(nodes, [value("x", FLOAT, [2])], [value("y", FLOAT, [2])]))
    assert names_of(graph, "b") == ["b"]
    assert names_of(graph, "y") == ["b"]


def test_a_fused_name_is_found_in_a_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A fused name is found while the file that was opened can be read: it may be renamed, but not changed."""
    path = tmp_path_factory.mktemp("model") / "m.onnx"
    onnx.save(branches(), path)
    graph = load(path)
    assert names_of(graph, "sum") == ["right_product/MatMulAddFusion"]
    path.rename(path.with_suffix(".old"))
    assert names_of(graph, "sum") == ["right_product/MatMulAddFusion"]
    path.with_suffix(".old").write_bytes(b"")
    with pytest.raises(OptionError, match="unknown operator 'sum' in model 'm'"):
        find_operators(graph, "sum")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("left_produkt", r"did you mean 'left_product'"),
        ("zzz", r"for example 'right', "),
        ("", r"for example 'right', "),
        ("x", r"for example 'right', "),  # an input of the model, which no operator makes
    ],
)
def test_an_unknown_name_is_refused_with_similar_ones(graph: Graph, name: str, hint: str) -> None:
    """The error lists the most similar names, or some of the model's."""
    with pytest.raises(OptionError, match=rf"unknown operator '{name}' in model .*\({hint}"):
        find_operators(graph, name)


def test_an_operator_is_explained(graph: Graph, profile: Profile, plan: Plan) -> None:
    """The explanation has the operator's lane, its times, and the plan with its group on each other lane."""
    lines = explain_placement(graph, profile, plan, "sum")
    assert lines[0].startswith("right_product/MatMulAddFusion (Gemm) is on cpu2: in a segment of ")
    assert lines[1].startswith("alone, it takes ")
    moves = [line.split(":")[0] for line in lines[2:]]
    assert moves == ["with its group moved to gpu0", "with its group moved to cpu1"]


def test_widths_are_explained(graph: Graph, profile: Profile) -> None:
    """The explanation names all cores of an operator, its time on them, and the plan with its group on one core."""
    costs = {s: replace(o, wide_ms=(o.cpu_ms[0] / 2,)) for s, o in profile.operators.items()}
    wide = replace(profile, operators=costs, _estimators={})
    n = len(graph.dag)
    lines = explain_placement(graph, wide, fixed_plan(graph, [1] * n, widths=[2] * n), "sum")
    assert lines[0].startswith("right_product/MatMulAddFusion (Gemm) is on cpu1-2: in a segment of ")
    assert " on a core, " in lines[1]
    assert " on 2 cores" in lines[1]
    moves = [line.split(":")[0].removeprefix("with its group moved to ") for line in lines[2:]]
    assert moves == ["gpu0", "cpu1", "cpu2"]


def test_widths_that_the_profile_would_not_plan_are_explained(graph: Graph, profile: Profile) -> None:
    """A plan for fewer cores may have widths that a plan for all measured cores would not try; times are of its own."""
    wide = {
        s: replace(o, cpu_ms=(o.cpu_ms[0],) * 5, wide_ms=tuple(o.cpu_ms[0] / w for w in measured_widths(5)))
        for s, o in profile.operators.items()
    }
    larger = replace(profile, operators=wide, cores=5, _estimators={})
    assert 3 not in larger.costs(graph.dag).widths
    n = len(graph.dag)
    lines = explain_placement(graph, larger, fixed_plan(graph, [1] * n, widths=[3] * n), "sum")
    assert " on 3 cores" in lines[1]


def test_chunks_are_listed_by_lane() -> None:
    """The name of a recurrent operator stands for all of its chunks."""
    whole = load(build("lstm", {"layers": 2, "seq": 20, "batch": 1, "io": 8, "chunk": 20}))
    chunked = unroll(whole, 2)
    layer = whole.dag.names[0]
    assert names_of(chunked, layer) == [f"{layer}/f{at}" for at in range(10)]
    own = [i for i, name in enumerate(chunked.dag.names) if name.startswith(layer)]
    plan = fixed_plan(chunked, [2 if i == own[-1] else 1 for i in range(len(chunked.dag))])
    lines = explain_placement(chunked, coarse_random_profile(chunked, Random(0)), plan, layer)
    assert lines[0].startswith(f"{layer} is planned as 10 operators")
    assert lines[1] == f"cpu1: {', '.join(f'{layer}/f{at}' for at in range(8))} and 1 more"
    assert lines[2] == f"cpu2: {layer}/f9"
