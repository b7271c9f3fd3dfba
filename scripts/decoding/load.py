"""Requests that arrive at a Generator over time, measured as the simulation reports them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from chrion.generation import Generator, Stream
from chrion.generation.iteration import Outcome, Work
from chrion.simulator.decoder_scenario import DecoderScenario, IterationCosts
from chrion.simulator.iterations import DecoderResult, draw_requests, fit_costs

Array = np.ndarray[Any, Any]


class Recorder:
    """An engine that notes its iterations; it replaces that of a generator.

    Attributes:
        starts_s: Times at which iterations began.
        batches: New tokens, and tokens in the cache, of their requests.
    """

    def __init__(self, generator: Generator) -> None:
        self._engine = generator._engine  # noqa: SLF001 - what is measured
        self.starts_s: list[float] = []
        self.batches: list[tuple[list[int], list[int]]] = []
        generator._engine = self  # noqa: SLF001

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, batch: Sequence[Work]) -> list[Outcome]:
        """Run an iteration."""
        self.starts_s.append(time.perf_counter())
        self.batches.append(([len(work.ids) for work in batch], [work.past for work in batch]))
        return self._engine.run(batch)


def serve(model: onnx.ModelProto, scenario: DecoderScenario, policy: str) -> DecoderResult:
    """Serve the requests of a scenario at their times of arrival; prompts are random tokens."""
    workload = draw_requests(scenario)
    batching = scenario.batching
    with Generator(
        model, max_batch=batching.max_batch, kv_slots=scenario.slots, policy=policy, chunk=batching.chunk
    ) as generator:
        prompts = _prompts(generator, workload.prompts.tolist())
        generator.submit(prompts[0], 2).result()  # the first iterations of a process are slow
        before = generator.statistics()
        start_s, first_s, ends_s = asyncio.run(
            _send(generator, prompts, workload.new.tolist(), workload.arrivals_ms / 1e3)
        )
        after = generator.statistics()
    iterations = after.iterations - before.iterations
    first_ms, ends_ms = ((times - start_s) * 1e3 for times in (first_s, ends_s))
    return DecoderResult(
        policy=policy,
        workload=workload,
        first_ms=first_ms,
        ends_ms=ends_ms,
        refused=0,
        took_ms=float(ends_ms.max() - workload.arrivals_ms[0]),
        iterations=iterations,
        mean_batch=(after.iteration_requests - before.iteration_requests) / iterations,
        mean_reserved=float("nan"),
        most_reserved=0,
    )


def measure_costs(model: onnx.ModelProto, scenario: DecoderScenario) -> IterationCosts:
    """Return the costs of iterations in a generator that always has requests, with several sizes of batches.

    An iteration takes from its beginning to that of the next one, so that the choice of tokens counts, too.
    """
    workload = draw_requests(scenario)
    batches: list[tuple[list[int], list[int]]] = []
    times_ms: list[float] = []
    for size in (1, 2, 4, 8, 16, 32):
        with Generator(model, max_batch=size, kv_slots=scenario.slots) as generator:
            prompts = _prompts(generator, workload.prompts.tolist())
            generator.submit(prompts[0], 2).result()
            recorder = Recorder(generator)
            count = min(len(prompts), max(4, 2 * size))
            streams = [
                generator.submit(prompt, int(new))
                for prompt, new in zip(prompts[:count], workload.new[:count], strict=True)
            ]
            for stream in streams:
                stream.result()
        spans_ms = np.diff(recorder.starts_s) * 1e3
        batches += recorder.batches[1:-1]  # the first one began while requests were being submitted
        times_ms += spans_ms[1:].tolist()
    return fit_costs(batches, times_ms)


def _prompts(generator: Generator, lengths: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, generator.signature.vocabulary, length).tolist() for length in lengths]


async def _send(
    generator: Generator, prompts: Sequence[Sequence[int]], new: Sequence[int], arrivals_s: Array
) -> tuple[float, Array, Array]:
    """Submit requests at their times; return the time of the start, and those of first tokens and ends."""
    count = len(prompts)
    first_s, ends_s = np.full(count, np.nan), np.full(count, np.nan)

    async def read(at: int, stream: Stream) -> None:
        async for _ in stream:
            if np.isnan(first_s[at]):
                first_s[at] = time.perf_counter()
        ends_s[at] = time.perf_counter()

    start_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for at in range(count):
            await asyncio.sleep(max(0.0, start_s + float(arrivals_s[at]) - time.perf_counter()))
            tasks.create_task(read(at, generator.submit(prompts[at], new[at])))
    return start_s, first_s, ends_s
