"""The engines of a session by the shapes of their requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import onnxruntime as ort

from chrion.runtime.execution.engine import Engine, Footprint
from chrion.runtime.selection.plan_memory import PlanMemory, find_excess, has_room

#: Maximum numbers of shapes with a plan, and of all shapes, that have an engine; the least recently used are evicted.
_MAX_PLANS, _MAX_SHAPES = 8, 256

Shapes = tuple[tuple[int, ...], ...]


class EngineTable:
    """The engines of a session by shapes, the one used last at the end; the caller holds the session's lock."""

    def __init__(self) -> None:
        self._engines: OrderedDict[Shapes, Engine] = OrderedDict()
        self._memory = PlanMemory()

    def engines(self) -> list[Engine]:
        """Return all engines."""
        return list(self._engines.values())

    def items(self) -> list[tuple[Shapes, Engine]]:
        """Return all engines with their shapes."""
        return list(self._engines.items())

    def find(self, shapes: Shapes) -> Engine | None:
        """Return the engine for some shapes; None if they have none."""
        return self._engines.get(shapes)

    def use(self, shapes: Shapes) -> Engine | None:
        """Return the engine for the shapes of a request, which were used last now; None if they have none."""
        if shapes in self._engines:
            self._engines.move_to_end(shapes)
        return self._engines.get(shapes)

    def put(self, shapes: Shapes, engine: Engine) -> None:
        """Store an engine, and evict those used least recently if there are too many; their lanes stop after use."""
        self._engines[shapes] = engine
        plans = [known for known, kept in self._engines.items() if kept.plan]
        if len(plans) > _MAX_PLANS:
            del self._engines[plans[0]]
        if len(self._engines) > _MAX_SHAPES:
            self._engines.popitem(last=False)

    def pop(self, shapes: Shapes) -> Engine | None:
        """Remove the engine for some shapes, and return it."""
        return self._engines.pop(shapes, None)

    def remove(self, shapes: Iterable[Shapes]) -> None:
        """Remove the engines for several shapes."""
        for one in shapes:
            self._engines.pop(one, None)

    def replace(self, engine: Engine, other: Engine) -> None:
        """Use another engine for all shapes that use one."""
        for shapes, known in self.items():
            if known is engine:
                self._engines[shapes] = other

    def uses(self, session: ort.InferenceSession) -> bool:
        """Return whether some shapes are served by a plain session."""
        return any(engine.session is session for engine in self._engines.values())

    # The memory of plans, which is limited beside a plain session.

    def has_room(self, footprint: Footprint, *, plain_open: bool) -> bool:
        """Return whether a further plan has room; see :func:`chrion.runtime.selection.plan_memory.has_room`."""
        return has_room(self._engines, footprint, plain_open=plain_open)

    def remove_excess(self) -> None:
        """Remove the plans that have no room beside a plain session that will be opened."""
        self.remove(find_excess(self._engines))

    @property
    def least(self) -> Footprint | None:
        """Memory of the smallest plan that was measured; None if none was."""
        return self._memory.least

    def find_room(self, shapes: Shapes, footprint: Footprint, requests: int, halvings: int) -> list[Shapes] | None:
        """Choose the plans to remove for another one; see :class:`chrion.runtime.selection.plan_memory.PlanMemory`."""
        return self._memory.find_room(self._engines, shapes, footprint, requests, halvings)
