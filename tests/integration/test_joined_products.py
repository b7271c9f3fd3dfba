"""Products of one value as one product: equal results, and only where nothing else is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from chrion.generation.rewrites.joined_products import GATE, LARGEST, join_products
from chrion.generation.rewrites.observation import Observation, Size
from chrion.generation.rewrites.pooled_attention import DOMAIN, OPERATOR
from chrion.graph.rewrite import MICROSOFT, needed_nodes
from chrion.native import operators_available, register_operators

Array = np.ndarray[Any, Any]
pytestmark = pytest.mark.skipif(not operators_available(), reason="native operators are not compiled")
HEADS, SHARED, WIDTH, HIDDEN, INNER = 4, 2, 8, 24, 20


class Net:
    """Nodes after ``x`` [batch, 1, hidden], and their weights."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, onnx.TensorProto] = {}
        #: The shapes of the values behind the batch.
        self.shapes: dict[str, tuple[int, ...]] = {"x": (1, HIDDEN)}
        self._random = np.random.default_rng(0)

    def op(self, kind: str, *inputs: str, shape: tuple[int, ...] | None = None, **attributes: Any) -> str:
        """Add a node, and return its output, by default of the shape of its first input."""
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        self.shapes[name] = shape or next(self.shapes[one] for one in inputs if one in self.shapes)
        return name

    def split(self, source: str, sizes: tuple[int, ...], names: list[str], axis: int = -1) -> list[str]:
        """Split the last axis of a value."""
        self.weights["counts"] = numpy_helper.from_array(np.array(sizes), "counts")
        self.nodes.append(helper.make_node("Split", [source, "counts"], names, axis=axis))
        for name, size in zip(names, sizes, strict=True):
            self.shapes[name] = (*self.shapes[source][:-1], size)
        return names

    def weight(self, *shape: int, kind: Any = np.float32) -> str:
        """Add a weight."""
        name = f"w{len(self.weights)}"
        value = self._random.standard_normal(shape).astype(kind) / 3
        self.weights[name] = numpy_helper.from_array(value.astype(kind), name)
        return name

    def product(self, width: int, source: str = "x", *, bias: bool = False) -> str:
        """Add a product of a value with a weight, and a bias."""
        weights = self.weight(self.shapes[source][-1], width)
        found = self.op("MatMul", source, weights, shape=(*self.shapes[source][:-1], width))
        return self.op("Add", self.weight(width), found) if bias else found

    def joined(self, output: str) -> list[onnx.NodeProto]:
        """Return the nodes that an output needs after products are joined."""
        batch = Size(0, 0, 1)
        shapes = {name: (batch, *(Size(0, 0, size) for size in shape)) for name, shape in self.shapes.items()}
        return needed_nodes(join_products(self.nodes, self.weights, Observation(shapes, {}, {}, {})), [output])

    def run(
        self, nodes: list[onnx.NodeProto], output: str, feed: dict[str, Array], optimised: Path | None = None
    ) -> Array:
        """Run nodes in onnxruntime on the arrays themselves; the optimised model is written to a file."""
        types = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feed.items()}
        inputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in types.items()]
        outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)]
        graph = helper.make_graph(nodes, "g", inputs, outputs, [*self.weights.values()])
        opsets = [helper.make_opsetid(domain, version) for domain, version in (("", 24), (DOMAIN, 1), (MICROSOFT, 1))]
        options = ort.SessionOptions()
        options.log_severity_level = 4
        if optimised is not None:
            options.optimized_model_filepath = str(optimised)
        register_operators(options)
        content = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
        session = ort.InferenceSession(content, options, ["CPUExecutionProvider"])
        binding = session.io_binding()
        for name, array in feed.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        binding.bind_output(output, "cpu")
        session.run_with_iobinding(binding)
        return np.asarray(binding.copy_outputs_to_cpu()[0])


def kinds(nodes: list[onnx.NodeProto]) -> dict[str, int]:
    names = [node.op_type for node in nodes]
    return {name: names.count(name) for name in names}


