"""Operator graphs of published networks, as drawn in their papers, without shapes and weights."""

from __future__ import annotations

from chrion.graph import Dag


class _Drawing:
    """A graph under construction: the number of operators, and the edges."""

    def __init__(self) -> None:
        self.count = 0
        self.edges: list[tuple[int, int]] = []

    def operator(self, *sources: int | None) -> int:
        """Add an operator that reads the outputs of others and return it; None is the network's input."""
        self.edges += [(source, self.count) for source in sources if source is not None]
        self.count += 1
        return self.count - 1

    def convolution(self, source: int | None) -> int:
        """Add a convolution, a batch normalisation and a ReLU, each an operator; return the last."""
        return self.operator(self.operator(self.operator(source)))

    def dag(self) -> Dag:
        return Dag.from_edges(self.count, self.edges)


def googlenet() -> Dag:
    """Return GoogLeNet (Szegedy et al., 2015): nine inception modules, with pools before the third and the eighth."""
    net = _Drawing()
    at = net.operator(net.convolution(None))
    at = net.operator(net.convolution(net.convolution(at)))
    for module in range(9):
        if module in {2, 7}:
            at = net.operator(at)
        reduced = net.convolution(net.convolution(at)), net.convolution(net.convolution(at))
        at = net.operator(net.convolution(at), *reduced, net.convolution(net.operator(at)))
    for _ in range(3):  # average pool, flatten, fully connected
        at = net.operator(at)
    return net.dag()


def inception_e() -> Dag:
    """Return the widest module of Inception-v3: eleven operators, if a convolution and its activation count as one."""
    net = _Drawing()
    one = net.operator(None)
    three = net.operator(None)
    stacked = net.operator(net.operator(None))
    pooled = net.operator(net.operator(None))
    split = [net.operator(three), net.operator(three), net.operator(stacked), net.operator(stacked)]
    net.operator(one, *split, pooled)
    return net.dag()


def fire() -> Dag:
    """Return a fire module of SqueezeNet with complex bypass: squeeze, two expansions, concatenation, bypass, sum."""
    net = _Drawing()
    squeeze = net.operator(None)
    joined = net.operator(net.operator(squeeze), net.operator(squeeze))
    net.operator(joined, net.operator(None))
    return net.dag()


def nasnet_first_cell() -> Dag:
    """Return NasNet-A's cell after a reduction: adjusted inputs, five pairs of separable convolutions, pools, sums."""
    net = _Drawing()
    left = net.operator(net.operator(None), net.operator(None))
    right = net.operator(None)
    separable = [net.operator(net.operator(source)) for source in (right, right, left, left, right)]
    pooled = [net.operator(source) for source in (right, left, left)]
    net.operator(left, right, *separable, *pooled)
    return net.dag()
