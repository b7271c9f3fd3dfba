"""Sweeps and replications: a scenario simulated at each point of a grid, in parallel processes or on a Ray cluster."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from typing import Any, TypeVar

from chrion.common.wrong_values import wrong_value
from chrion.serving.ray_cluster import connected
from chrion.serving.simulator import confidence
from chrion.serving.simulator.confidence import Interval
from chrion.serving.simulator.results import COST, METRICS, PatternResult, summary
from chrion.serving.simulator.run import simulate
from chrion.serving.simulator.scenario import Scenario, ScenarioSource

REPLICATIONS_SCHEMA = "chrion.simulation-replications/1"

#: Time limit in seconds for the end of a process that has been told to end (a choice, not measured).
_END_TIMEOUT_S = 5.0
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


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
    builds = [source.changed(values).build for values in points]
    sizes = [len(build().models) for build in builds]
    results = run_tasks(simulate_built, builds, workers=workers, ray_address=ray_address, progress=progress)
    return [SweepPoint(*of_point) for of_point in zip(points, sizes, results, strict=True)]


def seeds(first: int, number: int) -> list[dict[str, int]]:
    """Return the points of a sweep over seeds.

    Raises:
        OptionError: There are fewer than two replications, from which no interval follows.
    """
    if number < 2:
        raise wrong_value("--replications", "2 or more", number)
    return [{"seed": first + i} for i in range(number)]


def intervals(runs: Sequence[tuple[PatternResult, ...]]) -> dict[str, dict[str, Interval]]:
    """Return the interval of each figure by pattern and name: ``METRICS``, and the cost of an hour if there is one."""
    figures = dict(METRICS)
    if any(result.usage.cost for run in runs for result in run):
        figures[COST] = lambda result: result.cost_per_hour
    return confidence.intervals([result.pattern for result in runs[0]], runs, figures)


def run_tasks(
    run: Callable[[_Task], _Result],
    tasks: Sequence[_Task],
    *,
    workers: int,
    ray_address: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[_Result]:
    """Run a function for each task and return its results in the same order; see :func:`run_sweep`."""
    if ray_address is not None:
        completed = _on_ray(run, tasks, ray_address)
    elif workers > 1 and len(tasks) > 1:
        completed = _in_processes(run, tasks, min(workers, len(tasks)))
    else:
        completed = ((i, run(task)) for i, task in enumerate(tasks))
    done: dict[int, _Result] = {}
    with closing(completed):  # ends processes also if ``progress`` raises an exception
        for i, results in completed:
            done[i] = results
            progress(len(done))
    return [done[i] for i in range(len(tasks))]


def simulate_built(build: Callable[[], Scenario]) -> tuple[PatternResult, ...]:
    """Build and simulate a scenario."""
    return simulate(build())


def _in_processes(
    run: Callable[[_Task], _Result], tasks: Sequence[_Task], workers: int
) -> Generator[tuple[int, _Result], None, None]:
    with worker_pool(workers) as pool:
        futures = {pool.submit(run, task): i for i, task in enumerate(tasks)}
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


def _on_ray(
    run: Callable[[_Task], _Result], tasks: Sequence[_Task], address: str
) -> Generator[tuple[int, _Result], None, None]:
    """Yield the index and the results of each task; a connection made by this function is closed, others are kept."""
    with connected(address, "a sweep on Ray"):
        import ray  # noqa: PLC0415 # an optional dependency

        remote = ray.remote(max_retries=2)(run)
        pending = {remote.remote(task): i for i, task in enumerate(tasks)}
        while pending:
            ready, _ = ray.wait(list(pending))
            for reference in ready:
                yield pending.pop(reference), ray.get(reference)