def silu(net: Net, gate: str, form: str = "Sigmoid") -> str:
    """Return SiLU as exporters write it."""
    if form == "Sigmoid":
        return net.op("Mul", gate, net.op("Sigmoid", gate))
    if form == "Sigmoid first":
        return net.op("Mul", net.op("Sigmoid", gate), gate)
    if form == "Swish":
        return net.op("Swish", gate)
    return net.op("QuickGelu", gate, domain=MICROSOFT, alpha=1.0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("order", ["silu first", "silu last"])
@pytest.mark.parametrize("form", ["Sigmoid", "Sigmoid first", "Swish", "QuickGelu"])
def test_a_gate(form: str, order: str, *, bias: bool) -> None:
    """Both factors are one product, and what follows is one operator, with the same results."""
    net = Net()
    up = net.product(INNER, bias=bias)
    active = silu(net, net.product(INNER, bias=bias), form)
    result = net.op("Mul", *((active, up) if order == "silu first" else (up, active)))
    nodes = net.joined(result)
    assert kinds(nodes) == {"Concat": 1 + bias, "MatMul": 1, GATE: 1} | ({"Add": 1} if bias else {})
    x = np.random.default_rng(1).standard_normal((5, 1, HIDDEN)).astype(np.float32)
    parameters = [numpy_helper.to_array(tensor).astype(np.float64) for tensor in net.weights.values()]
    each = len(parameters) // 2
    up_value, gate_value = (x @ own[0] + sum(own[1:]) for own in (parameters[:each], parameters[each:]))
    expected = gate_value / (1 + np.exp(-gate_value)) * up_value
    np.testing.assert_allclose(net.run(nodes, result, {"x": x}), expected, atol=1e-5)


def attention(net: Net, *inputs: str) -> str:
    """Add attention as one operator."""
    sizes = {"heads": HEADS, "shared": SHARED, "width": WIDTH, "scale": 0.4, "cap": 0.0}
    sizes |= {"rotated": 0, "interleaved": 0, "columns": 0}
    names = [*inputs, "key-pool", "value-pool", "past", "start"]
    result = net.op(OPERATOR, *names, domain=DOMAIN, **sizes)
    net.nodes[-1].attribute.append(helper.make_attribute("shape", [0, 1, HEADS * WIDTH]))
    return result


def attention_feed() -> dict[str, Array]:
    random = np.random.default_rng(2)
    pools = {
        f"{kind}-pool": random.standard_normal((9 * SHARED, WIDTH)).astype(np.float32) for kind in ("key", "value")
    }
    counts = {"past": np.array([[3], [4], [1]]), "start": np.array([[0], [0], [6]])}
    return {"x": random.standard_normal((3, 1, HIDDEN)).astype(np.float32), **pools, **counts}


@pytest.mark.parametrize("form", ["products", "biases", "split", "split of the last axis"])
def test_attention(form: str) -> None:
    """Queries, keys and values are read side by side; the pools get the same rows."""
    net, widths = Net(), (HEADS * WIDTH, SHARED * WIDTH, SHARED * WIDTH)
    if form.startswith("split"):
        axis = 2 if form == "split" else -1
        names = net.split(net.product(sum(widths)), widths, ["q", "k", "v"], axis)
    else:
        names = [net.product(width, bias=form == "biases") for width in widths]
    result = attention(net, *names)
    nodes = net.joined(result)
    assert kinds(nodes)["MatMul"] == 1
    assert "Split" not in kinds(nodes)
    before, after = attention_feed(), attention_feed()
    expected = net.run(net.nodes, result, before)
    np.testing.assert_allclose(net.run(nodes, result, after), expected, atol=1e-5)
    for name in ("key-pool", "value-pool"):
        assert not np.array_equal(before[name], attention_feed()[name])
        np.testing.assert_allclose(after[name], before[name], atol=1e-5)


def test_shared_weights_are_joined_once() -> None:
    """Layers that share weights share the joined ones, too."""
    net = Net()
    gate, up = net.weight(HIDDEN, HIDDEN), net.weight(HIDDEN, HIDDEN)
    source = "x"
    for _ in range(2):
        source = net.op("Mul", silu(net, net.op("MatMul", source, gate)), net.op("MatMul", source, up))
    nodes = net.joined(source)
    assert kinds(nodes) == {"Concat": 1, "MatMul": 2, GATE: 2}


def test_the_largest_joined_weights() -> None:
    """Those of onnxruntime's limit are joined."""
    net = Net()
    result = of_large_weights(net, LARGEST // (8 * HIDDEN))
    assert kinds(net.joined(result))[GATE] == 1


def test_similar_names_are_not_confused() -> None:
    """Weights "a+b" and "c" are others than "a" and "b+c"."""
    net, source = Net(), "x"
    for pair in (("a+b", "c"), ("a", "b+c")):
        for name in pair:
            net.weights[name] = numpy_helper.from_array(np.ones((HIDDEN, HIDDEN), np.float32), name)
        gate, up = (net.op("MatMul", source, name) for name in pair)
        source = net.op("Mul", silu(net, gate), up)
    assert [[*node.input] for node in net.joined(source) if node.op_type == "Concat"] == [["a+b", "c"], ["a", "b+c"]]


def test_onnxruntime_computes_joined_weights_when_it_opens_the_model(tmp_path: Path) -> None:
    """Its optimised model joins nothing."""
    net = Net()
    up = net.product(INNER)
    result = net.op("Mul", silu(net, net.product(INNER)), up)
    net.run(net.joined(result), result, {"x": np.zeros((1, 1, HIDDEN), np.float32)}, tmp_path / "optimised.onnx")
    assert "Concat" not in kinds([*onnx.load(tmp_path / "optimised.onnx").graph.node])


def read_twice(net: Net) -> str:
    gate, up = net.product(INNER), net.product(INNER)
    return net.op("Add", net.op("Mul", silu(net, gate), up), gate)


def of_other_values(net: Net) -> str:
    return net.op("Mul", silu(net, net.product(INNER)), net.product(INNER, net.op("Neg", "x")))


def of_one_bias(net: Net) -> str:
    return net.op("Mul", silu(net, net.product(INNER, bias=True)), net.product(INNER))


def of_another_slope(net: Net) -> str:
    return net.op("Mul", net.op("QuickGelu", net.product(INNER), domain=MICROSOFT), net.product(INNER))


def of_another_gate(net: Net) -> str:
    share = net.op("Sigmoid", net.product(INNER))
    return net.op("Mul", net.op("Mul", net.product(INNER), share), net.product(INNER))


def of_computed_weights(net: Net) -> str:
    weights = net.op("Neg", net.weight(HIDDEN, INNER), shape=(HIDDEN, INNER))
    up = net.op("MatMul", "x", weights, shape=(1, INNER))
    return net.op("Mul", silu(net, net.product(INNER)), up)


def of_double_precision(net: Net) -> str:
    x = net.op("Cast", "x", to=TensorProto.DOUBLE)
    weights = [net.weight(HIDDEN, INNER, kind=np.float64) for _ in range(2)]
    gate, up = (net.op("MatMul", x, name, shape=(1, INNER)) for name in weights)
    return net.op("Mul", silu(net, gate), up)


def of_stacked_weights(net: Net) -> str:
    gate, up = (net.op("MatMul", "x", net.weight(1, HIDDEN, INNER), shape=(1, INNER)) for _ in range(2))
    return net.op("Mul", silu(net, gate), up)


def of_a_square(net: Net) -> str:
    active = silu(net, net.product(INNER))
    return net.op("Mul", active, active)


def of_a_broadcast(net: Net) -> str:
    return net.op("Mul", silu(net, net.product(INNER)), net.product(1))


def of_several_rows(net: Net) -> str:
    """Each token has three rows, so that the first dimension is not that of the operator's rows."""
    rows = net.op("Reshape", "x", net.weight(3), shape=(3, HIDDEN // 3))
    return net.op("Mul", silu(net, net.product(INNER, rows)), net.product(INNER, rows))


def of_large_weights(net: Net, columns: int = LARGEST // (8 * HIDDEN) + 1) -> str:
    """If they are above the limit, onnxruntime would join them in every iteration."""
    names = [net.product(INNER) for _ in range(2)]
    for name in net.weights:
        net.weights[name] = onnx.TensorProto(name=name, dims=[HIDDEN, columns], data_type=TensorProto.FLOAT)
    for name in names:
        net.shapes[name] = (1, columns)
    return net.op("Mul", silu(net, names[0]), names[1])


def of_parts_in_another_order(net: Net) -> str:
    sizes = (SHARED * WIDTH, HEADS * WIDTH, SHARED * WIDTH)
    net.split(net.product(sum(sizes)), sizes, ["k", "q", "v"])
    return attention(net, "q", "k", "v")


def of_parts_of_each_head(net: Net) -> str:
    """GPT-NeoX: the queries, keys and values of a head are side by side, and behind them those of the next head."""
    heads = net.op("Reshape", net.product(3 * SHARED * WIDTH), net.weight(3), shape=(SHARED, 3 * WIDTH))
    return attention_of_equal_heads(net, *net.split(heads, (WIDTH,) * 3, ["q", "k", "v"]))


def of_heads(net: Net) -> str:
    """Each head is multiplied by the same weights."""
    heads = net.op("Reshape", "x", net.weight(3), shape=(SHARED, HIDDEN // SHARED))
    return attention_of_equal_heads(net, *(net.product(WIDTH, heads) for _ in range(3)))


def attention_of_equal_heads(net: Net, *inputs: str) -> str:
    """Add attention whose keys are not shared."""
    result = attention(net, *inputs)
    (heads,) = (attribute for attribute in net.nodes[-1].attribute if attribute.name == "heads")
    heads.i = SHARED
    return result


@pytest.mark.parametrize(
    "build",
    [
        read_twice,
        of_other_values,
        of_one_bias,
        of_another_slope,
        of_another_gate,
        of_computed_weights,
        of_double_precision,
        of_stacked_weights,
        of_a_square,
        of_a_broadcast,
        of_several_rows,
        of_large_weights,
        of_parts_in_another_order,
        of_parts_of_each_head,
        of_heads,
    ],
)
def test_what_stays(build: Any) -> None:
    """Nothing changes if something else is computed."""
    net = Net()
    result = build(net)
    assert net.joined(result) == needed_nodes(net.nodes, [result])
