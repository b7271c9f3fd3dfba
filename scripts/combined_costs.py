"""Costs of blocks that are combined of parts of several models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from chrion.profiler import Costs


def combine_costs(parts: Sequence[tuple[Costs, Sequence[int]]]) -> Costs:
    """Return the costs of parts of several graphs on one machine, as :func:`chrion.graph.blocks.combine` joins them."""
    first = parts[0][0]

    def joined(rows: Callable[[Costs], Sequence[Any]]) -> tuple[Any, ...]:
        return tuple(rows(costs)[i] for costs, own in parts for i in own)

    return replace(
        first,
        accelerator_ms=None if first.accelerator_ms is None else joined(lambda costs: costs.accelerator_ms or ()),
        cpu_ms=tuple(zip(*joined(lambda costs: tuple(zip(*costs.cpu_ms, strict=True))), strict=True)),
        memory=joined(lambda costs: costs.memory),
        accelerator_share=joined(lambda costs: costs.accelerator_share) if first.accelerator_share else (),
        widths=(),
        wide_ms=(),
    )
