"""The zoo's networks: published structure at published sizes, and runs at small sizes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest

import chrion
from chrion import HybridSession
from chrion.cli.model import HELP
from chrion.common.files import bundled_folder
from chrion.errors import OptionError
from chrion.scheduler import fixed_plan
from chrion.zoo import BUILDERS, build, names, specification
from chrion.zoo.randwire import wiring
from chrion.zoo.t5 import relative_buckets
from helpers import assert_equal, run_plain
from small_networks import SMALL


def random_request(model: onnx.ModelProto, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return random inputs; words are below 20 and not masked."""
    pick = np.random.default_rng(seed)
    feed: dict[str, np.ndarray[Any, Any]] = {}
    for info in model.graph.input:
        shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
        if info.type.tensor_type.elem_type == onnx.TensorProto.INT64:
            feed[info.name] = pick.integers(0, 2 if info.name == "segments" else 20, shape)
        else:
            drawn = np.ones(shape) if info.name == "mask" else pick.standard_normal(shape)
            feed[info.name] = drawn.astype(np.float32)
    return feed


def counts(model: onnx.ModelProto) -> Counter[str]:
    return Counter(n.op_type for n in model.graph.node)


def test_all_builders_have_small_parameters() -> None:
    """Every builder has small parameters, except those that have tests of their own."""
    decoders = {name for name in BUILDERS if "-decoder" in name}
    assert set(SMALL) == set(BUILDERS) - {"lstm", "gru", "rnn"} - decoders


@pytest.mark.parametrize("name", SMALL)
def test_networks_give_the_results_of_plain_onnxruntime_on_lanes(name: str) -> None:
    """The output has its declared shape, and moderate values that differ.

    Equal seeds give equal weights. Another first item of a batch changes the first result only.
    """
    parameters, shape = SMALL[name]
    model = build(name, parameters)
    assert model.SerializeToString() == build(name, parameters).SerializeToString()
    onnx.checker.check_model(model, full_check=True)
    assert [d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim] == list(shape)
    graph = chrion.load(model)
    feed, other = random_request(model, 1), random_request(model, 2)
    expected = run_plain(model, feed)
    assert expected[0].shape == shape
    assert np.abs(expected[0]).max() < 1e2
    assert np.std(expected[0]) > 1e-3
    lanes = [0] * len(graph.dag)
    for at, i in enumerate(graph.dag.topological_order):
        lanes[i] = 1 + at // 16 % 2
    with HybridSession(graph, plan=fixed_plan(graph, lanes)) as session:
        assert_equal(session.run(None, feed), expected)
    axis = 1 if name == "seq2seq" else 0
    mixed = {i: np.concatenate([np.take(other[i], [0], axis), np.take(feed[i], [1], axis)], axis) for i in feed}
    before, after = expected[0], run_plain(model, mixed)[0]
    assert not np.allclose(before[0], after[0], rtol=1e-3)
    np.testing.assert_allclose(before[1], after[1], rtol=1e-4, atol=1e-6)


def test_other_seeds_give_other_weights() -> None:
    """Another seed gives another network, of each kind of builder."""
    for name in ("squeezenet", "randwire", "dlrm", "llama", "seq2seq"):
        first, second = (build(name, {**SMALL[name][0], "seed": seed}).SerializeToString() for seed in (3, 4))
        assert first != second, name


def test_every_parameter_is_checked() -> None:
    """Zero, except as the seed, and sizes that are not whole numbers are refused."""
    for name in SMALL:
        for parameter, kind in BUILDERS[name].parameters.items():
            if kind == "bool" or parameter == "seed":
                continue
            for value in (0, "1"):
                with pytest.raises(OptionError, match=parameter):
                    specification(name, {parameter: value})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("inception-v3", {"resolution": 74}),
        ("bert", {"heads": 7}),
        ("t5", {"hidden": 12}),
        ("llama", {"heads": 7}),
        ("llama", {"kv_heads": 2}),
        ("llama", {"hidden": 9}),
        ("moe", {"experts": 1}),
        ("randwire", {"neighbours": 16}),
        ("randwire", {"probability": 1.5}),
    ],
)
def test_parameters_that_do_not_fit_each_other_are_refused(name: str, parameters: dict[str, Any]) -> None:
    """Too small images, too many neighbours, indivisible widths and invalid probabilities are refused."""
    with pytest.raises(OptionError):
        specification(name, parameters)


