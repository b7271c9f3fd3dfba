"""The limit on the memory of plans, for models with free dimensions.

Such a model keeps its plain session, which serves all shapes without a plan, so each plan adds to the memory. All plans
of a session may add :data:`SHARE` of the plain session's memory, or :data:`SMALL_MB` if that is more. The limit holds
for measured memory; see :mod:`chrion.runtime.selection.footprint`. If there is no room for a further plan, shapes that
are requested much more often than others receive theirs instead.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

from chrion.common.units import format_mb
from chrion.runtime.execution.engine import Engine, Footprint

#: Memory that plans may add: this share of the plain session's, or so many MB if that is more (choices). A process with
#: numpy and onnxruntime takes 60 MB, and for 13 to 20 MB the plan of a GRU of 5 MB takes 0.66 of the time.
SHARE, SMALL_MB = 0.3, 64.0
#: Share of the permitted addition that is used: the memory of equal processes differs by a few percent of it.
_USED = 0.95
#: A plan replaces another one if its shapes had at least this many recent requests, and this many times as many. Plans
#: of shapes in rotation, with equal numbers of requests, would otherwise be opened and closed again and again.
_REQUESTS, _MULTIPLE = 16, 2

Shapes = TypeVar("Shapes", bound=Hashable)


def find_room(engines: Mapping[Shapes, Engine], new: Footprint, requests: int) -> list[Shapes] | None:
    """Choose the plans to close so that a new plan has room beside a plain session.

    Plans with the fewest requests are closed first, and only those that the new plan may replace.

    Args:
        engines: Engines that are open, by shapes.
        new: Memory of the new plan.
        requests: Number of recent requests of the new plan's shapes.

    Returns:
        Shapes whose plans to close, or None if the new plan must not be opened.
    """
    kept = _limited_plans(engines)
    by_requests = sorted(kept, key=lambda shapes: kept[shapes].requests)
    closed: list[Shapes] = []
    while not has_room(kept, new):
        if not by_requests or requests < max(_REQUESTS, _MULTIPLE * kept[by_requests[0]].requests):
            return None
        closed.append(by_requests.pop(0))
        del kept[closed[-1]]
    return closed


def has_room(engines: Mapping[Shapes, Engine], new: Footprint, *, plain_open: bool = True) -> bool:
    """Return whether a plan has room beside those that are open.

    Args:
        engines: Engines that are open, by shapes.
        new: Memory of the new plan.
        plain_open: Whether the plain session is open. If not, the largest plan takes its place.
    """
    open_plans = [plan.footprint for plan in _limited_plans(engines).values() if plan.footprint]
    return _fits([new, *open_plans], plain_open=plain_open)


def find_excess(engines: Mapping[Shapes, Engine]) -> list[Shapes]:
    """Return the shapes whose plans have no room beside a plain session that will be opened; the oldest keep theirs."""
    kept: list[Footprint] = []
    excess: list[Shapes] = []
    for shapes, plan in _limited_plans(engines).items():
        if plan.footprint and _fits([*kept, plan.footprint], plain_open=True):
            kept.append(plan.footprint)
        else:
            excess.append(shapes)
    return excess


def never_fits(plan: Footprint) -> bool:
    """Return whether a plan has no room even if no other plan is open."""
    return not _fits([plan], plain_open=True)


def explain_refusal(new: Footprint) -> str:
    """Return the reason why some shapes run plain if their plan has no room."""
    return (
        f"a plan would add {format_mb(new.plan_mb)} to the {format_mb(new.plain_mb)} of the plain session, which "
        f"serves other shapes, and all plans may add {format_mb(_permitted_mb(new.plain_mb))}; as long as requests "
        "have one set of shapes, none is needed: chrion.load(MODEL, shapes=...)"
    )


def _limited_plans(engines: Mapping[Shapes, Engine]) -> dict[Shapes, Engine]:
    """Return the plans whose memory is limited."""
    return {shapes: engine for shapes, engine in engines.items() if engine.footprint}


def _fits(plans: Iterable[Footprint], *, plain_open: bool) -> bool:
    """Return whether plans have room. If their shapes need plain sessions of different sizes, the largest counts."""
    plans = list(plans)
    sizes_mb = [footprint.plan_mb for footprint in plans]
    added_mb = sum(sizes_mb) - (0.0 if plain_open else max(sizes_mb))
    return added_mb <= _USED * _permitted_mb(max(footprint.plain_mb for footprint in plans))


def _permitted_mb(plain_mb: float) -> float:
    """Return the memory that all plans may add to a plain session."""
    return max(SHARE * plain_mb, SMALL_MB)
