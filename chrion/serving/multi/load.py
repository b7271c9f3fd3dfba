"""Loads: tasks that arrive at given rates, served by a session or by its dispatcher on a virtual clock."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import numpy as np

from chrion.errors import ModelError
from chrion.graph.ort_sessions import first_line
from chrion.serving.multi.dispatcher import BlockSpan
from chrion.serving.multi.lane_models import LaneModels
from chrion.serving.multi.session import MultiSession
from chrion.serving.multi.simulation import MAX_ARRIVALS, Arrival, Served, build_arrivals, simulate
from chrion.serving.multi.virtual_lanes import BlockTimes

#: A rate is sustained if at most this share of the tasks misses its deadline or is dropped, and no more are open at the
#: end than this share, one for each lane, and the others of a burst.
MISSED_SHARE = 0.01
#: Tasks of each model to measure the times of its blocks while all lanes are busy, for each lane, and their deadline:
#: none of them is late.
_CALIBRATION, _ANY_TIME_MS = 4, 1e9
#: The steps of the search for the rates that fit: it ends at 1 % of the factor.
_SEARCH_STEPS = 10


@dataclass(frozen=True, slots=True)
class ModelResult:
    """The figures of one model under a load; latencies are NaN if no task was done."""

    tasks: int
    p50_ms: float
    p99_ms: float
    #: Tasks that were dropped, failed or late.
    missed: int
    dropped: int
    #: Tasks that were not over when the last one of the load arrived.
    backlog: int


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The figures of a load."""

    models: Mapping[str, ModelResult]
    #: The share of the lanes' time in which they ran blocks, until the last arrival.
    utilisation: float
    sustained: bool


def submit_all(
    submit: Callable[[str], Future[Any]], arrivals: Sequence[Arrival], deadlines: Mapping[str, float | None]
) -> tuple[list[Served], float]:
    """Submit tasks in real time, and wait until all are over.

    Args:
        submit: Submits a task of a model.
        arrivals: The tasks.
        deadlines: The time that a task of each model has, in ms.

    Returns:
        What became of the tasks, and the time of the beginning in ms of :func:`time.perf_counter`.
    """
    served: SimpleQueue[Served] = SimpleQueue()
    begin_ms = time.perf_counter() * 1e3
    for arrival in arrivals:
        delay_s = (begin_ms + arrival.time_ms) / 1e3 - time.perf_counter()
        if delay_s > 0:
            time.sleep(delay_s)
        deadline_ms = deadlines.get(arrival.model)
        had_ms = math.inf if deadline_ms is None else deadline_ms
        submit(arrival.model).add_done_callback(_recorder(served, arrival, begin_ms, had_ms))
    # A future is done before its callbacks have run: wait for what they record.
    return [served.get() for _ in arrivals], begin_ms


def measure(
    session: MultiSession, feeds: Mapping[str, Mapping[str, Any]], arrivals: Sequence[Arrival]
) -> tuple[list[Served], list[BlockSpan]]:
    """Submit a load to a session in real time; return what became of the tasks, and the blocks that ran."""
    deadlines = {name: rules.deadline_ms for name, rules in session.rules.items()}
    with session.record() as spans:
        served, begin_ms = submit_all(lambda name: session.submit(name, feeds[name]), arrivals, deadlines)
    return served, [replace(s, start_ms=s.start_ms - begin_ms, end_ms=s.end_ms - begin_ms) for s in spans]


def _recorder(
    served: SimpleQueue[Served], arrival: Arrival, begin_ms: float, deadline_ms: float
) -> Callable[[Future[Any]], None]:
    def record(future: Future[Any]) -> None:
        error = future.exception()
        outcome = "done" if error is None else getattr(error, "outcome", "failed")
        end_ms = time.perf_counter() * 1e3 - begin_ms
        served.put(Served(arrival.model, arrival.time_ms, end_ms, outcome, deadline_ms))

    return record


