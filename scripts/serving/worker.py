"""The process in which one candidate serves: its sessions, and client threads that call them.

Each candidate has processes of its own, so that the threads of one candidate's sessions, which spin for some time after
a request, do not disturb the next candidate.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import onnxruntime as ort

from chrion import HybridSession
from chrion.machine.cores import physical_cores
from serving.ablation import DECIDING, switch_off
from serving.models import Feed, feeds_of

#: Names of the candidates: a HybridSession, and plain sessions with one thread, with as many as there are cores, and
#: with onnxruntime's default.
OWN, ONE, ALL, DEFAULT = CANDIDATES = ("HybridSession", "1 thread", "all cores", "default")
#: A second process of the plain session with one thread. Two equal sessions show how far ratios are noise.
TWIN = "1 thread, twin"
#: Between HybridSession's name and that of a mechanism that is switched off, in the names of further candidates.
WITHOUT = " without "
#: Most seconds for which a session with free dimensions is tuned.
_TUNING_S = 45.0
#: Seconds after the end of a trial after which the tracebacks of all threads are printed, if it still runs.
_DEADLOCK_S = 30.0

Times = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Job:
    """What a process is asked to open.

    Attributes:
        candidate: One of :data:`CANDIDATES`, :data:`TWIN`, or HybridSession without a mechanism.
        model: The model's file.
        sessions: Number of sessions; clients use them in turn.
        cache: Folder of decisions.
        cpus: CPUs that the process may use; None for all.
    """

    candidate: str
    model: str
    sessions: int
    cache: str
    cpus: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one trial.

    Attributes:
        clients: Number of threads that send requests, each one after another.
        pause_s: Pause of a client between two requests.
        start_s: Time of ``time.perf_counter``, which all processes share, from which requests count; clients start as
            soon as they can.
        trial_s: Time for which requests count.
    """

    clients: int
    pause_s: float
    start_s: float
    trial_s: float


@dataclass(frozen=True, slots=True)
class Served:
    """Requests of one trial that count.

    Attributes:
        starts_s: Times at which requests were sent.
        latencies_s: Their latencies.
        finished: Number of requests that finished in the time of the trial.
        cpu_s: CPU time of the process in that time.
        took_s: That time.
    """

    starts_s: Times
    latencies_s: Times
    finished: int
    cpu_s: float
    took_s: float


def serve_commands(connection: Connection, job: Job) -> None:
    """Open the sessions of a job at the first command, and answer each further one, a load, by what was served.

    Ends when the connection is closed. An exception is sent as text.
    """
    if job.cpus is not None:
        os.sched_setaffinity(0, job.cpus)
    kind, _, mechanism = job.candidate.partition(WITHOUT)
    os.environ["CHRION_CACHE"] = f"{job.cache}-{mechanism}" if mechanism in DECIDING else job.cache
    switch_off(mechanism)
    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        try:
            connection.recv()
            with open(job.model, "rb") as file:  # noqa: PTH123 - a path of this program
                source = file.read()
            feeds = feeds_of(source)
            sessions = [open_session(kind, source, feeds) for _ in range(job.sessions)]
            connection.send(describe(sessions[0]))
            while True:
                connection.send(serve(sessions, feeds, connection.recv()))
        except (EOFError, BrokenPipeError):  # the parent has closed the connection
            raise
        except Exception:  # noqa: BLE001 - the parent raises it
            connection.send(traceback.format_exc())


def open_session(candidate: str, source: bytes, feeds: Sequence[Feed]) -> Any:
    """Open a session and run each request once.

    A HybridSession is tuned before; one with free dimensions for a limited time, with the requests of all shapes in
    rotation, so that no tuning disturbs the trials.
    """
    if candidate != OWN:
        session = plain_session(source, {ONE: 1, TWIN: 1, ALL: len(physical_cores()), DEFAULT: None}[candidate])
    elif len(feeds) == 1:
        session = HybridSession(source, tune="now")
    else:
        tune_in_background(source, feeds)
        session = HybridSession(source, tune="never")
    for feed in feeds:
        session.run(None, feed)
    if candidate == OWN and len(feeds) > 1:
        session.wait_until_tuned(_TUNING_S)
    return session


def plain_session(source: bytes, threads: int | None) -> ort.InferenceSession:
    """Open a plain session with a number of threads, or onnxruntime's default."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def tune_in_background(source: bytes, feeds: Sequence[Feed]) -> None:
    """Fill the cache with the decisions that a session makes within a limited time."""
    end = time.monotonic() + _TUNING_S
    with HybridSession(source) as session:
        while time.monotonic() < end:
            for feed in feeds:
                session.run(None, feed)
            if session.wait_until_tuned(max(0.0, min(1.0, end - time.monotonic()))):
                break


def describe(session: Any) -> str:
    """Return what a HybridSession selected; empty for a plain session."""
    if not isinstance(session, HybridSession):
        return ""
    return "plan" if session.plan else "plain"


def serve(sessions: Sequence[Any], feeds: Sequence[Feed], load: Load) -> Served:
    """Let client threads call the sessions until the end of a trial."""
    served: list[list[tuple[float, float]]] = [[] for _ in range(load.clients)]
    end_s = load.start_s + load.trial_s
    faulthandler.dump_traceback_later(end_s - time.perf_counter() + _DEADLOCK_S)

    def client(at: int) -> None:
        run, request, own = sessions[at % len(sessions)].run, at * len(feeds) // load.clients, served[at]
        while (before := time.perf_counter()) < end_s or not own or own[-1][0] < load.start_s:  # at least one counts
            run(None, feeds[request % len(feeds)])
            own.append((before, time.perf_counter()))
            request += 1
            if load.pause_s:
                time.sleep(load.pause_s)

    threads = [threading.Thread(target=client, args=(at,)) for at in range(load.clients)]
    for thread in threads:
        thread.start()
    time.sleep(max(0.0, load.start_s - time.perf_counter()))
    start_s, before = time.perf_counter(), time.process_time()
    time.sleep(max(0.0, end_s - time.perf_counter()))
    stop_s, after = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.join()
    faulthandler.cancel_dump_traceback_later()
    times = np.array([pair for own in served for pair in own], np.float64).reshape(-1, 2)
    counted = times[times[:, 0] >= load.start_s]
    finished = int(((times[:, 1] >= start_s) & (times[:, 1] < stop_s)).sum())
    return Served(counted[:, 0], counted[:, 1] - counted[:, 0], finished, after - before, stop_s - start_s)
