"""Seams of sessions: where tests look at the engines of a session, and replace steps of selection and of requests."""

from __future__ import annotations

import functools
import json
import math
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import onnxruntime as ort
import pytest

from chrion import HybridSession
from chrion.graph import assemble, extract, loader, reading
from chrion.graph.model import Graph
from chrion.machine.cpu_use import OtherWork
from chrion.machine.waiting import Counter
from chrion.profiler import measure_graph, overheads
from chrion.runtime import arena_contention, background_tuning, diversion, engines
from chrion.runtime.engine_table import Shapes
from chrion.runtime.engines import Engines
from chrion.runtime.execution import cut_engine, lane_groups
from chrion.runtime.execution.accelerator import AcceleratorSessions
from chrion.runtime.execution.cut_engine import CutEngine
from chrion.runtime.execution.engine import Engine
from chrion.runtime.execution.executor import Executor
from chrion.runtime.execution.host_frame import HostFrame
from chrion.runtime.execution.native_executor import NativeExecutor
from chrion.runtime.execution.plain_engine import PlainEngine
from chrion.runtime.execution.python_executor import PythonExecutor
from chrion.runtime.live_comparison import LiveComparison
from chrion.runtime.live_selection import LiveSelection
from chrion.runtime.one_thread import OneThreadSession
from chrion.runtime.selection import (
    decision_source,
    decisions,
    known_decisions,
    model_loading,
    offline_tuning,
    plain_sessions,
    proposals,
    selector,
    shapes,
    tuning_process,
)
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import Decision
from chrion.runtime.selection.selector import EngineSelector
from chrion.runtime.selection.tuning_process import NamedShapes, StarvedError

#: The function of each step of selecting an engine, under the name by which the previous step calls it.
_SELECTION: dict[str, tuple[object, str]] = {
    "read": (reading, "_read"),
    "optimise": (loader, "optimise_model"),
    "infer types": (loader, "infer_types"),
    "read captures": (assemble, "node_reads"),
    "build the graph": (loader, "assemble"),
    "read again": (model_loading, "read_model"),
    "load": (SessionConfig, "load"),
    "probe the options": (model_loading, "hidden_reason"),
    "unroll": (measure_graph, "chunk_choices"),
    "describe the machine": (known_decisions, "this_machine"),
    "profile": (measure_graph, "profile"),
    "recall the decision": (decisions.DecisionCache, "recall"),
    "plan": (proposals, "alternatives"),
    "synthesise inputs": (selector, "synthetic_inputs"),
    "compare": (selector, "compare"),
    "keep the decision": (decisions.DecisionCache, "keep"),
}
#: The same for the steps of opening a plan.
_OPENING: dict[str, tuple[object, str]] = {
    "extract": (extract.Extractor, "extract"),
    "find transfers": (cut_engine, "find_transfers"),
    "build the program": (cut_engine, "build_program"),
    "choose cores": (lane_groups, "assign_cores"),
    "open segments": (cut_engine.SegmentFactory, "open"),
    "start the lanes": (cut_engine, "NativeExecutor"),
}
#: Further functions that tests replace or watch.
_OTHERS: dict[str, tuple[object, str]] = {
    "decide": (EngineSelector, "_compare"),
    "open the engine": (EngineSelector, "open"),
    "wait for other processes": (offline_tuning, "tuning_lock"),
    "lock a file": (filelock.FileLock, "acquire"),
    "run on the accelerator": (AcceleratorSessions, "run"),
    "begin a request": (HostFrame, "begin"),
    "return an array": (HostFrame, "array"),
    "run a segment": (PythonExecutor, "_run_segment"),
    "wait for a lane": (Counter, "wait"),
}
SELECTION_STEPS, OPENING_STEPS = tuple(_SELECTION), tuple(_OPENING)
_STEPS = _SELECTION | _OPENING | _OTHERS

#: Makes a decision on a graph of known shapes.
Decide = Callable[[Graph], Decision]


# The engines of a session.


def engines_of(session: HybridSession) -> Engines:
    """Return all engines of a session."""
    return session._engines


def engine_of(session: HybridSession) -> Engine:
    """Return the engine of a session's last request."""
    return session._engines.current


def serve_by(session: HybridSession, engine: Engine) -> None:
    """Let an engine serve the requests of a session, as if it was selected."""
    session._engines._table.current = engine


def engines_by_shapes(session: HybridSession) -> OrderedDict[Shapes, Engine]:
    """Return the engines of a session by the shapes of inputs, the least recently used first."""
    return session._engines._table._engines


def install_decision(session: HybridSession, shapes: NamedShapes, decision: Decision) -> None:
    """Open and install the engine of a decision, as the tuning thread does."""
    tuner = session._engines._tuner
    assert tuner
    tuner.install(shapes, decision)


def noted_of(session: HybridSession) -> deque[NamedShapes] | None:
    """Return the shapes of requests that wait for the tuning thread; None if they are not noted."""
    tuner = session._engines._tuner
    assert tuner
    return tuner.noted