def test_specifications_are_valid_and_parameters_are_options() -> None:
    """Files in models/ name builders and parameters, and the command has an option for each parameter."""
    for path in bundled_folder("models").glob("*.toml"):
        specification(path.stem)
        assert path.stem in names()
    offered = {name for texts in HELP.values() for name in texts}
    assert offered == {name for builder in BUILDERS.values() for name in builder.parameters}


def units(model: onnx.ModelProto) -> int:
    """Return the number of operators as IOS counts them (its Table 2).

    A convolution includes its batch norm, its ReLU, before or after, and the depthwise convolution before it. An
    addition whose only reader is a concatenation or a ReLU is part of that reader; all others count. The last dense
    layer is left out.
    """
    nodes = model.graph.node
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    total = 0
    for node in nodes:
        group = next((a.i for a in node.attribute if a.name == "group"), 1)
        total += node.op_type == "Conv" and group == 1
        total += node.op_type in {"Concat", "MaxPool", "AveragePool", "GlobalAveragePool", "Mean"}
        if node.op_type == "Add":
            read = readers[node.output[0]]
            total += len(read) > 1 or read[0].op_type not in {"Concat", "Relu"}
        if node.op_type == "Relu" and all(r.op_type == "GlobalAveragePool" for r in readers[node.output[0]]):
            total += producer(model, node.input[0]).op_type == "Concat"
    return total


