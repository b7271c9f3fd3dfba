"""Internals of generators, streams and engines that tests look at or replace."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from chrion import Generator
from chrion.generation import Stream, pooled_session, session_threads, split_session
from chrion.generation.attention import AttentionPart
from chrion.generation.engine import SelectiveEngine
from chrion.generation.iteration import Outcome, Work
from chrion.generation.loop import IterationLoop
from chrion.generation.split_session import SplitSession
from chrion.machine import core_leases

Run = Callable[[Sequence[Work]], list[Outcome]]
#: Runs an iteration in place of a method, which is its first argument.
Around = Callable[[Run, Sequence[Work]], list[Outcome]]


def loop_of(generator: Generator) -> IterationLoop:
    """Return the loop of a generator, with its engine, its scheduler, its caches, and the gate of its iterations."""
    return generator._loop


def waiting_readers(stream: Stream) -> int:
    """Return how many readers a stream would wake."""
    return len(stream._waiting) + len(stream._waiting_for_end)


def parts_of(engine: SelectiveEngine) -> SplitSession:
    """Return the parts of an engine that has kept them."""
    parts = getattr(engine._fallback, "__self__", None)
    assert isinstance(parts, SplitSession)
    return parts


def around_calls(monkeypatch: pytest.MonkeyPatch, engine: SelectiveEngine, around: Around) -> None:
    """Run something around the calls of the whole model."""
    pooled = engine.pooled
    assert pooled is not None
    run = pooled.run
    monkeypatch.setattr(pooled, "run", lambda batch: around(run, batch))


def around_parts(monkeypatch: pytest.MonkeyPatch, engine: SelectiveEngine, around: Around) -> None:
    """Run something around the runs by parts."""
    parts = parts_of(engine)
    run = parts.run_whole
    monkeypatch.setattr(parts, "run_whole", lambda batch: around(run, batch))


def attention_threads(monkeypatch: pytest.MonkeyPatch, engine: SelectiveEngine) -> list[int]:
    """Return a list to which each run of a layer's attention adds the threads of its session."""
    attention = next(part for part in parts_of(engine)._parts[1:] if isinstance(part, AttentionPart))
    used: list[int] = []
    for name in ("_session", "_parallel"):
        session = getattr(attention, name)

        def noted(*call: Any, own: Any = session) -> Any:
            used.append(own.get_session_options().intra_op_num_threads)
            return own.run(*call)

        monkeypatch.setattr(attention, name, SimpleNamespace(run=noted))
    return used


@contextmanager
def without_native_operators() -> Iterator[None]:
    """Open decoders with attention of several operators, as where there is no C compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooled_session, "operators_available", lambda: False)
        yield


def noted_parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[bool]]:
    """Return a function for whether parts of a decoder were alive when its whole model was opened, and are now."""
    parts: list[weakref.ref[AttentionPart]] = []
    alive: list[bool] = []

    def any_alive() -> bool:
        assert parts
        return any(part() is not None for part in parts)

    class NotedPart(AttentionPart):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            parts.append(weakref.ref(self))

    class NotedSession(pooled_session.PooledSession):
        def __init__(self, *arguments: Any) -> None:
            alive.append(any_alive())
            super().__init__(*arguments)

    monkeypatch.setattr(split_session, "AttentionPart", NotedPart)
    monkeypatch.setattr(pooled_session, "PooledSession", NotedSession)
    return lambda: [*alive, any_alive()]


def refuse_thread(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Let the system refuse one of the threads that are started, counted from 0."""
    start, begun = threading.Thread.start, iter(range(at + 1))

    def refusing(thread: threading.Thread) -> None:
        if next(begun, None) == at:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)


def without_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process hold no core."""
    monkeypatch.setattr(core_leases, "_registry", core_leases._Registry())


def use_cores(monkeypatch: pytest.MonkeyPatch, cores: tuple[int, ...]) -> None:
    """Let the process have some cores; none if the system cannot pin threads."""
    for name in ("allowed_cores", "physical_cores"):
        monkeypatch.setattr(core_leases, name, lambda: cores)
    monkeypatch.setattr(session_threads, "affinity", lambda: {*cores} or None)
