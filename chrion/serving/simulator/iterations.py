"""Simulation of a decoder that generates tokens for many requests, iteration by iteration.

The scheduler is the one that serves requests, :class:`chrion.generation.scheduling.IterationScheduler` (Algorithm 2 of
Orca); only the engine is replaced, by the costs of an iteration. Yu et al., *Orca* (OSDI 2022), sections 3 and 6.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from chrion.errors import OptionError
from chrion.generation.scheduling import Batch, IterationScheduler
from chrion.serving.simulator.decoder_scenario import DecoderScenario

Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]

#: Requests after which progress is reported, so that reports take a negligible part of the time.
_STEP = 256


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWorkload:
    """The requests, in the order of their arrival."""

    #: Times of arrival in ms.
    arrivals_ms: Floats
    #: Tokens of the prompts, and tokens to generate.
    prompts: Integers
    new: Integers


@dataclass(frozen=True, slots=True, eq=False)
class DecoderResult:
    """What a policy of batching gives. Requests that were refused have no times (NaN)."""

    policy: str
    workload: DecoderWorkload
    #: Times in ms at which requests got their first token, and at which they ended.
    first_ms: Floats
    ends_ms: Floats
    #: Requests that need more slots than there are.
    refused: int
    #: Time in ms from the first arrival to the last end; 0 if no request ended.
    took_ms: float
    iterations: int
    #: Requests of an iteration, on average.
    mean_batch: float
    #: Mean and greatest number of reserved slots; the mean is over that time.
    mean_reserved: float
    most_reserved: int

    @property
    def served(self) -> int:
        """Number of requests that ended."""
        return len(self.ends_ms) - self.refused

    @property
    def requests_per_s(self) -> float:
        """Throughput in requests per second."""
        return 1e3 * self.served / self.took_ms if self.took_ms else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        tokens = int(self.workload.new[~np.isnan(self.ends_ms)].sum())
        return 1e3 * tokens / self.took_ms if self.took_ms else 0.0

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
    """Return Poisson arrivals with prompts and outputs of uniformly distributed lengths."""
    spec = scenario.requests
    rng = np.random.default_rng(scenario.seed)
    gaps_ms = rng.exponential(1e3 / spec.rate_per_s, spec.requests)
    return DecoderWorkload(
        np.cumsum(gaps_ms),
        rng.integers(spec.prompt_least, spec.prompt_most, spec.requests, endpoint=True),
        rng.integers(spec.new_least, spec.new_most, spec.requests, endpoint=True),
    )


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
    count = len(workload.arrivals_ms)
    return tuple(
        _Run(scenario, policy, workload).result(partial(lambda before, done: progress(before + done), at * count))
        for at, policy in enumerate(scenario.policies)
    )


class _Run:
    """One policy: the scheduler, the requests, and the batches in flight."""

    def __init__(self, scenario: DecoderScenario, policy: str, workload: DecoderWorkload) -> None:
        self._iteration_ms = scenario.iteration_ms
        self._policy, self._workload = policy, workload
        batching = scenario.batching
        self._scheduler = IterationScheduler(
            batching.max_batch,
            scenario.slots,
            n_workers=batching.n_workers,
            policy=policy,
            chunk=batching.chunk,
        )
        count = len(workload.arrivals_ms)
        self._first_ms, self._ends_ms = np.full(count, np.nan), np.full(count, np.nan)
        #: Tokens of each request in the cache, and generated tokens.
        self._past, self._made = np.zeros(count, np.int64), np.zeros(count, np.int64)
        #: Time at which each worker has finished its share of the last batch.
        self._free_ms = [0.0] * batching.n_workers
        self._returns: deque[tuple[float, Batch]] = deque()
        self._refused = self._iterations = self._batched = self._most_reserved = 0
        self._now_ms = self._last_end_ms = self._reserved_ms = 0.0

    def result(self, progress: Callable[[int], None]) -> DecoderResult:
        """Run all requests."""
        arrivals_ms, done = self._workload.arrivals_ms, 0
        arrived, count = 0, len(arrivals_ms)
        while arrived < count or self._returns:
            if arrived == count or (self._returns and self._returns[0][0] <= arrivals_ms[arrived]):
                before, done = done, done + self._return()
            else:
                before, done = done, done + self._arrive(arrived)
                arrived += 1
            self._schedule()
            if done // _STEP > before // _STEP:
                progress(done)
        progress(count)
        took_ms = max(0.0, self._last_end_ms - float(arrivals_ms[0]))
        return DecoderResult(
            self._policy,
            self._workload,
            self._first_ms,
            self._ends_ms,
            self._refused,
            took_ms,
            self._iterations,
            self._batched / max(1, self._iterations),
            self._reserved_ms / took_ms if took_ms else 0.0,
            self._most_reserved,
        )

    def _arrive(self, number: int) -> int:
        """Submit a request; return 1 if it is refused."""
        self._advance(float(self._workload.arrivals_ms[number]))
        try:
            self._scheduler.submit(number, int(self._workload.prompts[number]), int(self._workload.new[number]))
        except OptionError:  # it needs more slots than there are
            self._refused += 1
            return 1
        return 0

    def _return(self) -> int:
        """Take back the earliest batch; return how many requests end."""
        now_ms, batch = self._returns.popleft()
        self._advance(now_ms)
        ended = []
        for share in batch:
            number = share.number
            if not share.active:  # it has ended
                continue
            self._past[number] += share.tokens
            if share.last:
                if not self._made[number]:
                    self._first_ms[number] = now_ms
                self._made[number] += 1
                if self._made[number] == self._workload.new[number]:
                    ended.append(number)
        completed = self._scheduler.complete(ended)
        if completed:
            self._ends_ms[completed] = self._last_end_ms = now_ms
        return len(completed)

    def _schedule(self) -> None:
        """Start batches while there are workers for them."""
        while batch := self._scheduler.select():
            self._iterations += 1
            self._batched += len(batch)
            tokens = [share.tokens for share in batch]
            past = [int(self._past[share.number]) for share in batch]
            chosen = sum(share.last for share in batch)
            self._returns.append((self._pass_on(self._iteration_ms(tokens, past, chosen)), batch))
        self._most_reserved = max(self._most_reserved, self._scheduler.reserved)

    def _pass_on(self, iteration_ms: float) -> float:
        """Return when a batch has passed all workers, each of which has an equal share of the model's layers."""
        at_ms = self._now_ms
        for worker, free_ms in enumerate(self._free_ms):
            at_ms = self._free_ms[worker] = max(at_ms, free_ms) + iteration_ms / len(self._free_ms)
        return at_ms

    def _advance(self, now_ms: float) -> None:
        """Count the reserved slots up to a time; after the last end, none is reserved."""
        self._reserved_ms += self._scheduler.reserved * (now_ms - self._now_ms)
        self._now_ms = now_ms