def stop_noting(session: HybridSession) -> None:
    """Let the shapes of requests be noted no more."""
    tuner = session._engines._tuner
    assert tuner
    tuner.noted = None


# Steps.


def replace_step(monkeypatch: pytest.MonkeyPatch, step: str, function: object) -> None:
    """Replace the function of a step."""
    monkeypatch.setattr(*_STEPS[step], function)


def fail_at(monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException) -> list[str]:
    """Let a step raise an error; return a list that receives the step each time."""
    calls: list[str] = []

    def fail(*_: object, **__: object) -> None:
        calls.append(step)
        raise error

    replace_step(monkeypatch, step, fail)
    return calls


def before_step(monkeypatch: pytest.MonkeyPatch, step: str, act: Callable[[], object]) -> None:
    """Act before each call of a step's function."""
    owner, name = _STEPS[step]
    function = getattr(owner, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        act()
        return function(*arguments, **keywords)

    replace_step(monkeypatch, step, call)


# Tuning.


def decide_by(monkeypatch: pytest.MonkeyPatch, decide: Decide) -> list[Graph]:
    """Replace profiling, planning and comparing in this process; return the list of the graphs decided on."""
    graphs: list[Graph] = []

    def compare(_: EngineSelector, graph: Graph, **__: bool) -> Decision:
        graphs.append(graph)
        return decide(graph)

    replace_step(monkeypatch, "decide", compare)
    return graphs


def replace_tuning_process(
    monkeypatch: pytest.MonkeyPatch, decide: Callable[[Graph], Decision | str], gate: threading.Event | None = None
) -> list[NamedShapes]:
    """Replace the tuning process by a stand-in.

    Args:
        monkeypatch: The fixture.
        decide: Makes the decision on a graph of known shapes, or returns why it cannot; what it raises, the request to
            the process raises.
        gate: The stand-in answers once this event is set, as it is when the process is ended; None to answer at once.

    Returns:
        The shapes that decisions are requested for.
    """
    asked: list[NamedShapes] = []

    class StandIn:
        def __init__(self, config: SessionConfig, *, spare: bool) -> None:
            self._config, self.spare = config, spare

        def ask(self, shapes: NamedShapes, **_: bool) -> dict[str, Any]:
            asked.append(shapes)
            if gate:
                gate.wait(30)
            decision = decide(self._config.load({name: tuple(shape) for name, shape in shapes.items()}))
            if isinstance(decision, str):
                return {"failure": decision}
            return {"decision": json.loads(json.dumps(decision.to_json()))}

        def kill(self) -> None:
            if gate:
                gate.set()

    monkeypatch.setattr(decision_source, "TuningProcess", StandIn)
    return asked


def record_requests(monkeypatch: pytest.MonkeyPatch, *, starves: bool = False) -> list[tuple[bool, bool]]:
    """Record requests to the tuning process, which was replaced before.

    Args:
        monkeypatch: The fixture.
        starves: Whether a process gets no spare time of the cores.

    Returns:
        Of each request, whether the cores were busy, and whether the process used spare time only.
    """
    requests: list[tuple[bool, bool]] = []
    replaced: Any = vars(decision_source)["TuningProcess"]

    class Recorded(replaced):  # type: ignore[misc]
        def ask(self, shapes: NamedShapes, *, busy: bool, **rest: bool) -> dict[str, Any]:
            requests.append((busy, self.spare))
            if starves and self.spare:
                raise StarvedError
            answer: dict[str, Any] = super().ask(shapes, **rest)
            return answer

    monkeypatch.setattr(decision_source, "TuningProcess", Recorded)
    return requests


def decide_in_this_process(monkeypatch: pytest.MonkeyPatch, *, only: bool = True) -> None:
    """Let sessions that tune before they serve start no process for that, or let them do it again."""
    monkeypatch.setattr(engines, "decide_now", (lambda _: None) if only else decision_source.decide_now)


def use_interpreter(monkeypatch: pytest.MonkeyPatch, interpreter: Path | str, script: str = "") -> None:
    """Let another program take the place of Python in new processes.

    Args:
        monkeypatch: The fixture.
        interpreter: Path of the program.
        script: A shell script to write there; empty to write nothing.
    """
    if script:
        Path(interpreter).write_text(f"#!/bin/sh\n{script}\n")
        Path(interpreter).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))


def shorten_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin tuning at once, and wait for a short time for other processes and before a decision is made again."""
    waits_s = {
        (background_tuning, "_DELAY_S"): 0.0,
        (background_tuning, "_POLL_S"): 0.01,
        (background_tuning, "_BUSY_S"): 0.05,
        (selector, "PATIENCE_S"): 0.1,
        (decision_source, "PATIENCE_S"): 0.1,
        (decisions, "_FIRST_RETRY_S"): 0.3,
    }
    for (module, name), seconds in waits_s.items():
        monkeypatch.setattr(module, name, seconds)


def pretend_load(monkeypatch: pytest.MonkeyPatch, all_cores: float, own_cores: float) -> None:
    """Let tuning begin with so many cores in use by all processes and by this one."""
    monkeypatch.setattr(background_tuning, "cores_in_use", lambda *_: (all_cores, own_cores))


def yields_of(session: HybridSession) -> float:
    """Return the share of its time by which a request is prolonged at present."""
    tuner = session._engines._tuner
    assert tuner
    return tuner.yields


def starve_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a tuning process count as starved if it has not answered after a tenth of a second."""
    monkeypatch.setattr(tuning_process, "_STARVED_AFTER_S", 0.1)


