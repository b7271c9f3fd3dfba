"""The processes of one candidate, and trials of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from serving.surroundings import Quota
from serving.worker import Job, Load, Served, Times, serve_commands

#: Time before a trial in which clients send requests that do not count, and pause after a trial, in seconds.
_WARM_UP_S, _PAUSE_S = 0.25, 0.05
#: Time that a process has to open its sessions, tuning included, and to answer beyond the time of a trial, in seconds.
_OPENING_S, _ANSWER_S = 240.0, 60.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What the processes of a candidate are and may use.

    Attributes:
        processes: Number of processes.
        sessions: Number of sessions of each process.
        cpus: CPUs that the processes may use; None for all.
        quota: Quota of each process in CPUs; None for none.
    """

    processes: int = 1
    sessions: int = 1
    cpus: tuple[int, ...] | None = None
    quota: float | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial of one candidate.

    Attributes:
        starts_s: Times at which requests were sent, in seconds of ``time.perf_counter``.
        latencies_ms: Their latencies.
        ms_per_request: Duration of the trial divided by the number of requests that finished.
        cpu_ms: CPU time of all processes for one request.
    """

    starts_s: Times
    latencies_ms: Times
    ms_per_request: float
    cpu_ms: float


class Fleet:
    """The processes of one candidate in one setting.

    Attributes:
        selected: What a HybridSession selected; empty for plain sessions.
    """

    def __init__(self, job: Job, setting: Setting) -> None:
        self._name = job.candidate
        self._processes: list[tuple[Any, Any]] = []
        self._quotas = contextlib.ExitStack()
        context = multiprocessing.get_context("spawn")
        try:
            for _ in range(setting.processes):
                own, other = context.Pipe()
                process = context.Process(target=serve_commands, args=(other, job), daemon=True)
                process.start()
                other.close()
                self._processes.append((process, own))
                if setting.quota is not None:
                    self._quotas.enter_context(Quota(setting.quota)).add(process.pid or 0)
            answers = []
            for _, connection in self._processes:  # one after another, so that the first one tunes for all
                connection.send("open")
                answers.append(self._answer(connection, _OPENING_S))
        except BaseException:
            self.close()
            raise
        self.selected = str(answers[0])

    def trial(self, clients: int, trial_s: float, *, pause_s: float = 0.0, warm_up_s: float = _WARM_UP_S) -> Trial:
        """Let each process serve a number of clients at the same time."""
        load = Load(clients, pause_s, time.perf_counter() + warm_up_s, trial_s)
        for _, connection in self._processes:
            connection.send(load)
        served = [self._answer(connection, warm_up_s + trial_s + _ANSWER_S) for _, connection in self._processes]
        time.sleep(_PAUSE_S)
        return _merged(served)

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._processes:
            connection.close()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._quotas.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, connection: Any, limit_s: float) -> Any:
        """Return the next answer of a process.

        Raises:
            RuntimeError: The process has failed, has ended, or takes too long.
        """
        try:
            answer = connection.recv() if connection.poll(limit_s) else f"no answer after {limit_s:.0f} s"
        except EOFError:
            answer = "Traceback: the process has ended"
        if isinstance(answer, str) and ("Traceback" in answer or "no answer" in answer):
            raise RuntimeError(f"{self._name}: {answer}")
        return answer


@contextlib.contextmanager
def fleets(model: str, setting: Setting, cache: str, candidates: Sequence[str]) -> Iterator[Mapping[str, Fleet]]:
    """Open the processes of some candidates, in this order: the first HybridSession decides for all of its kind."""
    with contextlib.ExitStack() as opened:
        yield {
            name: opened.enter_context(Fleet(Job(name, model, setting.sessions, cache, setting.cpus), setting))
            for name in candidates
        }


def _merged(served: list[Served]) -> Trial:
    finished = max(1, sum(each.finished for each in served))  # none, if other processes use all cores
    took_s = float(np.mean([each.took_s for each in served]))
    return Trial(
        np.concatenate([each.starts_s for each in served]),
        np.concatenate([each.latencies_s for each in served]) * 1e3,
        took_s * 1e3 / finished,
        sum(each.cpu_s for each in served) * 1e3 / finished,
    )
