"""Offline tuning: decisions are made and cached before any session needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import Decision
from chrion.runtime.selection.known_decisions import KnownDecisions
from chrion.runtime.selection.shipped import ShippedDecision
from chrion.runtime.selection.tuning_lock import tuning_lock
from chrion.runtime.selection.worker import Decider

#: Maximum number of attempts at a decision without interference (a choice, not measured).
_ATTEMPTS = 3


def tune_offline(
    config: SessionConfig,
    shape_sets: Sequence[Mapping[str, tuple[int, ...]]],
    *,
    anew: bool = False,
    on_start: Callable[[int], None] = lambda _: None,
    on_wait: Callable[[], None] = lambda: None,
) -> tuple[ShippedDecision, ...]:
    """Make decisions on a model, and cache them.

    Args:
        config: Configuration of the sessions.
        shape_sets: Shapes of all inputs by name, for each set of shapes to tune; one empty set for a model without free
            dimensions.
        anew: Whether to make decisions that are cached again. Uncertain ones are made again in any case.
        on_start: Called with the index of each set of shapes.
        on_wait: Called before waiting for another process that tunes.

    Returns:
        A decision for each set of shapes.

    Raises:
        ChrionError: The model cannot be profiled or planned.
    """
    known, made = KnownDecisions(config), []
    with tuning_lock(-1, on_wait):
        decider = Decider(config)
        for at, shapes in enumerate(shape_sets):
            on_start(at)
            decision = _decide(decider, shapes, anew=anew)
            made.append(ShippedDecision(shapes, decider.digest(shapes), known.of_source(shapes).keep(decision)))
    return tuple(made)


def _decide(decider: Decider, shapes: Mapping[str, tuple[int, ...]], *, anew: bool) -> Decision:
    """Return a decision, made again while it is uncertain."""
    decision = decider.decide(shapes, anew=anew)
    for _ in range(_ATTEMPTS - 1):
        if not decision.uncertain:
            break
        decision = decider.decide(shapes, anew=True)
    return decision
