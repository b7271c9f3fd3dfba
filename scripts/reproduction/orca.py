"""Orca's end-to-end experiment (section 6.2 of the OSDI paper, 4.5.2 of the thesis), also with equal requests.

Requests arrive at random, with prompts of 32 to 512 and outputs of 1 to 128 tokens, or all with the means of both.
Iteration-level scheduling is compared with FasterTransformer's fixed batches by the throughput at which the median
latency per token is twice its minimum. It is simulated for a GPU from its datasheet, or measured on a
Generator on this machine with a quarter of the lengths: both policies in turn, each at ascending rates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from decoding.code_version import here
from decoding.gpu_estimate import DIGITS, TITLE, estimated_points
from decoding.load import SIZES, equal_lengths, load_scenario, run_load, scheduled
from decoding.orca_experiment import LoadPoint, table_rows

import chrion
from chrion import Generator
from chrion.generation.scheduling import POLICIES
from chrion.serving.simulator.iterations import draw_requests
from chrion.zoo.cached_decoder import build_llama_decoder
from reproduction.results import Tables

#: The traces, and whether their requests are equal.
TRACES = {"random": False, "equal": True}
BATCHES = (1, 8, 32)
#: Of a measurement: what lengths are divided by, requests of a run, the ratio of two rates, and the latency relative to
#: the least one at which a curve ends.
SCALE, REQUESTS, STEP, LAST_FACTOR = 4, 60, 1.5, 3.0
#: The first rate relative to that of requests one after another.
FIRST_LOAD = 0.2
#: A rate, in requests per second, at which all requests arrive at once.
NO_WAIT = 1e6


def orca_simulated() -> Tables:
    """Return throughputs at equal latencies on a GPU, simulated."""
    return {"orca simulated": _rows({t: estimated_points(homogeneous=equal) for t, equal in TRACES.items()}, TITLE)}


def orca_measured(size: str, threads: int, seeds: int) -> Tables:
    """Return throughputs at equal latencies of a Generator on this machine.

    Args:
        size: The decoder, one of :data:`SIZES`.
        threads: Its threads.
        seeds: Repetitions with other requests, whose medians count.
    """
    points: dict[str, list[LoadPoint]] = {trace: [] for trace in TRACES}
    with Generator(chrion.load(build_llama_decoder(SIZES[size])), threads=threads) as generator:
        measure(generator, size, "iteration", 1, NO_WAIT, 0, equal=True)  # a warm-up
        for seed, (trace, equal), batch in itertools.product(range(seeds), TRACES.items(), BATCHES):
            points[trace] += measure_curves(generator, size, batch, seed, equal=equal)
    return {"orca measured": _rows(points, f"decoder of {size}, {here()}")}


def measure_curves(generator: Generator, size: str, batch: int, seed: int, *, equal: bool) -> list[LoadPoint]:
    """Return the points of both policies with one max batch, at rates that rise until both are slow.

    Args:
        generator: A generator without requests.
        size: The decoder.
        batch: The most requests of an iteration.
        seed: Determines the requests.
        equal: All requests have the mean lengths.
    """
    alone = measure(generator, size, "iteration", 1, NO_WAIT, seed, equal=equal).requests_per_s
    found: list[LoadPoint] = []
    unfinished = list(POLICIES)
    rate, least = FIRST_LOAD * alone, math.inf
    while unfinished:
        for policy in list(unfinished):
            point = measure(generator, size, policy, batch, rate, seed, equal=equal)
            found.append(point)
            least = min(least, point.ms_per_token)
            if point.ms_per_token > LAST_FACTOR * least or point.requests_per_s < rate / STEP**2:
                unfinished.remove(policy)
        unfinished.reverse()  # neither policy is always the first one
        rate *= STEP
    return found


def measure(  # noqa: PLR0913, PLR0917 - what determines a run
    generator: Generator, size: str, policy: str, batch: int, rate: float, seed: int, *, equal: bool
) -> LoadPoint:
    """Return what the clients of one run see."""
    scenario = load_scenario(SCALE, rate, REQUESTS, batch, seed=seed)
    workload = draw_requests(equal_lengths(scenario) if equal else scenario)
    with scheduled(generator, policy, batch):
        found = run_load(generator, workload)
    figures = found.requests_per_s, found.median_ms_per_token
    print(f"{size}, {policy}, max batch {batch}, {rate:.3g}/s: {figures[0]:.1f}/s, {figures[1]:.2f} ms", flush=True)
    return LoadPoint(size, SCALE, policy, batch, rate, rate, REQUESTS, seed, *figures)


def _rows(traces: Mapping[str, Sequence[LoadPoint]], title: str) -> list[list[str]]:
    """Return the table of several traces: both throughputs and their ratio, by max batch."""
    rows = [[f"lengths ({title})", "ms per token", *(f"max batch {batch}" for batch in BATCHES), "best"]]
    for trace, runs in traces.items():
        # The rows of the first latency come first: twice the minimum, at which the paper compares.
        found = table_rows(runs, significant=DIGITS)[1:][: len(rows[0]) - 2]
        cells = [f"{ours}/{theirs}={ratio}" for _, _, _, ours, theirs, ratio, *_ in found]
        rows.append([trace, found[0][1].removesuffix(" ms"), *cells])
    return rows
