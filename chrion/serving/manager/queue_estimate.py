"""The expected start of a request that joins the queue of a device."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from chrion.serving.manager.policies import rounding_ms

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


class QueuedRequest(NamedTuple):
    """A request that is ready to run."""

    #: GPU slots and CPU cores that it takes when it starts.
    slots: int
    cores: int
    #: Its releases, with times since its start.
    releases: tuple[Release, ...]
    #: The time at or before which it must start to end in time; it is dropped if its turn comes later.
    latest_start_ms: float


def expected_releases(service: Service, start_ms: float = 0.0) -> Iterator[Release]:
    """Return the releases of a request that starts at a time."""
    _, _, latency_ms, early, last = service
    for at_ms, freed in early:
        yield Release(start_ms + at_ms, *freed)
    yield Release(start_ms + latency_ms, *last)


def queued_request(service: Service, deadline_ms: float) -> QueuedRequest:
    """Return a request that is dropped if it cannot end by its deadline when its turn comes."""
    latest_ms = deadline_ms - service[2]
    return QueuedRequest(*service[:2], tuple(expected_releases(service)), latest_ms + rounding_ms(latest_ms))


def expected_start(
    now_ms: float,
    free: tuple[int, int],
    running: Iterable[Release],
    ahead: Iterable[QueuedRequest],
    needs: tuple[int, int],
) -> float:
    """Return the time at which a request starts if it joins a first-come-first-served queue now.

    The queue is simulated with expected durations: a request starts when it is at the head and its slots and cores are
    free. Without random variation the result is exact. A bound like (work ahead) / (slots) is not one: it counts work
    that runs beside the request as if it ran before it.

    Args:
        now_ms: The time.
        free: Slots and cores that are free now.
        running: The expected releases of the running requests; those in the past are expected now.
        ahead: The requests before it, in order.
        needs: Slots and cores that it takes. The device has as many.

    Complexity: O(n log n) for n releases of running requests and of requests ahead.
    """
    slots, cores = free
    queue = [*ahead]
    if not queue and slots >= needs[0] and cores >= needs[1]:  # the most frequent case
        return now_ms
    queue.append(QueuedRequest(*needs, (), float("inf")))
    events = [release if release.at_ms > now_ms else release._replace(at_ms=now_ms) for release in running]
    heapq.heapify(events)
    time_ms = now_ms
    for request in queue:
        while slots < request.slots or cores < request.cores:
            release = heapq.heappop(events)
            time_ms = release.at_ms
            slots, cores = slots + release.slots, cores + release.cores
        if time_ms <= request.latest_start_ms:
            slots, cores = slots - request.slots, cores - request.cores
            for release in request.releases:
                heapq.heappush(events, release._replace(at_ms=time_ms + release.at_ms))
    return time_ms
