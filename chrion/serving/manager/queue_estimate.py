"""The expected start of a request that joins the queue of a device."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from chrion.serving.manager.policies import is_in_time

#: Slots of an accelerator and CPU cores.
Resources = tuple[int, int]
#: A time in ms since the start of a request, and what is released then.
Freed = tuple[float, Resources]
#: What a request takes: slots and cores when it starts, its latency in ms, its releases before its end, and what is
#: released at its end. One tuple, because each look-up costs time in every request of the simulation.
Service = tuple[int, int, float, tuple[Freed, ...], Resources]


class Release(NamedTuple):
    """GPU slots and CPU cores that are released at a time."""

    at_ms: float
    slots: int
    cores: int


def expected_releases(service: Service, start_ms: float) -> Iterator[Release]:
    """Return the releases of a request that starts at a time."""
    _, _, latency_ms, early, last = service
    for at_ms, freed in early:
        yield Release(start_ms + at_ms, *freed)
    yield Release(start_ms + latency_ms, *last)


def expected_start(
    now_ms: float,
    free: tuple[int, int],
    running: Iterable[Release],
    ahead: Iterable[tuple[Service, float]],
    needs: Resources,
) -> float:
    """Return the time at which a request starts if it joins a first-come-first-served queue now.

    The queue is simulated with expected durations: a request starts when it is at the head and its slots and cores are
    free. Without random variation the result is exact. A bound like (work ahead) / (slots) is not one: it counts work
    that runs beside the request as if it ran before it.

    Args:
        now_ms: The time.
        free: Slots and cores that are free now.
        running: The expected releases of the running requests; those in the past are expected now.
        ahead: What the requests before it take, and their deadlines, in order; those that would be late are dropped.
        needs: Slots and cores that it takes. The device has as many.

    Complexity: O(n log n) for n releases of running requests and of requests ahead.
    """
    slots, cores = free
    queue = [*ahead]
    if not queue and slots >= needs[0] and cores >= needs[1]:  # the most frequent case
        return now_ms
    queue.append(((*needs, 0.0, (), (0, 0)), float("inf")))
    events = [release if release.at_ms > now_ms else release._replace(at_ms=now_ms) for release in running]
    heapq.heapify(events)
    time_ms = now_ms
    for service, deadline_ms in queue:
        while slots < service[0] or cores < service[1]:
            release = heapq.heappop(events)
            time_ms = release.at_ms
            slots, cores = slots + release.slots, cores + release.cores
        if is_in_time(time_ms, deadline_ms, 0.0, service[2]):
            slots, cores = slots - service[0], cores - service[1]
            for release in expected_releases(service, time_ms):
                heapq.heappush(events, release)
    return time_ms
