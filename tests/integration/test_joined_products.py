"""Products of one value as one product: equal results, and only where nothing else is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from chrion.graph.joined_products import GATE, join_products
from chrion.graph.observation import Observation, Size
from chrion.graph.pooled_attention import DOMAIN, OPERATOR
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
        self._random = np.random.default_rng(0)

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node, and return its output."""
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def weight(self, *shape: int, kind: Any = np.float32) -> str:
        """Add a weight."""
        name = f"w{len(self.weights)}"
        value = self._random.standard_normal(shape).astype(kind) / 3
        self.weights[name] = numpy_helper.from_array(value.astype(kind), name)
        return name

    def product(self, width: int, source: str = "x", *, bias: bool = False) -> str:
        """Add a product of a value with a weight, and a bias."""
        found = self.op("MatMul", source, self.weight(HIDDEN, width))
        return self.op("Add", self.weight(width), found) if bias else found

    def joined(self, output: str) -> list[onnx.NodeProto]:
        """Return the nodes that an output needs after products are joined."""
        batch = Size(0, 0, 1)
        row = (batch, Size(1, 0, 0), Size(0, 0, INNER))
        shapes = {name: row for node in self.nodes for name in node.output}
        return needed_nodes(join_products(self.nodes, self.weights, Observation(shapes, {}, {}, {})), [output])

    def run(self, nodes: list[onnx.NodeProto], output: str, feed: dict[str, Array]) -> Array:
        """Run nodes in onnxruntime, with the arrays themselves as inputs."""
        types = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feed.items()}
        inputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in types.items()]
        outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)]
        graph = helper.make_graph(nodes, "g", inputs, outputs, [*self.weights.values()])
        opsets = [helper.make_opsetid(domain, version) for domain, version in (("", 24), (DOMAIN, 1), (MICROSOFT, 1))]
        options = ort.SessionOptions()
        options.log_severity_level = 4
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
    return net.op(OPERATOR, *names, domain=DOMAIN, shape=[0, 1, HEADS * WIDTH], **sizes)


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
        counts = numpy_helper.from_array(np.array(widths), "counts")
        net.weights["counts"] = counts
        axis = 2 if form == "split" else -1
        net.nodes.append(helper.make_node("Split", [net.product(sum(widths)), "counts"], ["q", "k", "v"], axis=axis))
        names = ["q", "k", "v"]
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
    up = net.op("MatMul", "x", net.op("Neg", net.weight(HIDDEN, INNER)))
    return net.op("Mul", silu(net, net.product(INNER)), up)


def of_double_precision(net: Net) -> str:
    x = net.op("Cast", "x", to=TensorProto.DOUBLE)
    gate, up = (net.op("MatMul", x, net.weight(HIDDEN, INNER, kind=np.float64)) for _ in range(2))
    return net.op("Mul", silu(net, gate), up)


def of_stacked_weights(net: Net) -> str:
    gate, up = (net.op("MatMul", "x", net.weight(1, HIDDEN, INNER)) for _ in range(2))
    return net.op("Mul", silu(net, gate), up)


def of_a_square(net: Net) -> str:
    active = silu(net, net.product(INNER))
    return net.op("Mul", active, active)


def of_parts_in_another_order(net: Net) -> str:
    sizes = (SHARED * WIDTH, HEADS * WIDTH, SHARED * WIDTH)
    net.weights["counts"] = numpy_helper.from_array(np.array(sizes), "counts")
    net.nodes.append(helper.make_node("Split", [net.product(sum(sizes)), "counts"], ["k", "q", "v"], axis=-1))
    return attention(net, "q", "k", "v")


def of_parts_of_heads(net: Net) -> str:
    heads = net.op("Reshape", net.product(3 * HEADS * WIDTH), "shape")
    net.nodes.append(helper.make_node("Split", [heads], ["q", "k", "v"], axis=1, num_outputs=3))
    return attention(net, "q", "k", "v")


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
        of_parts_in_another_order,
        of_parts_of_heads,
    ],
)
def test_what_stays(build: Any) -> None:
    """Nothing changes if something else is computed."""
    net = Net()
    result = build(net)
    assert net.joined(result) == needed_nodes(net.nodes, [result])
