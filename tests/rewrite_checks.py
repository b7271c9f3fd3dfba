"""The contract of rewrites: the rules that a model keeps before and after each of them."""

from __future__ import annotations

from collections import Counter

import onnx

from chrion.graph.assemble import node_reads


def check_model(model: onnx.ModelProto) -> None:
    """Check that the graph of a model is well-formed.

    - Each value is an input, a weight, or a result of one node, and nothing else has its name.
    - A node reads values that come before it. So the nodes are in topological order.
    - Each output of the model is one of these values.
    - No two nodes have the same name.
    """
    graph = model.graph
    values = Counter([*(value.name for value in graph.input), *(tensor.name for tensor in graph.initializer)])
    for node, reads in zip(graph.node, node_reads(model), strict=True):
        missing = {*reads} - values.keys()
        assert not missing, f"{node.op_type} {node.name!r} reads {sorted(missing)}, which nothing before it computes"
        values.update(name for name in node.output if name)
    repeated = [name for name, count in values.items() if count > 1]
    assert not repeated, f"{repeated} are defined several times"
    missing = {value.name for value in graph.output} - values.keys()
    assert not missing, f"nothing computes the outputs {sorted(missing)}"
    names = Counter(node.name for node in graph.node if node.name)
    assert len(names) == sum(names.values()), f"nodes share a name: {names.most_common(3)}"
