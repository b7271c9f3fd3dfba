"""The plain sessions of a model: the caller's, those on the CPU alone, and those with other numbers of threads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from chrion.errors import InputError
from chrion.graph.model import Graph
from chrion.runtime.execution.engine import Engine
from chrion.runtime.execution.plain_engine import PlainEngine
from chrion.runtime.live_comparison import LiveComparison
from chrion.runtime.selection.comparison_summary import PLAIN, PLAIN_THREADS
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import Decision

log = logging.getLogger(__name__)

#: Plain sessions with other numbers of threads are candidates only for models with at most this many bytes of weights,
#: since two sessions are open at once for a while (a choice, not measured).
_ALTERNATIVE_BYTES = 32e6
_PLAIN_CPU = "plain, on the CPU"

E = TypeVar("E", bound=Engine)
#: Opens a plain session for a given reason.
PlainOpener = Callable[[str], PlainEngine]


class PlainSessions:
    """The plain sessions of a model; one of a name serves all shapes, and is opened once.

    Args:
        config: The session's configuration.

    Attributes:
        config: The configuration in use.
        lost: Reason why the accelerator is no longer used; empty while it works.
    """

    def __init__(self, config: SessionConfig) -> None:
        self.config = config
        self.lost = ""
        self._opened: dict[str, PlainEngine] = {}

    def get(self, reason: str) -> PlainEngine:
        """Return the plain session the caller would have created; on the CPU if the accelerator cannot open the model.

        Args:
            reason: Why the model runs plain; empty for the reason for which the session was opened.

        Raises:
            Exception: Raised by InferenceSession, if the CPU cannot open the model either or ``strict`` is true.
        """
        config = self.config
        try:
            return self._shared(self._name, reason or self.lost)
        except Exception as error:
            if self.lost or config.strict or config.accelerator is None:
                raise
            try:
                engine = config.on_cpu(f"the accelerator failed: {error}")
            except Exception:  # noqa: BLE001 - the model is at fault, not the accelerator
                raise error from None
            self.lose_accelerator(error)
            self._opened[PLAIN] = engine
            return engine

    @property
    def opened(self) -> PlainEngine | None:
        """The engine of :meth:`get`, with the reason of the latest decision; None if its session is not open."""
        return self._opened.get(self._name)

    def keep_reason(self, engine: PlainEngine) -> None:
        """Keep the reason of an engine of the open session."""
        self._opened[self._name] = engine

    @property
    def _name(self) -> str:
        return PLAIN if self.lost or self.config.budget_mb is None else _PLAIN_CPU

    def of_decision(self, decision: Decision) -> PlainEngine:
        """Open the plain session that a decision selects; no graph is needed.

        Raises:
            InputError: The decision selects a plan, or a session unknown to this release.
        """
        return self.compare_live(self._shared(decision.winner, decision.evidence), decision)

    @staticmethod
    def compare_live(engine: E, decision: Decision) -> E:
        """Have the engine of a decision compared with the session of one thread on live requests, if it has several.

        A plan whose latency is not known is not compared.
        """
        plain_ms = one_thread_ms(decision)
        if decision.plan:
            plain_ms = plain_ms or decision.plain_ms
        if not (engine.has_one_thread or engine.accelerated or (decision.plan and not decision.latency_ms)):
            engine.comparison = LiveComparison(decision.latency_ms, plain_ms)
        return engine

    def one_thread(self, arena: bool) -> PlainEngine | None:  # noqa: FBT001 - called by the one-thread session alone
        """Open a plain session of one thread, if possible; see :meth:`SessionConfig.one_thread`."""
        return self.config.one_thread("several requests are in flight, or other work uses the cores", arena=arena)

    def lose_accelerator(self, error: Exception) -> bool:
        """Stop using the accelerator, with a warning; return False if it was no longer used already."""
        if self.lost:
            return False
        self.lost = f"the accelerator failed: {error}"
        self._opened.clear()
        log.warning("the model runs on the CPU: %s", self.lost)
        return True

    def forget(self) -> None:
        """Drop the plain sessions; each is closed when no request uses it any longer."""
        self._opened.clear()

    def names(self, graph: Graph) -> list[str]:
        """List the plain sessions to compare: the caller's first, then those with other numbers of threads.

        For a model with free dimensions the caller's session stays open for shapes that are not tuned; a second plain
        session would hold all weights once more.
        """
        config, names = self.config, [PLAIN]
        small = sum(graph.dag.weight_bytes) <= _ALTERNATIVE_BYTES
        if config.options is None and small and not graph.declared_free:
            cores = config.threads
            names += [f"{PLAIN_THREADS}{count}" for count in ((1, cores // 2) if cores >= 8 else (1,)) if count < cores]
        if config.budget_mb is not None and config.accelerator:
            names.append(_PLAIN_CPU)
        return names

    def opener(self, name: str) -> PlainOpener:
        """Return the function that opens the plain session of a name.

        Raises:
            InputError: No plain session has that name.
        """
        count = name.removeprefix(PLAIN_THREADS)
        if name == PLAIN:
            return self.config.on_cpu if self.lost else self.config.as_requested
        if name == _PLAIN_CPU:
            return self.config.plain
        if name.startswith(PLAIN_THREADS) and count.isdecimal():
            return partial(self.config.with_threads, int(count))
        raise InputError(f"cached decision: unknown session {name!r}")

    def _shared(self, name: str, reason: str) -> PlainEngine:
        """Return the plain session of a name, which is opened once; a copy of its engine if a reason is given."""
        engine = self._opened.get(name)
        if engine is None:
            engine = self._opened[name] = self.opener(name)(reason)
        return engine.with_reason(reason) if reason else engine


def one_thread_ms(decision: Decision) -> float | None:
    """Return the latency of the plain session of one thread in ms; None if it was not timed."""
    return next((timed.latency_ms for timed in decision.timings if timed.name == f"{PLAIN_THREADS}1"), None)