def halve_requests_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Halve the numbers of recent requests of all shapes each time that so many requests were counted."""
    monkeypatch.setattr(shapes, "_HALF_LIFE", count)


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no thread be started, as while the interpreter exits or at a limit of the system; none tunes so far."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(background_tuning, "_thread", background_tuning._TuningThread())
    monkeypatch.setattr(threading.Thread, "start", refuse)


def measure_machine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the costs that do not depend on the model once, instead of in each profile."""
    for name in ("measure_handoff_ms", "measure_wake_ms", "measure_reload_ms_per_byte"):
        monkeypatch.setattr(overheads, name, functools.cache(getattr(overheads, name)))


# Requests.


def count_in_flight(monkeypatch: pytest.MonkeyPatch, count: deque[None]) -> None:
    """Count the requests of sessions that are in flight in another list."""
    monkeypatch.setattr(engines, "in_flight", count)


def set_patience(monkeypatch: pytest.MonkeyPatch, requests: float) -> None:
    """Set the number of crowded requests after which the one-thread session is opened."""
    monkeypatch.setattr(diversion, "_PATIENCE", requests)
    monkeypatch.setattr(diversion, "_PATIENCE_S", math.inf)


def crowd_at_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two requests be a crowd for any engine, as on a machine of two cores."""
    for owner in (CutEngine, PlainEngine):
        monkeypatch.setattr(owner, "capacity", 1)
    monkeypatch.setattr(PlainEngine, "has_one_thread", False)


def count_switches(monkeypatch: pytest.MonkeyPatch, switches: Callable[[], int]) -> None:
    """Replace the system's count of voluntary context switches, and check one-thread sessions often."""
    detector = functools.partial(arena_contention.ArenaContention, switches=switches)
    monkeypatch.setattr(diversion, "ArenaContention", detector)
    monkeypatch.setattr(diversion, "OneThreadSession", functools.partial(OneThreadSession, check_s=0.01))


def record_calls(monkeypatch: pytest.MonkeyPatch, plain: ort.InferenceSession, calls: list[None]) -> None:
    """Append an entry to a list for each request that a plain session serves."""
    for name in ("run", "run_with_ort_values", "run_with_iobinding"):
        monkeypatch.setattr(plain, name, counting(getattr(plain, name), calls))


def counting(function: Callable[..., Any], calls: list[None]) -> Callable[..., Any]:
    """Return a function that appends an entry to a list and calls the given one."""

    def counted(*arguments: Any) -> Any:
        calls.append(None)
        return function(*arguments)

    return counted


def script_latencies(monkeypatch: pytest.MonkeyPatch, latency_ms: Callable[[bool], float]) -> None:
    """Replace the times that live comparisons record, on a machine whose other work eases all the time.

    Args:
        monkeypatch: The fixture.
        latency_ms: Returns the latency of a request, given whether a plain session has served it in place of a plan.
    """
    began_s = time.perf_counter()
    now_s = [0.0]

    class EasingWork(OtherWork):
        def has_eased(self) -> bool:
            return True

        def is_busy(self) -> bool:
            return False

    class Scripted(LiveComparison):
        def __init__(self, selected_ms: float | None, plain_ms: float | None) -> None:
            super().__init__(selected_ms, plain_ms, EasingWork)

        def record(self, start_s: float, end_s: float, *, diverted: bool) -> None:
            assert began_s <= start_s <= end_s <= time.perf_counter()
            start_s, now_s[0] = now_s[0], now_s[0] + latency_ms(diverted) / 1e3
            super().record(start_s, now_s[0], diverted=diverted)

    class ScriptedSelection(LiveSelection):
        def record(self, start_s: float, end_s: float, *, diverted: bool) -> None:
            assert began_s <= start_s <= end_s <= time.perf_counter()
            start_s, now_s[0] = now_s[0], now_s[0] + latency_ms(not diverted) / 1e3
            super().record(start_s, now_s[0], diverted=diverted)

    monkeypatch.setattr(background_tuning, "LiveSelection", ScriptedSelection)
    monkeypatch.setattr(plain_sessions, "LiveComparison", Scripted)


def fail_segments(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let each request that runs on a plan raise an error."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Executor, "run", fail)


@contextmanager
def wrapped_requests(wrap: Callable[[Callable[..., None]], Callable[..., None]]) -> Iterator[None]:
    """Wrap the method that serves a request, given its executor and its frame, on lanes of either kind."""
    with pytest.MonkeyPatch.context() as patch:
        for executor in (NativeExecutor, PythonExecutor):
            patch.setattr(executor, "_perform", wrap(executor._perform))
        yield
