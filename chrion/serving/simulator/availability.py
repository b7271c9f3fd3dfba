"""Servers that come and go: failures with repairs, of one server or of several together, and autoscaling.

A server receives requests while it is on, is not starting, not draining, and has not failed. With it goes the content
of its memories: after a start or a repair it holds the pinned models alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappush

import numpy as np

from chrion.serving.manager.policies import Route
from chrion.serving.manager.records import MAX_ATTEMPTS
from chrion.serving.manager.scaling import Autoscaler, AutoscalingSpec
from chrion.serving.simulator.cluster_state import ClusterState, Job
from chrion.serving.simulator.server import SimulatedHost
from chrion.serving.simulator.settings import DomainSpec

_HOUR_MS = 3_600_000.0
_NAN = float("nan")


@dataclass(frozen=True, slots=True, eq=False)
class FailureProcess:
    """Failures and repairs, one after another, of servers that fail together, or of one."""

    hosts: Sequence[SimulatedHost]
    mtbf_h: float
    mttr_s: float
    random: np.random.Generator


class Availability:
    """The servers that receive requests, over time.

    Args:
        hosts: The servers.
        cluster: Their shared state.
        eligible: The GPUs that can serve each model, which this object changes.
        route: The routing policy.
        autoscaling: Its rules; None if all servers are always on.
        domains: Groups of servers that fail together.
        seed: The seed of failures and of the routing after them.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a cluster
        self,
        hosts: Sequence[SimulatedHost],
        cluster: ClusterState,
        eligible: list[Sequence[int]],
        route: Route,
        autoscaling: AutoscalingSpec | None,
        domains: Sequence[DomainSpec],
        seed: np.random.SeedSequence,
    ) -> None:
        self._hosts = hosts
        self._cluster = cluster
        self._eligible, self._all_eligible = eligible, list(eligible)
        self._policy = route
        self._spec = autoscaling
        self._gpus = [gpu for host in hosts for gpu in host.devices]
        streams = [np.random.default_rng(child) for child in seed.spawn(len(hosts) + 1)]
        self._draws = streams.pop()
        self._processes = [
            FailureProcess((host,), host.spec.mtbf_h, host.spec.mttr_s, stream)
            for host, stream in zip(hosts, streams, strict=True)
            if host.spec.mtbf_h
        ]
        for spec in domains:
            groups = [hosts[first : first + spec.size] for first in range(0, len(hosts), spec.size)]
            for own, child in zip(groups, seed.spawn(len(groups)), strict=True):
                stream = np.random.default_rng(child)
                self._processes.append(FailureProcess(own, spec.mtbf_h, spec.mttr_s, stream))
        #: Failures of which each server waits for the repair.
        self._failed: Counter[int] = Counter()
        self._draining: set[int] = set()
        #: The GPUs that receive requests.
        self._available: set[int] = set()
        self._starting: set[int] = set()
        #: Servers that failed with each request.
        self._lost: Counter[int] = Counter()
        #: True while requests arrive.
        self.open = True
        #: Times in ms, and the number of servers that are on and of those that receive requests from then on.
        self.changes: list[tuple[float, int, int]] = []

    def begin(self) -> None:
        """Switch off the servers that are not needed at first, and schedule failures and decisions."""
        for process in self._processes:
            self._schedule_failure(0.0, process)
        if self._spec:
            for host in self._hosts[self._spec.min_servers :]:
                host.on = False
            self._at(self._spec.period_s * 1000, self._decide, Autoscaler(self._spec, len(self._hosts)))
        for host in self._hosts:
            for gpu in host.devices:
                gpu.on_left = self._note_left
        self._refresh(0.0)

    def route(
        self,
        outstanding: Sequence[int],
        eligible: Sequence[int],
        homes: Sequence[int],
        draw: float,
        free: Sequence[float],
    ) -> int:
        """Return the GPU of a request, or the number of GPUs if none is available."""
        if not eligible:
            return len(self._gpus)
        return self._policy(outstanding, eligible, [i for i in homes if i in self._available], draw, free)

    def on_ms(self, host: SimulatedHost, end_ms: float) -> float:
        """Return the time for which a server was on."""
        return host.on_ms + (end_ms - host.on_since_ms if host.on else 0.0)

    def refuse(self, now: float, job: Job) -> None:
        """Record a request for which there is no server."""
        number, model, arrival, _, cold = job
        self._cluster.record((number, model, len(self._gpus), arrival, _NAN, now, cold, model))

    def _at(self, time_ms: float, action: object, payload: object) -> None:
        heappush(self._cluster.events, (time_ms, next(self._cluster.sequence), action, payload))  # type: ignore[misc] # a handler

    def _goes_on(self) -> bool:
        return self.open or any(self._cluster.outstanding)

    def _schedule_failure(self, now: float, process: FailureProcess) -> None:
        up_ms = float(process.random.exponential(process.mtbf_h * _HOUR_MS))
        self._at(now + up_ms, self._fail, process)

    def _fail(self, now: float, process: FailureProcess) -> None:
        if not self._goes_on():
            return
        down_ms = float(process.random.exponential(process.mttr_s * 1000))
        self._at(now + down_ms, self._repair, process)
        self._failed.update(host.index for host in process.hosts)
        stopped = [host for host in process.hosts if self._failed[host.index] == 1]
        for host in stopped:
            self._log(now, "fail", host)
        waiting = [job for host in stopped for gpu in host.devices for job in gpu.reset(now)]
        self._refresh(now)
        for job in sorted(waiting, key=lambda job: job[0]):
            self._send_again(now, job)
        self._note_left(now)

    def _send_again(self, now: float, job: Job) -> None:
        number, model, *_ = job
        self._lost[number] += 1
        shared, draw = self._cluster, float(self._draws.random())
        target = self.route(shared.outstanding, self._eligible[model], shared.homes[model], draw, shared.free)
        if target == len(self._gpus) or self._lost[number] == MAX_ATTEMPTS:
            self.refuse(now, job)
        else:
            self._gpus[target].offer(now, job)

    def _repair(self, now: float, process: FailureProcess) -> None:
        self._failed.subtract(host.index for host in process.hosts)
        self._failed = +self._failed
        if self._goes_on():
            self._schedule_failure(now, process)
        for host in process.hosts:
            if host.index not in self._failed:
                self._log(now, "repair", host)
                if host.on:
                    self._load_pinned(now, host)
        self._refresh(now)

    def _load_pinned(self, now: float, host: SimulatedHost) -> None:
        for model, pinned in enumerate(self._cluster.policies.pinned):
            if pinned:
                for gpu in host.devices:
                    gpu.preload(model, now=now)

    def _decide(self, now: float, autoscaler: Autoscaler) -> None:
        """Switch servers on or off; see ``docs/simulation.md``."""
        spec = autoscaler.spec
        if self._goes_on():
            self._at(now + spec.period_s * 1000, self._decide, autoscaler)
        present = [host for host in self._hosts if host.on and host.index not in self._draining]
        wanted = autoscaler.decide(now, sum(self._cluster.outstanding), len(present))
        if wanted > len(present):
            self._add(now, wanted - len(present), spec.cold_start_s * 1000)
        elif wanted < len(present):
            for host in present[wanted:]:
                self._draining.add(host.index)
                self._log(now, "drain", host)
            self._refresh(now)
            self._note_left(now)

    def _add(self, now: float, number: int, start_ms: float) -> None:
        """Let servers that drain continue, and then switch on others, in the order of their numbers."""
        resumed = [host for host in self._hosts if host.index in self._draining][:number]
        self._draining -= {host.index for host in resumed}
        for host in [host for host in self._hosts if not host.on][: number - len(resumed)]:
            host.on, host.on_since_ms = True, now
            self._starting.add(host.index)
            self._at(now + start_ms, self._started, (host, now))
            self._log(now, "start", host)
        self._refresh(now)

    def _started(self, now: float, begun: tuple[SimulatedHost, float]) -> None:
        host, since_ms = begun
        if host.on and host.on_since_ms == since_ms:
            self._starting.discard(host.index)
            if host.index not in self._failed:
                self._load_pinned(now, host)
            self._log(now, "started", host)
            self._refresh(now)

    def _note_left(self, now: float) -> None:
        """Switch off draining servers whose requests have all left."""
        for host in [self._hosts[i] for i in sorted(self._draining)]:
            if not any(self._cluster.outstanding[gpu.index] for gpu in host.devices):
                self._draining.discard(host.index)
                self._starting.discard(host.index)
                for gpu in host.devices:
                    gpu.reset(now)
                host.on_ms += now - host.on_since_ms
                host.on = False
                self._log(now, "off", host)
                self._note_change(now)

    def _refresh(self, now: float) -> None:
        """Update the servers that receive requests."""
        gone = self._failed.keys() | self._draining | self._starting
        for host in self._hosts:
            host.available = host.on and host.index not in gone
        self._available = {gpu.index for gpu in self._gpus if gpu.host.available}
        self._note_change(now)
        known: dict[int, Sequence[int]] = {}
        for every in self._all_eligible:
            if id(every) not in known:
                known[id(every)] = [i for i in every if i in self._available]
        self._eligible[:] = [known[id(every)] for every in self._all_eligible]

    def _note_change(self, now: float) -> None:
        on, available = (sum(getattr(host, name) for host in self._hosts) for name in ("on", "available"))
        self.changes.append((now, on, available))

    def _log(self, now: float, event: str, host: SimulatedHost) -> None:
        if self._cluster.journal:
            self._cluster.journal(now, event, host.index, 0)
