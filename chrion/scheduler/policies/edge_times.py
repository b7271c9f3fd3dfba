"""Transfer times of a graph's edges, which all policies share that place operators one after another.

They depend neither on the number of lanes nor on prices, so one table serves a machine and all smaller machines within
it. Edges of equal size share one entry: large graphs have few different sizes.
"""

from __future__ import annotations

from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs

#: The times in ms from the end of an operator until its result is available: to another lane of the same device, to
#: the accelerator from the host, and to the host from the accelerator.
TransferTimes = tuple[float, float, float]
#: Of each operator, the transfer times of its edges, parallel to its predecessors.
EdgeTimes = list[list[TransferTimes]]


def edge_times(dag: Dag, costs: Costs) -> EdgeTimes:
    """Return the transfer times of a graph's edges on a machine."""
    known: dict[int, TransferTimes] = {}

    def times(size: int) -> TransferTimes:
        transfer_times = known.get(size)
        if transfer_times is None:
            transfer_times = known[size] = (
                costs.transfer_ms(1, 2, size),
                costs.transfer_ms(1, 0, size),
                costs.transfer_ms(0, 1, size),
            )
        return transfer_times

    return [[times(size) for size in sizes] for sizes in dag.edge_bytes]
