"""Operator graphs of published networks, as their papers draw them: no shapes, no weights."""

from __future__ import annotations

from chrion.graph import Dag


class _Drawing:
    """Collects operators and edges."""

    def __init__(self) -> None:
        self.count = 0
        self.edges: list[tuple[int, int]] = []

    def operator(self, *sources: int | None) -> int:
        """An operator that reads from others; None is the network's input."""
        self.edges += [(source, self.count) for source in sources if source is not None]
        self.count += 1
        return self.count - 1

    def convolution(self, source: int | None) -> int:
        """Convolution, batch norm and ReLU, each an operator."""
        return self.operator(self.operator(self.operator(source)))

    def dag(self) -> Dag:
        return Dag.from_edges(self.count, self.edges)


def googlenet() -> Dag:
    """GoogLeNet (Szegedy et al., 2015): a stem, nine inception modules, a pool before the third and eighth, a head."""
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
    """The widest module of Inception-v3: eleven operators, a convolution and what follows it counted as one."""
    net = _Drawing()
    one = net.operator(None)
    three = net.operator(None)
    stacked = net.operator(net.operator(None))
    pooled = net.operator(net.operator(None))
    split = [net.operator(three), net.operator(three), net.operator(stacked), net.operator(stacked)]
    net.operator(one, *split, pooled)
    return net.dag()


def fire() -> Dag:
    """A fire module of SqueezeNet with complex bypass: squeeze, two expansions, their concatenation, bypass, sum."""
    net = _Drawing()
    squeeze = net.operator(None)
    joined = net.operator(net.operator(squeeze), net.operator(squeeze))
    net.operator(joined, net.operator(None))
    return net.dag()


def nasnet_first_cell() -> Dag:
    """NasNet-A's cell after a reduction: inputs adjusted, five separable convolutions of two, pools, and all sums."""
    net = _Drawing()
    left = net.operator(net.operator(None), net.operator(None))
    right = net.operator(None)
    separable = [net.operator(net.operator(source)) for source in (right, right, left, left, right)]
    pooled = [net.operator(source) for source in (right, left, left)]
    net.operator(left, right, *separable, *pooled)
    return net.dag()
