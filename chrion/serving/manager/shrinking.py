"""The policy ``shrink``: models give up a part of their memory before any model is evicted.

A model has several variants that need less and less device memory: for example the whole model on the GPU, a
latency-optimal plan, a memory-optimal plan, and the CPU alone. If a model has to be loaded and memory is short, idle
models change to their next smaller variant, in the order of the eviction policy. No model gives up two variants before
every idle model has given up one. Models are evicted only if the smallest variants of all do not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from chrion.serving.manager.policies import Rank, ResidentModel


class Room(NamedTuple):
    """Memory for a model: what others give up, and the variant that then fits."""

    #: The variant of the model that is to be loaded.
    level: int
    #: The models that change to a smaller variant, with its level.
    shrunk: tuple[tuple[ResidentModel, int], ...] = ()
    evicted: tuple[ResidentModel, ...] = ()


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a device and the models in it."""

    residents: Iterable[ResidentModel]
    free_bytes: int
    #: Bytes of every variant, by level and model; they do not increase with the level.
    sizes: Sequence[Sequence[int] | Mapping[int, int]]


def make_room(memory: Memory, key: int, rank: Rank, now_ms: float, *, evict: bool = True) -> Room | None:
    """Choose what the models in memory give up so that another one can be loaded.

    Pinned models, models in use and those without device memory are left alone.

    Args:
        memory: The memory.
        key: The model to load, which is not in memory.
        rank: The eviction policy; the model with the lowest rank gives up memory first.
        now_ms: The time.
        evict: False if no model may be evicted.

    Returns:
        The choice; None if all that is permitted does not free enough memory for the smallest variant.
    """
    sizes, free_bytes = memory.sizes, memory.free_bytes
    candidates = (r for r in memory.residents if r.bytes and not r.in_use and not r.pinned)
    ordered = sorted(candidates, key=lambda r: rank(r, now_ms))
    levels = [resident.level for resident in ordered]
    for level, row in enumerate(sizes):
        if row[key] <= free_bytes:
            return Room(level, _changes(ordered, levels))
        for i, resident in enumerate(ordered):
            if levels[i] == level < len(sizes) - 1:
                levels[i] = level + 1
                free_bytes += row[resident.key] - sizes[level + 1][resident.key]
                if row[key] <= free_bytes:
                    return Room(level, _changes(ordered, levels))
    evicted = []
    for resident in ordered if evict else ():
        if sizes[-1][resident.key]:  # else it has none left
            evicted.append(resident)
            free_bytes += sizes[-1][resident.key]
            if sizes[-1][key] <= free_bytes:
                gone = {victim.key for victim in evicted}
                shrunk = tuple(change for change in _changes(ordered, levels) if change[0].key not in gone)
                return Room(len(sizes) - 1, shrunk, tuple(evicted))
    return None


def _changes(ordered: Sequence[ResidentModel], levels: Sequence[int]) -> tuple[tuple[ResidentModel, int], ...]:
    return tuple((resident, level) for resident, level in zip(ordered, levels, strict=True) if level != resident.level)