def producer(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(n for n in model.graph.node if name in n.output)


def test_published_operator_counts_of_inception() -> None:
    """Inception has the 119 operators of IOS: 94 convolutions, 14 pools and 11 concatenations."""
    model = build("inception-v3", {"width": 0.05})
    made = counts(model)
    assert (made["Conv"], made["BatchNormalization"], made["Relu"]) == (94, 94, 94)
    assert made["MaxPool"] + made["AveragePool"] + made["GlobalAveragePool"] == 14
    assert made["Concat"] == 11
    assert units(model) == 119


def test_published_operator_counts_of_squeezenet() -> None:
    """SqueezeNet has the 50 operators of IOS; additions count, since each ends a bypass."""
    model = build("squeezenet", {"width": 0.1})
    made = counts(model)
    assert (made["Conv"], made["Relu"], made["MaxPool"], made["GlobalAveragePool"]) == (30, 30, 3, 1)
    assert made["Conv"] + made["MaxPool"] + made["GlobalAveragePool"] + made["Concat"] + made["Add"] == 50


def test_published_size_of_resnet() -> None:
    """ResNet-50 has the 87 operators of TOP's Table II, and the 25.557 million parameters of its published weights.

    The operators are 53 convolutions, 16 additions, 16 ReLUs after them and 2 pools. The means and variances of batch
    norms are no parameters.
    """
    model = build("resnet-50")
    made = counts(model)
    assert (made["Conv"], made["BatchNormalization"], made["Relu"], made["Gemm"]) == (53, 53, 49, 1)
    after = sum(n.op_type == "Relu" and producer(model, n.input[0]).op_type == "Add" for n in model.graph.node)
    assert made["Conv"] + made["Add"] + after + made["MaxPool"] + made["GlobalAveragePool"] == 87
    statistics = {name for n in model.graph.node if n.op_type == "BatchNormalization" for name in n.input[3:]}
    sizes = [math.prod(t.dims) for t in model.graph.initializer if t.name not in statistics]
    assert sum(sizes) == 25_557_032


def test_published_operator_counts_of_nasnet() -> None:
    """The large network has the 374 operators of IOS."""
    assert units(build("nasnet-a-large", {"channels": 8, "stem": 4})) == 374


def test_published_operator_counts_of_randwire() -> None:
    """The regular network has the 120 operators of IOS.

    They are 114 convolutions, four ends of stages, the last ReLU and the pool.
    """
    model = build("randwire-regular", {"channels": 4})
    made = counts(model)
    assert made["Conv"] - 112 == 114  # 112 nodes with a depthwise one each
    assert made["Mean"] == 4
    assert units(model) + 1 == 120  # the ReLU of the tail is an operator of its own in IOS


def test_googlenet_has_nine_blocks_of_four_branches() -> None:
    """GoogLeNet has 57 convolutions with batch norm and ReLU before onnxruntime fuses them."""
    model = build("googlenet", {"width": 0.1})
    plain_graph, fused = chrion.load(model, optimise=False), chrion.load(model)
    found = Counter(plain_graph.dag.op_types)
    assert found == counts(model)
    assert (found["Conv"], found["BatchNormalization"], found["Relu"], found["Concat"]) == (57, 57, 57, 9)
    assert "BatchNormalization" not in fused.dag.op_types
    branches = [plain_graph.dag.predecessors[i] for i, t in enumerate(plain_graph.dag.op_types) if t == "Concat"]
    assert [len(b) for b in branches] == [4] * 9


def test_wiring_is_a_small_world_without_cycles() -> None:
    """The wiring is seeded and connected, with the edges of a ring of k neighbours, all to a higher index."""
    predecessors = wiring(32, 4, 0.75, 1)
    assert predecessors == wiring(32, 4, 0.75, 1) != wiring(32, 4, 0.75, 2)
    assert sum(map(len, predecessors)) == 32 * 4 // 2
    assert all(other < i for i, others in enumerate(predecessors) for other in others)
    assert predecessors[0] == []


def test_relative_positions_are_those_of_t5() -> None:
    """In both directions there are half of 32 buckets each, exact below 8, the last from 128 on.

    In one direction buckets are exact below 16.
    """
    both, past = relative_buckets(200, bidirectional=True), relative_buckets(200, bidirectional=False)
    assert both[150, 150:158].tolist() == [0, *range(17, 24)]
    assert both[150, 143:151].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    assert (both[199, 0], both[0, 199]) == (15, 31)
    assert past[150, 135:151].tolist() == list(range(15, -1, -1))
    assert past[0, 1:].max() == 0
    assert past[199, 0] == 31


def test_a_masked_word_changes_nothing_in_bert() -> None:
    """A word where the mask is 0 does not affect other steps."""
    model = build("bert", SMALL["bert"][0])
    feed = random_request(model, 1)
    feed["mask"][:, 4] = 0
    other = {**feed, "ids": feed["ids"].copy()}
    other["ids"][:, 4] = (other["ids"][:, 4] + 1) % 20
    first, second = run_plain(model, feed)[0], run_plain(model, other)[0]
    keep = [0, 1, 2, 3, 5]
    np.testing.assert_array_equal(first[:, keep], second[:, keep])
    assert not np.array_equal(first[:, 4], second[:, 4])


def test_t5_does_not_look_ahead() -> None:
    """A later target word changes no earlier output; a source word changes all."""
    model = build("t5", SMALL["t5"][0])
    feed = random_request(model, 1)
    first = run_plain(model, feed)[0]
    for name, at, same in (("target", 3, 3), ("ids", 5, 0)):
        changed = {**feed, name: feed[name].copy()}
        changed[name][:, at] = (changed[name][:, at] + 1) % 20
        other = run_plain(model, changed)[0]
        np.testing.assert_allclose(first[:, :same], other[:, :same], rtol=1e-5)
        assert not np.allclose(first[:, same:], other[:, same:])


def test_deepfm_is_a_factorisation_machine_and_a_deep_network() -> None:
    """The outputs equal those of a reference that adds up all pairs of embeddings one by one."""
    model = build("deepfm", {"batch": 2, "fields": 3, "numbers": 2, "vocabulary": 20, "layers": 1, "hidden": 4})
    w = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    tables = [w[name] for name in ("table", *(f"table.{at}" for at in range(2, 7)))]
    feed = random_request(model, 1)
    expected = []
    for ids, numbers in zip(feed["categories"], feed["numbers"], strict=True):
        vectors = [tables[at][i] for at, i in enumerate(ids)]
        first = sum(tables[3 + at][i, 0] for at, i in enumerate(ids)) + numbers @ w["first/W"][:, 0] + w["first/b"][0]
        second = sum(vectors[i] @ vectors[j] for i in range(3) for j in range(i))
        hidden = np.maximum(np.concatenate([*vectors, numbers]) @ w["deep0/W"] + w["deep0/b"], 0)
        expected.append(1 / (1 + np.exp(-(first + second + hidden @ w["last/W"][:, 0] + w["last/b"][0]))))
    np.testing.assert_allclose(run_plain(model, feed)[0][:, 0], expected, rtol=1e-4)