def measure_times(session: MultiSession, feeds: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the times of the blocks alone, and measure them while all cores are busy.

    They are busy with tasks of all models, or of one priority class after another: beside those of others, a class does
    not have the cores for itself.

    Raises:
        ModelError: A model does not run on its inputs.
    """
    for name, feed in feeds.items():
        if error := session.submit(name, feed, _ANY_TIME_MS).exception():
            free = any(info.free for info in session.inputs[name])
            hint = f"{'--shape gives other sizes, ' if free else ''}a MultiSession takes inputs with other values"
            raise ModelError(f"{name}: the model does not run on synthetic inputs: {first_line(error)}", hint=hint)
    with session.record() as spans:
        for level in dict.fromkeys(map(session.niceness.get, feeds)):
            wait(_keep_busy(session, {name: own for name, own in feeds.items() if session.niceness.get(name) == level}))
    found: dict[tuple[str, int], list[float]] = {}
    for span in spans:
        found.setdefault((span.model, span.block), []).append(span.end_ms - span.start_ms)
    times = {}
    for name, rules in session.rules.items():
        busy = [max(alone, float(np.median(found.get((name, at), [alone])))) for at, alone in enumerate(rules.block_ms)]
        times[name] = (rules.block_ms, tuple(busy))
    return times


def _keep_busy(session: MultiSession, feeds: Mapping[str, Mapping[str, Any]]) -> list[Future[Any]]:
    """Submit tasks of all models as their queues have room, so that none is dropped; return their futures."""
    begun: dict[str, deque[Future[Any]]] = {name: deque() for name in feeds}
    futures: list[Future[Any]] = []
    for _ in range(_CALIBRATION * session.lanes):
        for name, feed in feeds.items():
            while session.counts()[name]["waiting"] >= session.rules[name].queue:
                wait([begun[name].popleft()])
            begun[name].append(session.submit(name, feed, _ANY_TIME_MS))
            futures.append(begun[name][-1])
    return futures


def summarise(
    served: Sequence[Served], spans: Sequence[BlockSpan], arrivals: Sequence[Arrival], lanes: int
) -> LoadResult:
    """Return the figures of a load."""
    last_ms = max(arrival.time_ms for arrival in arrivals)
    models = {}
    sustained = True
    for name in dict.fromkeys(arrival.model for arrival in arrivals):
        own = [task for task in served if task.model == name]
        latencies = [task.latency_ms for task in own if task.outcome == "done"]
        p50, p99 = np.percentile(latencies, [50, 99]) if latencies else (math.nan, math.nan)
        backlog = sum(task.end_ms > last_ms for task in own)
        missed = sum(task.missed for task in own)
        dropped = sum(task.outcome not in {"done", "failed"} for task in own)
        models[name] = ModelResult(len(own), float(p50), float(p99), missed, dropped, backlog)
        allowed = MISSED_SHARE * len(own)
        burst = max(Counter(task.arrival_ms for task in own).values())
        sustained &= missed <= allowed and backlog <= allowed + lanes + burst - 1
    busy_ms = sum(max(0.0, min(span.end_ms, last_ms) - span.start_ms) for span in spans)
    return LoadResult(models, busy_ms / (lanes * last_ms) if last_ms else 0.0, sustained)


def predict(session: LaneModels, arrivals: Sequence[Arrival], times: BlockTimes) -> LoadResult:
    """Return the figures of a load as predicted."""
    served, spans = simulate(session.new_dispatcher(), arrivals, session.virtual_lanes(times))
    return summarise(served, spans, arrivals, session.lanes)


def find_factor(
    session: LaneModels, rates: Mapping[str, float], seconds: float, times: BlockTimes, load: str = "periodic"
) -> float:
    """Return the greatest factor by which all rates can be multiplied and are sustained, as predicted.

    The search halves the interval between a factor that is sustained and one that is not, or that has the maximum of
    arrivals; 0.0 if none is.
    """

    def fits(factor: float) -> bool:
        scaled = {name: factor * rate for name, rate in rates.items()}
        return predict(session, build_arrivals(scaled, seconds, load), times).sustained

    greatest = MAX_ARRIVALS / (sum(rates.values()) * seconds)
    low, high = 0.0, 1.0
    while high < greatest and fits(high):
        low, high = high, min(2 * high, greatest)
    for _ in range(_SEARCH_STEPS):
        middle = (low + high) / 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
