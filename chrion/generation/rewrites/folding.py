"""Values of a decoder that depend on the numbers of tokens only."""

from __future__ import annotations

import onnx

from chrion.generation.rewrites.observation import Observation
from chrion.graph.rewrite import has_bodies

#: Operators that may compute a value from sizes alone.
_SIZE_OPERATORS = frozenset(
    """
    Add Cast Concat ConstantOfShape Constant Div Equal Expand Gather Identity Mul Neg Pow Reshape Shape Size  Slice
    Sqrt Squeeze Sub Transpose Unsqueeze Where
    """.split()  # noqa: SIM905 - a line for each otherwise
)
#: Operators whose results differ from run to run.
_RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)


def fold_sizes(model: onnx.ModelProto, seen: Observation) -> frozenset[str]:
    """Return the values that depend on sizes only and are known for all sizes.

    From sizes, few operators are followed: the minimum of a size and a constant, for example, may be another one for
    more tokens than were observed. From constants, such as the width of a head, every operator computes a constant; of
    these, integers count, as indices.
    """
    folded: set[str] = set()
    weights = {tensor.name for tensor in model.graph.initializer}
    integers = {name for name, value in seen.constants.items() if value.dtype.kind in "iub"}
    sized, constant = {*weights}, {*weights}
    for node in model.graph.node:
        inputs = [name for name in node.input if name]
        counted = node.op_type in {"Shape", "Size"} or all(name in sized for name in inputs)
        if node.op_type in _SIZE_OPERATORS and counted:
            sized.update(node.output)
            folded.update(name for name in node.output if name in seen.constants or name in seen.sizes)
        elif all(name in constant for name in inputs) and node.op_type not in _RANDOM and not has_bodies([node]):
            sized.update(integers.intersection(node.output))
            folded.update(integers.intersection(node.output))
        constant.update(integers.intersection(node.output) & folded)
    return frozenset(folded)
