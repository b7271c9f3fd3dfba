"""Simulation of decoders that generate tokens for many requests, iteration by iteration.

The scheduler of a replica is the one that serves requests, :class:`chrion.generation.scheduling.IterationScheduler`
(Algorithm 2 of Orca); only the engine is replaced, by the costs of an iteration. Yu et al., *Orca* (OSDI 2022),
sections 3 and 6. With keys and values in blocks it is :class:`chrion.serving.simulator.kv_blocks.BlockScheduler`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count

import numpy as np

from chrion.errors import OptionError
from chrion.generation.scheduling import Batch, IterationScheduler
from chrion.serving.manager.policies import route_least_loaded, route_random, route_resident_first
from chrion.serving.simulator.decoder_requests import DecoderWorkload, draw_workload
from chrion.serving.simulator.decoder_scenario import DecoderScenario, ObjectivesSpec
from chrion.serving.simulator.histograms import BINS, Counts, Floats, bin_index
from chrion.serving.simulator.kv_blocks import BlockScheduler

#: Requests after which progress is reported, so that reports take a negligible part of the time.
_STEP = 256
#: Times between tokens that are kept before they are counted.
_BUFFERED = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class DecoderResult:
    """What a policy of batching gives. Requests that were refused have no times (NaN)."""

    policy: str
    workload: DecoderWorkload
    objectives: ObjectivesSpec
    #: Times in ms at which requests got their first token, and at which they ended.
    first_ms: Floats
    ends_ms: Floats
    #: The replica of each request, -1 if it was refused, and how often it was preempted.
    replicas: Counts
    preempted: Counts
    #: Histogram of the times between two tokens of a request; see :mod:`chrion.serving.simulator.histograms`.
    gaps: Counts
    #: Tokens of prompts that were not processed, because blocks of their prefixes were kept.
    reused: int
    #: Requests that need more slots than there are.
    refused: int
    #: Time in ms from the first arrival to the last end; 0 if no request ended.
    took_ms: float
    iterations: int
    #: Requests of an iteration, on average.
    mean_batch: float
    #: Mean and greatest number of reserved slots of a replica; the mean is over that time.
    mean_reserved: float
    most_reserved: int
    #: The share of that time in which workers run iterations.
    utilisation: float
    #: The greatest number of requests at a replica, waiting or running.
    most_requests: int

    @property
    def served(self) -> int:
        """Number of requests that ended."""
        return len(self.ends_ms) - self.refused

    @property
    def requests_per_s(self) -> float:
        """Throughput in requests per second."""
        return self.per_s(self.served)

    def per_s(self, number: int) -> float:
        """Return a number of requests or tokens per second of the run."""
        return 1e3 * number / self.took_ms if self.took_ms else 0.0

    @property
    def met(self) -> int:
        """Number of requests that met all objectives."""
        slo = self.objectives
        first_ms = self.first_ms - self.workload.arrivals_ms
        between_ms = (self.ends_ms - self.first_ms) / np.maximum(self.workload.new - 1, 1)
        met = ~np.isnan(self.ends_ms)
        if slo.first_token_ms:
            met &= first_ms <= slo.first_token_ms
        if slo.between_tokens_ms:
            met &= (between_ms <= slo.between_tokens_ms) | (self.workload.new == 1)
        return int(met.sum())

    @property
    def normalised_ms(self) -> Floats:
        """Latency of each request that ended, divided by its generated tokens (Orca, section 6.2), in ms."""
        spans = (self.ends_ms - self.workload.arrivals_ms) / self.workload.new
        return spans[~np.isnan(spans)]

    @property
    def first_token_ms(self) -> Floats:
        """Time from the arrival of each request that ended to its first token, in ms."""
        spans = self.first_ms - self.workload.arrivals_ms
        return spans[~np.isnan(spans)]

    @property
    def between_tokens_ms(self) -> Floats:
        """Mean time between two tokens of each request that generated two or more, in ms."""
        several = self.workload.new > 1
        spans = (self.ends_ms - self.first_ms)[several] / (self.workload.new[several] - 1)
        return spans[~np.isnan(spans)]


def draw_requests(scenario: DecoderScenario) -> DecoderWorkload:
    """Return the requests that a scenario describes.

    Raises:
        ScenarioError: No request of a trace is left at its rate.
    """
    return draw_workload(scenario.requests, scenario.seed, scenario.folder)


def simulate_decoder(
    scenario: DecoderScenario,
    progress: Callable[[int], None] = lambda _: None,
    *,
    workload: DecoderWorkload | None = None,
) -> tuple[DecoderResult, ...]:
    """Simulate every policy of a scenario with the same requests.

    Args:
        scenario: The scenario.
        progress: Called repeatedly with the number of requests that have ended or were refused, over all policies.
        workload: The requests; by default, those that the scenario describes are drawn.
    """
    workload = workload or draw_requests(scenario)
    number = len(workload.arrivals_ms)
    return tuple(
        _Run(scenario, policy, workload).result(partial(lambda before, done: progress(before + done), at * number))
        for at, policy in enumerate(scenario.policies)
    )


class _Replica:
    """A decoder: its scheduler, and its workers."""

    def __init__(self, scenario: DecoderScenario, policy: str) -> None:
        batching, slots = scenario.batching, scenario.slots
        self.blocks = (
            BlockScheduler(batching.max_batch, slots, block=batching.block, chunk=batching.chunk)
            if batching.block
            else None
        )
        self.scheduler: IterationScheduler = self.blocks or IterationScheduler(
            batching.max_batch, slots, n_workers=batching.n_workers, policy=policy, chunk=batching.chunk
        )
        #: Time at which each worker has finished its share of the last batch.
        self._free_ms = [0.0] * batching.n_workers
        self.most_reserved = 0

    def pass_on(self, now_ms: float, iteration_ms: float) -> float:
        """Return when a batch has passed all workers, each of which has an equal share of the model's layers."""
        at_ms = now_ms
        for worker, free_ms in enumerate(self._free_ms):
            at_ms = self._free_ms[worker] = max(at_ms, free_ms) + iteration_ms / len(self._free_ms)
        return at_ms


