"""A grid of scenarios, point by point in parallel processes or on a Ray cluster."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from chrion.errors import OptionError
from chrion.simulator.results import PatternResult, summary
from chrion.simulator.run import simulate
from chrion.simulator.scenario import ScenarioSource

#: How long the machine of a Ray address may take to answer.
_CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class SweepPoint:
    """One point of the grid."""

    #: The swept values, by key.
    values: Mapping[str, Any]
    models: int
    results: tuple[PatternResult, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
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
    """Simulate a scenario at every point; all are checked before the first runs.

    Args:
        source: The scenario.
        points: The values to set at each.
        workers: Processes; one runs here without any.
        ray_address: A Ray cluster's address, ``auto`` for the one this machine belongs to, ``local`` for a new one on
            this machine; None uses processes.
        progress: Hears how many points are done.

    Returns:
        The points, in the order given.

    Raises:
        InputError: A point is no scenario that can run.
        OptionError: Ray is wanted but not installed, or not reachable.
    """
    tasks = [source.changed(values) for values in points]
    sizes = [len(task.build().models) for task in tasks]
    if ray_address is not None:
        found = _on_ray(tasks, ray_address)
    elif workers > 1 and len(tasks) > 1:
        found = _in_processes(tasks, min(workers, len(tasks)))
    else:
        found = ((i, _run(task)) for i, task in enumerate(tasks))
    done: dict[int, tuple[PatternResult, ...]] = {}
    for i, results in found:
        done[i] = results
        progress(len(done))
    return [SweepPoint(values, sizes[i], done[i]) for i, values in enumerate(points)]


def _run(task: ScenarioSource) -> tuple[PatternResult, ...]:
    return simulate(task.build())


def _in_processes(tasks: Sequence[ScenarioSource], workers: int) -> Iterator[tuple[int, tuple[PatternResult, ...]]]:
    # A fresh interpreter each: threads of the parent, if there are any, make a fork unsafe.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_run, task): i for i, task in enumerate(tasks)}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _on_ray(tasks: Sequence[ScenarioSource], address: str) -> Iterator[tuple[int, tuple[PatternResult, ...]]]:
    """Leave the cluster as it was found: a connection made here is closed here, nothing else is stopped."""
    try:
        import ray  # noqa: PLC0415 # an extra
    except ImportError as error:
        raise OptionError("a sweep on Ray needs the package ray", hint="pip install 'chrion[ray]'") from error
    mine = not ray.is_initialized()
    if mine:
        try:
            _check_reachable(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError) as error:
            raise OptionError(f"--ray {address}: {error}") from error
    try:
        remote = ray.remote(max_retries=2)(_run)
        pending = {remote.remote(task): i for i, task in enumerate(tasks)}
        while pending:
            ready, _ = ray.wait(list(pending))
            for reference in ready:
                yield pending.pop(reference), ray.get(reference)
    finally:
        if mine:
            ray.shutdown()


def _check_reachable(address: str) -> None:
    """Fail at once where nobody listens at ``host:port``; Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and "/" not in address:
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
