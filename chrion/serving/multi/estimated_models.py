"""Several models whose blocks have estimated times, to predict loads on a machine that is not this one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from chrion.graph.blocks import ModuleChain, cut_chain
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.serving.multi.lane_models import LaneModels
from chrion.serving.multi.virtual_lanes import BlockTimes


@dataclass(frozen=True, slots=True)
class EstimatedBlocks:
    """A model in blocks, each of which takes as long as its operators; the calls of blocks are left out."""

    #: The times of the blocks alone on the machine.
    block_ms: tuple[float, ...]
    #: The times while all cores are busy.
    busy_ms: tuple[float, ...]
    modules: ModuleChain
    reason: str = ""


def estimate_blocks(
    dag: Dag, costs: Costs, limit_ms: float = math.inf, *, modules: bool, reason: str = ""
) -> EstimatedBlocks:
    """Return a graph in blocks, cut by the costs of its operators as :func:`chrion.graph.blocks.cut_chain` cuts it.

    Args:
        dag: The operators.
        costs: Their costs.
        limit_ms: The limit of a block's time.
        modules: Whether blocks end at the ends of modules.
        reason: Why a session serves the graph as one block; empty if it cuts it.
    """
    alone_ms, busy_ms = costs.cpu_ms[0], costs.cpu_ms[-1]
    if reason:
        return EstimatedBlocks((sum(alone_ms),), (sum(busy_ms),), ModuleChain.straight(1), reason)
    blocks, own = cut_chain(dag, alone_ms, limit_ms, modules=modules)
    alone, busy = (tuple(sum(row[i] for i in block) for block in blocks) for row in (alone_ms, busy_ms))
    return EstimatedBlocks(alone, busy, own)


class EstimatedModels(LaneModels):
    """Several models on lanes of which only the costs are known.

    Args:
        models: For each model its graph, and the costs of the operators on the same number of cores.
        whole: Why models are served as one block, by the name of those that are.
        options: Those of :class:`chrion.serving.multi.lane_models.LaneModels`.
    """

    def __init__(
        self, models: Mapping[str, tuple[Dag, Costs]], whole: Mapping[str, str] = MappingProxyType({}), **options: Any
    ) -> None:
        super().__init__(models, min(costs.cores for _, costs in models.values()), **options)
        blocks = {
            name: estimate_blocks(dag, costs, self._limit_ms, modules=self._in_modules, reason=whole.get(name, ""))
            for name, (dag, costs) in models.items()
        }
        self._use(blocks)
        #: The times of the blocks.
        self.times: BlockTimes = {name: (own.block_ms, own.busy_ms) for name, own in blocks.items()}
