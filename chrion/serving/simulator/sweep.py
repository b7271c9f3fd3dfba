"""Sweeps: a scenario simulated at each point of a grid, in parallel processes or on a Ray cluster."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from typing import Any, Protocol

from chrion.serving.ray_cluster import connected
from chrion.serving.simulator.results import PatternResult, summary
from chrion.serving.simulator.run import simulate
from chrion.serving.simulator.scenario import Scenario, ScenarioSource

#: Time limit in seconds for the end of a process that has been told to end (a choice, not measured).
_END_TIMEOUT_S = 5.0


#: The indices of points that are done, and their results.
_Completed = Generator[tuple[int, tuple[PatternResult, ...]], None, None]


class Task(Protocol):
    """What a process builds and simulates."""

    def build(self) -> Scenario:
        """Return the scenario."""


@dataclass(frozen=True, slots=True, eq=False)
class SweepPoint:
    """The results at one point of a grid."""

    #: The swept values, by key.
    values: Mapping[str, Any]
    models: int
    results: tuple[PatternResult, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the point as plain data for JSON."""
        return {
            "values": dict(self.values),
            "models": self.models,
            "patterns": [summary(result) for result in self.results],
        }


def run_sweep(
    source: ScenarioSource,
    points: Sequence[Mapping[str, Any]],
    *,
    workers: int = 1,
    ray_address: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[SweepPoint]:
    """Simulate a scenario at every point. All points are checked before the first one is simulated.

    Args:
        source: The scenario.
        points: The values to set at each point.
        workers: Number of processes; with 1 the simulation runs in this process.
        ray_address: The address of a Ray cluster, ``auto`` for the cluster of this machine, or ``local`` for a new
            cluster on this machine; None uses processes.
        progress: Called with the number of points that are done.

    Returns:
        The results, in the order of the points.

    Raises:
        InputError: The scenario of a point is invalid.
        OptionError: Ray is not installed, or its cluster is not reachable.
    """
    tasks = [source.changed(values) for values in points]
    sizes = [len(task.build().models) for task in tasks]
    results = run_tasks(tasks, workers=workers, ray_address=ray_address, progress=progress)
    return [SweepPoint(*of_point) for of_point in zip(points, sizes, results, strict=True)]


def run_tasks(
    tasks: Sequence[Task],
    *,
    workers: int,
    ray_address: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[tuple[PatternResult, ...]]:
    """Simulate scenarios and return their results in the same order; see :func:`run_sweep`."""
    if ray_address is not None:
        completed = _on_ray(tasks, ray_address)
    elif workers > 1 and len(tasks) > 1:
        completed = _in_processes(tasks, min(workers, len(tasks)))
    else:
        completed = ((i, _run(task)) for i, task in enumerate(tasks))
    done: dict[int, tuple[PatternResult, ...]] = {}
    with closing(completed):  # ends processes also if ``progress`` raises an exception
        for i, results in completed:
            done[i] = results
            progress(len(done))
    return [done[i] for i in range(len(tasks))]


def _run(task: Task) -> tuple[PatternResult, ...]:
    return simulate(task.build())


def _in_processes(tasks: Sequence[Task], workers: int) -> _Completed:
    with worker_pool(workers) as pool:
        futures = {pool.submit(_run, task): i for i, task in enumerate(tasks)}
        for future in as_completed(futures):
            yield futures[future], future.result()


@contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes; an interrupt or an error ends them at once, and what runs is not waited for."""
    # Each process is a new interpreter: a fork is unsafe if the parent has threads.
    others = set(active_children())
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_ignore_interrupts) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            started = set(active_children()) - others
            for process in started:
                process.terminate()
            for process in started:
                process.join(_END_TIMEOUT_S)
            raise


def _ignore_interrupts() -> None:
    """Leave Ctrl-C to the parent process, which ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _on_ray(tasks: Sequence[Task], address: str) -> _Completed:
    """Yield the index and the results of each task; a connection made by this function is closed, others are kept."""
    with connected(address, "a sweep on Ray"):
        import ray  # noqa: PLC0415 # an optional dependency

        remote = ray.remote(max_retries=2)(_run)
        pending = {remote.remote(task): i for i, task in enumerate(tasks)}
        while pending:
            ready, _ = ray.wait(list(pending))
            for reference in ready:
                yield pending.pop(reference), ray.get(reference)
