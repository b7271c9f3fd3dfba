"""Orca's end-to-end experiment, scaled: requests that arrive at a Generator at random.

Yu et al., *Orca* (OSDI 2022), section 6.2: Poisson arrivals, prompts of U(32, 512) and outputs of U(1, 128) tokens.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from chrion.generation import Generator, Stream
from chrion.serving.simulator.decoder_costs import IterationCosts
from chrion.serving.simulator.decoder_requests import DecoderWorkload
from chrion.serving.simulator.decoder_scenario import DecoderScenario, build_decoder_scenario
from chrion.serving.simulator.scenario import ScenarioSource
from chrion.zoo.cached_decoder import LlamaDecoderSpec
from decoding.recorder import Batch, recorded

#: Decoders by the size of their weights.
SIZES = {
    "15 MB": LlamaDecoderSpec(),
    "104 MB": LlamaDecoderSpec(layers=8, hidden=512, heads=8, kv_heads=2, inner=1376, vocabulary=4096),
    "200 MB": LlamaDecoderSpec(layers=10, hidden=640, heads=10, kv_heads=2, inner=1728, vocabulary=8192),
}
_LENGTHS = {"prompt_least": 32, "prompt_most": 512, "new_least": 1, "new_most": 128}
#: Costs of iterations without and with prompts.
Costs = tuple[IterationCosts, IterationCosts]
#: Slots for all requests of any batch.
_SLOTS = 1_000_000


@dataclass(frozen=True, slots=True)
class IterationTotals:
    """Sums over the iterations of a run: their time, and what determines it, without and with prompts.

    The latter are sums of :meth:`IterationCosts.features`, so that their products with costs are times.
    """

    time_ms: float
    features: tuple[float, ...]
    prompt_features: tuple[float, ...]

    @classmethod
    def of(cls, iterations: Sequence[tuple[Batch, float]]) -> IterationTotals:
        """Return the sums over iterations."""
        sums = [np.zeros(len(IterationCosts.__struct_fields__)), np.zeros(len(IterationCosts.__struct_fields__))]
        for batch, _ in iterations:
            sums[max(batch[0]) > 1] += IterationCosts.features(*batch)
        return cls(sum(span for _, span in iterations), *(tuple(one.tolist()) for one in sums))

    def slowdown(self, costs: Costs) -> float:
        """Return the time of the iterations relative to that of costs without and with prompts; 1 without any."""
        sums = (self.features, self.prompt_features)
        expected_ms = sum(float(np.dot(one, structs.astuple(terms))) for one, terms in zip(sums, costs, strict=True))
        return self.time_ms / expected_ms if expected_ms else 1.0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What the clients of one run have seen."""

    requests_per_s: float
    median_ms_per_token: float
    iterations: IterationTotals


def scaled_lengths(scale: int) -> dict[str, int]:
    """Return the table ``[requests]`` of a scenario with Orca's lengths divided by a number."""
    return {name: max(1, length // scale) for name, length in _LENGTHS.items()}


def load_scenario(  # noqa: PLR0913, PLR0917 - what determines a run
    scale: int,
    rate_per_s: float,
    requests: int,
    max_batch: int = 1,
    costs: Costs | None = None,
    seed: int = 0,
) -> DecoderScenario:
    """Return the scenario of a run.

    Args:
        scale: Divides Orca's lengths.
        rate_per_s: The rate of arrival.
        requests: Requests.
        max_batch: The most requests of an iteration.
        costs: Costs of iterations without and with prompts.
        seed: Determines arrivals and lengths.
    """
    decoder: dict[str, Any] = {"slots": _SLOTS}
    if costs is not None:
        decoder |= {"costs": structs.asdict(costs[0]), "prompt_costs": structs.asdict(costs[1])}
    content = {
        "seed": seed,
        "decoder": decoder,
        "batching": {"max_batch": max_batch},
        "requests": {"rate_per_s": rate_per_s, "requests": requests, **scaled_lengths(scale)},
    }
    return build_decoder_scenario(ScenarioSource("load", content, Path()))


def equal_lengths(scenario: DecoderScenario) -> DecoderScenario:
    """Return a scenario whose requests all have the mean prompt and the mean output: Orca's homogeneous trace."""
    spec = scenario.requests
    prompt, new = (spec.prompt_least + spec.prompt_most) // 2, (spec.new_least + spec.new_most) // 2
    same = {"prompt_least": prompt, "prompt_most": prompt, "new_least": new, "new_most": new}
    return structs.replace(scenario, requests=structs.replace(spec, **same))


@contextlib.contextmanager
def scheduled(generator: Generator, policy: str, max_batch: int) -> Iterator[None]:
    """Set the policy and max batch of a generator for a while, so that both policies have the same engine.

    The generator has no requests before and after.
    """
    scheduler = generator._loop.scheduler  # noqa: SLF001 - what is measured
    usual = scheduler.policy, scheduler.max_batch
    scheduler.policy, scheduler.max_batch = policy, max_batch
    try:
        yield
    finally:
        scheduler.policy, scheduler.max_batch = usual


def run_load(generator: Generator, workload: DecoderWorkload) -> LoadResult:
    """Submit requests at their times of arrival, and wait for all; the generator has no other ones."""
    with recorded(generator) as recorder:
        throughput, latency = serve(generator, workload)
    return LoadResult(throughput, latency, IterationTotals.of(recorder.iterations()))


def serve(generator: Generator, workload: DecoderWorkload) -> tuple[float, float]:
    """Return the requests per second and the median latency per token."""
    count = len(workload.arrivals_ms)
    arrivals_s, outputs = (workload.arrivals_ms / 1e3).tolist(), workload.new.tolist()
    ended: dict[int, float] = {}
    began = time.perf_counter()
    streams = []
    for at, stream in enumerate(submitted(generator, workload, began)):
        stream.add_done_callback(functools.partial(_note_end, ended, at))
        streams.append(stream)
    for stream in streams:
        stream.result()
    while len(ended) < count:  # callbacks follow the end of a stream
        time.sleep(0.001)
    latencies = [(ended[at] - began - arrivals_s[at]) * 1e3 / outputs[at] for at in range(count)]
    return count / (max(ended.values()) - began - arrivals_s[0]), statistics.median(latencies)


def submitted(generator: Generator, workload: DecoderWorkload, began: float) -> Iterator[Stream]:
    """Submit requests at their times of arrival, counted from a time, and yield their streams."""
    rows = zip(*(values.tolist() for values in (workload.arrivals_ms, workload.prompts, workload.new)), strict=True)
    for arrival_ms, prompt, new in rows:
        time.sleep(max(0.0, began + arrival_ms / 1e3 - time.perf_counter()))
        yield generator.submit([1] * prompt, new, stop_tokens=())


def _note_end(ended: dict[int, float], at: int, stream: Stream) -> None:
    """Note the time at which a stream has ended."""
    del stream
    ended[at] = time.perf_counter()
