"""Combined blocks of TOP: which blocks of several models run together, and in which stages.

Source: Lin, Chen, Zhang, Liu, *TOP: Task-based operator parallelism for asynchronous deep learning inference on GPU*,
IEEE TPDS 2024, sections IV and V. A *sub-block* is a module of a model. Every sub-block belongs to one *combined
block*; those of one model that meet in it serve different tasks. The operators of a combined block run in *stages*,
one after another; the groups of a stage run side by side. Here the operators of the paper are pieces: sequences of
operators that a lane runs with one call, since a call for each operator would cost more than it gains on a CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from chrion.common.units import format_ms
from chrion.graph.blocks import ModuleChain, combine
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs, OperatorMemory
from chrion.scheduler.policies.ios_search import search_stages
from chrion.scheduler.policies.stages import DeviceLanes

#: A model and the number of its module.
SubBlock = tuple[str, int]
#: Pieces that a lane runs in sequence: model and number of each.
Group = tuple[tuple[str, int], ...]
#: The groups of each stage of a combined block, first to last.
Stages = tuple[tuple[Group, ...], ...]
#: The longest time between two tasks that the launcher takes from a queue: the action of the paper is at most a second.
LONGEST_INTERVAL_MS = 1000.0
#: Endings of one search of stages; a combined block of two large modules has 65 000, which takes seconds.
_MOST_ENDINGS = 10_000
#: From the end of a stage to the start of the next one on another lane: what a lane thread takes to notice.
_HANDOFF_MS = 0.05


@dataclass(frozen=True, slots=True)
class TopPlan:
    """What TOP decides: a pair of launcher settings and combined blocks."""

    #: The shortest time between two tasks that the launcher takes from the queue of each model.
    intervals_ms: Mapping[str, float]
    #: The sub-blocks of each combined block; every sub-block of every model once.
    combined: tuple[tuple[SubBlock, ...], ...]

    @property
    def largest(self) -> int:
        """The most sub-blocks of a combined block, which H limits."""
        return max(map(len, self.combined))

    def __str__(self) -> str:
        sizes = sorted(Counter(map(len, self.combined)).items())
        combined = ", ".join(f"{count} of {size} module{'s' * (size > 1)}" for size, count in sizes)
        intervals = ", ".join(f"{name} {format_ms(interval)}" for name, interval in self.intervals_ms.items())
        return f"combined blocks: {combined}; least intervals: {intervals}"


def sub_blocks(chains: Mapping[str, ModuleChain]) -> list[SubBlock]:
    """Return the sub-blocks of all models, in the order of models and modules."""
    return [(model, at) for model, chain in chains.items() for at in range(len(chain.modules))]


def separate(chains: Mapping[str, ModuleChain]) -> TopPlan:
    """Return the plan without combinations and without limits of the launcher."""
    return TopPlan(dict.fromkeys(chains, 0.0), tuple((block,) for block in sub_blocks(chains)))


def decode(action: Sequence[float], chains: Mapping[str, ModuleChain]) -> TopPlan:
    """Return the plan of an action (section V-B of the paper).

    Args:
        action: Numbers from 0 to 1: an interval in seconds for each model, then one for each sub-block. The range is
            divided into as many equal parts as there are sub-blocks; those whose numbers are in the same part form a
            combined block.
        chains: The models.
    """
    blocks = sub_blocks(chains)
    intervals, places = action[: len(chains)], action[len(chains) :]
    parts: dict[int, list[SubBlock]] = {}
    for block, place in zip(blocks, places, strict=True):
        parts.setdefault(min(int(place * len(blocks)), len(blocks) - 1), []).append(block)
    launch = {name: LONGEST_INTERVAL_MS * value for name, value in zip(chains, intervals, strict=True)}
    return TopPlan(launch, tuple(tuple(parts[at]) for at in sorted(parts)))


def limit(plan: TopPlan, most: int) -> TopPlan:
    """Return a plan whose combined blocks have at most ``most`` sub-blocks: larger ones are divided, in their order."""
    parts = (members[at : at + most] for members in plan.combined for at in range(0, len(members), most))
    return replace(plan, combined=tuple(parts))


class StageTable:
    """The stages of combined blocks, each searched once (``stage_dict`` of Algorithm 1), by IOS's dynamic programme.

    Args:
        chains: The models.
        times: The time of each model's pieces in ms: alone, and with all lanes busy.
        lanes: The number of lanes.
    """

    def __init__(
        self,
        chains: Mapping[str, ModuleChain],
        times: Mapping[str, tuple[Sequence[float], Sequence[float]]],
        lanes: int,
    ) -> None:
        self._chains, self._times, self._lanes = chains, times, lanes
        self._graphs = {
            name: Dag.from_edges(len(chain.before), [(m, i) for i, own in enumerate(chain.before) for m in own])
            for name, chain in chains.items()
        }
        self._known: dict[tuple[SubBlock, ...], Stages] = {}

    def stages(self, members: tuple[SubBlock, ...]) -> Stages:
        """Return the stages of a combined block."""
        if members not in self._known:
            parts = [(self._graphs[model], self._chains[model].modules[at]) for model, at in members]
            pieces = [(model, piece) for (model, _), (_, own) in zip(members, parts, strict=True) for piece in own]
            dag = combine(parts)
            stage_ms = DeviceLanes(dag, self._costs(pieces)).stage_ms
            found = search_stages(dag, stage_ms, most_endings=_MOST_ENDINGS)
            self._known[members] = tuple(
                tuple(tuple(pieces[i] for i in group) for group in stage.groups) for stage in found
            )
        return self._known[members]

    def _costs(self, pieces: Sequence[tuple[str, int]]) -> Costs:
        rows = []
        for busy in range(self._lanes):
            share = busy / max(1, self._lanes - 1)
            own = ((self._times[model][0][at], self._times[model][1][at]) for model, at in pieces)
            rows.append(tuple((1 - share) * alone + share * full for alone, full in own))
        return Costs(None, tuple(rows), (OperatorMemory(),) * len(pieces), handoff_ms=_HANDOFF_MS)
