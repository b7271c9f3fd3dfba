"""The engines of a session by the shapes of their requests, and the plain session for all other shapes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from chrion.graph.model import TensorInfo
from chrion.runtime.execution.engine import Engine, Footprint
from chrion.runtime.execution.plain_engine import PlainEngine
from chrion.runtime.live_selection import LiveSelection
from chrion.runtime.selection.plain_sessions import PlainSessions
from chrion.runtime.selection.plan_memory import find_excess, find_room, has_room

#: Maximum numbers of shapes with a plan, and of all shapes, that have an engine; the least recently used are evicted.
#: A plan keeps threads and sessions of its own; the entry of a plain session is little more than its key. Choices, not
#: measured.
_MAX_PLANS, _MAX_SHAPES = 8, 256

Shapes = tuple[tuple[int, ...], ...]


class EngineTable:
    """The engines of a session.

    Callers hold ``lock``, except to read ``current``, ``by_shapes`` and ``least``, and at the end of the process and in
    a forked child, where its owner may be gone.

    Args:
        plain_sessions: The plain sessions of the model.

    Attributes:
        lock: Reentrant, since a signal handler may serve a request.
        inputs: The model's inputs, whose shapes are the keys.
        current: The engine of the last request's shapes.
        by_shapes: Whether each set of input shapes has an engine of its own.
        lent: Whether callers may hold the plain session, so that it must stay open.
        least: Memory of the smallest plan that was measured; None if none was.
        trial: Comparison of the plain session with a plan on live requests; None if there is none.
        trial_shapes: Its shapes.
    """

    current: Engine
    trial: LiveSelection | None
    trial_shapes: Shapes

    def __init__(self, plain_sessions: PlainSessions) -> None:
        self.lock = threading.RLock()
        self.inputs: Sequence[TensorInfo] = ()
        self.by_shapes = False
        self.lent = False
        self._plain_sessions = plain_sessions
        #: By shapes, the one used last at the end.
        self._engines: OrderedDict[Shapes, Engine] = OrderedDict()
        self.least: Footprint | None = None
        self.trial = None
        self.trial_shapes = ()

    def plain(self, reason: str = "") -> PlainEngine:
        """Return the plain session, opened once; see :meth:`PlainSessions.get`."""
        with self.lock:
            return self._plain_sessions.get(reason)

    def engines(self) -> list[Engine]:
        """Return all engines."""
        return [*self.serving(), *([self.trial.other] if self.trial else [])]

    def serving(self) -> list[Engine]:
        """Return the engines that are selected."""
        return [self.current, *self._engines.values()]

    def items(self) -> list[tuple[Shapes, Engine]]:
        """Return the engines that are for some shapes, with these."""
        return list(self._engines.items())

    def find(self, shapes: Shapes) -> Engine | None:
        """Return the engine for some shapes; None if they have none."""
        return self._engines.get(shapes)

    def use(self, shapes: Shapes) -> Engine | None:
        """Return the engine for the shapes of a request, which were used last now; None if they have none."""
        if shapes in self._engines:
            self._engines.move_to_end(shapes)
        return self._engines.get(shapes)

    def put(self, shapes: Shapes, engine: Engine) -> Engine:
        """Store an engine, and evict those used least recently if there are too many; their lanes stop after use.

        Returns:
            The stored engine, which recognises requests of its shapes if each set of shapes has an engine.
        """
        if self.by_shapes:
            infos = zip(self.inputs, shapes, strict=True)
            engine = engine.for_shapes([replace(info, shape=shape) for info, shape in infos])
        self._engines[shapes] = engine
        plans = [known for known, kept in self._engines.items() if kept.plan]
        if len(plans) > _MAX_PLANS:
            del self._engines[plans[0]]
        if len(self._engines) > _MAX_SHAPES:
            self._engines.popitem(last=False)
        return engine

    def put_beside_plain(self, shapes: Shapes, engine: Engine) -> None:
        """Use an engine for some shapes of a model whose plain session serves all others."""
        plain = self._plain_sessions.opened
        before = self._engines.pop(shapes, None) or plain
        if plain and isinstance(engine, PlainEngine) and engine.session is plain.session:
            self._plain_sessions.keep_reason(engine)
        else:
            # A request reads ``current``, then ``by_shapes``, and takes no lock: set them in the opposite order, so
            # that it does not use this engine for other shapes.
            self.by_shapes = True
            engine = self.put(shapes, engine)
        if self.current is before:
            self.current = engine

    def begin_trial(self, shapes: Shapes, trial: LiveSelection) -> None:
        """Compare a plan with the plain session on requests of some shapes, or on all if they have the same."""
        self.end_trial()
        self.trial, self.trial_shapes = trial, shapes
        if not shapes:
            self.current.comparison = trial
            return
        plain = self._plain_sessions.opened
        self.by_shapes = True
        engine = self.put(shapes, self.plain())
        engine.comparison = trial
        if self.current is plain:
            self.current = engine

    def end_trial(self) -> None:
        """Send no further requests to a plan that is compared with the plain session, and drop it."""
        trial, self.trial = self.trial, None
        if trial is None:
            return
        trial.end()
        for engine in self.serving():
            if engine.comparison is trial:
                engine.comparison = None
        if self.trial_shapes:
            self.remove(self.trial_shapes)

    def end_trial_of(self, engine: Engine) -> None:
        """End the comparison of a plan that has failed, if the engine is the plan's."""
        if self.trial and self.trial.other is engine:
            self.end_trial()

    def replace(self, engine: Engine, other: Engine) -> None:
        """Use another engine for all shapes that use one."""
        for shapes, known in self.items():
            if known is engine:
                self._engines[shapes] = other
        if self.current is engine:
            self.current = other

    def remove_accelerated(self) -> None:
        """Remove the engines that use the accelerator."""
        for shapes, engine in self.items():
            if engine.accelerated:
                del self._engines[shapes]

    def clear(self) -> list[Engine]:
        """Remove all engines but the current one, and return them all."""
        engines = self.engines()
        self.end_trial()
        self._engines.clear()
        return engines

    def needs_plain(self) -> bool:
        """Return whether some shapes use the plain session, or callers may hold it."""
        plain = self._plain_sessions.opened
        return plain is not None and (
            self.lent or any(engine.session is plain.session for engine in self._engines.values())
        )

    def drop_plain(self) -> None:
        """Drop the plain session, which holds all weights, if no shapes use it."""
        if not self.needs_plain():
            self._plain_sessions.forget()

    # The memory of plans, which is limited beside the plain session.

    def fits_or_make_room(self, footprint: Footprint) -> bool:
        """Return whether a further plan has room; if not, remove plans until the plain session has room in its place.

        For shapes tuned before their first request, which need the plain session only if a plan is refused.
        """
        fits = has_room(self._engines, footprint, plain_open=self.needs_plain())
        if not fits:
            self.make_room_for_plain()
        return fits

    def make_room_for_plain(self) -> None:
        """Remove the plans that have no room beside the plain session, which serves some shapes from now on."""
        for shapes in find_excess(self._engines):
            del self._engines[shapes]

    def find_room(self, shapes: Shapes, footprint: Footprint, requests: int) -> list[Shapes] | None:
        """Choose the plans to remove for one of some shapes beside the plain session.

        Args:
            shapes: Shapes of the new plan, whose present engine it replaces.
            footprint: Memory of the new plan.
            requests: Number of recent requests of the shapes.

        Returns:
            As for :func:`chrion.runtime.selection.plan_memory.find_room`.
        """
        if self.least is None or footprint.plan_mb < self.least.plan_mb:
            self.least = footprint
        others = {known: engine for known, engine in self._engines.items() if known != shapes}
        return find_room(others, footprint, requests)

    def remove(self, shapes: Shapes) -> None:
        """Remove the engine for some shapes, which the plain session serves from now on."""
        if self._engines.pop(shapes, None) is self.current:
            self.current = self.plain()

    def halve_requests(self) -> None:
        """Halve the numbers of requests of all plans, as those of shapes without a plan are."""
        for engine in self._engines.values():
            engine.requests >>= 1
