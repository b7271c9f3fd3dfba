"""The number of servers that follows the number of requests, for a simulated cluster and for replicas on Ray."""

from __future__ import annotations

import math
from collections import deque
from typing import Annotated

from msgspec import Meta

from chrion.common.records import LARGEST, NonNegative, Positive, Record


class AutoscalingSpec(Record, frozen=True):
    """``[autoscaling]``: servers are switched on and off with the number of requests."""

    #: Servers that are always on.
    min_servers: Annotated[int, Meta(ge=1, le=10_000)]
    #: Requests, waiting or running, for each server that is on.
    target: Positive = 2.0
    #: Time between two decisions.
    period_s: Annotated[float, Meta(ge=0.001, le=LARGEST)] = 10.0
    #: Time from switching a server on until it receives requests; only in the simulator.
    cold_start_s: NonNegative = 60.0
    #: Time for which fewer servers must be enough before one is switched off.
    stop_after_s: NonNegative = 300.0


class Autoscaler:
    """The decisions of a cluster; see ``docs/simulation.md``.

    Args:
        spec: The rules.
        maximum: The number of all servers.
        now: The time in ms; before ``stop_after_s`` from then, no server is switched off.
    """

    def __init__(self, spec: AutoscalingSpec, maximum: int, now: float = 0.0) -> None:
        self.spec, self._maximum = spec, maximum
        #: Time and wanted servers of the decisions within ``stop_after_s``, which begin as if all had been wanted.
        self._wanted = deque([(now, maximum)])

    def decide(self, now: float, requests: float, servers: int) -> int:
        """Return the number of servers that shall be on.

        Args:
            now: The time in ms.
            requests: Requests in the cluster, waiting or running.
            servers: Servers that are on, start or have failed, and do not stop.
        """
        spec = self.spec
        wanted = min(self._maximum, max(spec.min_servers, math.ceil(requests / spec.target)))
        while self._wanted and self._wanted[0][0] <= now - spec.stop_after_s * 1000:
            self._wanted.popleft()
        self._wanted.append((now, wanted))
        return max(wanted, min(servers, max(number for _, number in self._wanted)))