class _Router:
    """The choice of a replica for each request, by the routing policies of servers."""

    def __init__(self, scenario: DecoderScenario, workload: DecoderWorkload, replicas: list[_Replica]) -> None:
        self._routing, self._replicas = scenario.replicas.routing, replicas
        #: Requests at each replica, waiting or running.
        self.outstanding = [0] * len(replicas)
        self._all = range(len(replicas))
        groups = {"session": workload.sessions, "prefix": workload.prefixes}.get(self._routing)
        self._groups = None if groups is None else groups.tolist()
        #: The replica of each session.
        self._homes: dict[int, int] = {}
        if self._routing == "random":
            rng = np.random.default_rng([scenario.seed, 1])
            self._draws = rng.random(len(workload.arrivals_ms)).tolist()

    def choose(self, number: int) -> int:
        """Return the replica of a request."""
        if len(self._replicas) == 1:
            return 0
        if self._routing == "random":
            return route_random(self.outstanding, self._all, (), self._draws[number])
        group = -1 if self._groups is None else self._groups[number]
        if group < 0:
            return route_least_loaded(self.outstanding, self._all, (), 0.0)
        if self._routing == "session":
            if group not in self._homes:
                self._homes[group] = route_least_loaded(self.outstanding, self._all, (), 0.0)
            return self._homes[group]
        homes = [at for at, replica in enumerate(self._replicas) if replica.blocks and replica.blocks.keeps(group)]
        return route_resident_first(self.outstanding, self._all, homes, 0.0)


class _Run:
    """One policy: the replicas, the requests, and the batches in flight."""

    def __init__(self, scenario: DecoderScenario, policy: str, workload: DecoderWorkload) -> None:
        self._scenario, self._policy, self._workload = scenario, policy, workload
        self._replicas = [_Replica(scenario, policy) for _ in range(scenario.replicas.count)]
        self._router = _Router(scenario, workload, self._replicas)
        number = len(workload.arrivals_ms)
        self._first_ms, self._ends_ms = np.full(number, np.nan), np.full(number, np.nan)
        self._chosen = np.full(number, -1)
        #: Tokens that each request has to get, and the time of its last one, -1 before the first.
        self._left, self._last_ms = workload.new.tolist(), [-1.0] * number
        self._gaps, self._gap_counts = array("d"), np.zeros(BINS, np.int64)
        #: When batches return, their replica, a number that decides ties, and the batch.
        self._returns: list[tuple[float, int, int, Batch]] = []
        self._numbers = count()
        self._refused = self._iterations = self._batched = self._reserved = self._most_requests = 0
        self._now_ms = self._last_end_ms = self._reserved_ms = self._busy_ms = 0.0

    def result(self, progress: Callable[[int], None]) -> DecoderResult:
        """Run all requests."""
        arrivals_ms, done = self._workload.arrivals_ms.tolist(), 0
        arrived, number = 0, len(arrivals_ms)
        while arrived < number or self._returns:
            before = done
            if arrived == number or (self._returns and self._returns[0][0] <= arrivals_ms[arrived]):
                done += self._return()
            else:
                done += self._arrive(arrived, arrivals_ms[arrived])
                arrived += 1
            if done // _STEP > before // _STEP:
                progress(done)
        progress(number)
        self._count_gaps()
        took_ms = max(0.0, self._last_end_ms - arrivals_ms[0])
        workers = len(self._replicas) * self._scenario.batching.n_workers
        preempted, blocks = np.zeros(number, np.int64), [one.blocks for one in self._replicas if one.blocks]
        for one in blocks:
            preempted[list(one.preempted)] = list(one.preempted.values())
        return DecoderResult(
            self._policy,
            self._workload,
            self._scenario.slo,
            self._first_ms,
            self._ends_ms,
            self._chosen,
            preempted,
            self._gap_counts,
            sum(one.reused for one in blocks),
            self._refused,
            took_ms,
            self._iterations,
            self._batched / max(1, self._iterations),
            self._reserved_ms / len(self._replicas) / took_ms if took_ms else 0.0,
            max(replica.most_reserved for replica in self._replicas),
            self._busy_ms / workers / took_ms if took_ms else 0.0,
            self._most_requests,
        )

    def _arrive(self, number: int, now_ms: float) -> int:
        """Submit a request; return 1 if it is refused."""
        self._advance(now_ms)
        workload, at = self._workload, self._router.choose(number)
        replica = self._replicas[at]
        try:
            replica.scheduler.submit(number, int(workload.prompts[number]), int(workload.new[number]))
        except OptionError:  # it needs more slots than there are
            self._refused += 1
            return 1
        if replica.blocks and workload.prefixes is not None and workload.prefix_tokens is not None:
            prefix, tokens = int(workload.prefixes[number]), int(workload.prefix_tokens[number])
            if prefix >= 0:
                replica.blocks.set_prefix(number, prefix, tokens)
        self._chosen[number] = at
        self._router.outstanding[at] += 1
        self._most_requests = max(self._most_requests, self._router.outstanding[at])
        self._schedule(at)
        return 0

    def _return(self) -> int:
        """Take back the earliest batch; return how many requests end."""
        now_ms, at, _, batch = heappop(self._returns)
        self._advance(now_ms)
        scheduler = self._replicas[at].scheduler
        before, ended = scheduler.reserved, []
        for share in batch:
            if share.active and share.last:
                self._get_token(share.number, now_ms)
                if not self._left[share.number]:
                    ended.append(share.number)
        completed = scheduler.complete(ended)
        if completed:
            self._ends_ms[completed] = self._last_end_ms = now_ms
            self._router.outstanding[at] -= len(completed)
        self._reserved += scheduler.reserved - before
        self._schedule(at)
        return len(completed)

    def _get_token(self, number: int, now_ms: float) -> None:
        """Give a request a token."""
        self._left[number] -= 1
        last_ms = self._last_ms[number]
        if last_ms >= 0.0:
            self._gaps.append(now_ms - last_ms)
            if len(self._gaps) == _BUFFERED:
                self._count_gaps()
        else:
            self._first_ms[number] = now_ms
        self._last_ms[number] = now_ms

    def _schedule(self, at: int) -> None:
        """Start batches of a replica while there are workers for them."""
        replica = self._replicas[at]
        scheduler = replica.scheduler
        before, pool = scheduler.reserved, scheduler.pool
        while batch := scheduler.select():
            self._iterations += 1
            self._batched += len(batch)
            tokens = [share.tokens for share in batch]
            past = [pool[share.number].past for share in batch]
            iteration_ms = self._scenario.iteration_ms(tokens, past, sum(share.last for share in batch))
            self._busy_ms += iteration_ms
            entry = (replica.pass_on(self._now_ms, iteration_ms), at, next(self._numbers), batch)
            heappush(self._returns, entry)
        self._reserved += scheduler.reserved - before
        replica.most_reserved = max(replica.most_reserved, scheduler.reserved)

    def _count_gaps(self) -> None:
        self._gap_counts += np.bincount(bin_index(np.array(self._gaps)), minlength=BINS)
        self._gaps = array("d")

    def _advance(self, now_ms: float) -> None:
        """Count the reserved slots up to a time; after the last end, none is reserved."""
        self._reserved_ms += self._reserved * (now_ms - self._now_ms)
        self._now_ms = now_ms
