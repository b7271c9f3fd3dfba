"""Orca's experiment on a GPU, estimated: the simulation with the figures of a datasheet."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from decoder_budget import DECODERS, GB, ITEM

from chrion.generation.scheduling import POLICIES
from chrion.serving.simulator.decoder_results import summarise
from chrion.serving.simulator.decoder_scenario import DecoderScenario, build_decoder_scenario
from chrion.serving.simulator.iterations import simulate_decoder
from chrion.serving.simulator.scenario import ScenarioSource
from decoding.load import equal_lengths, scaled_lengths
from decoding.orca_experiment import LoadPoint
from decoding.scheduling_gain import BATCHES, saturating_requests

HARDWARE = "l4"
_DECODER = next(decoder for decoder in DECODERS if decoder.name == "Llama 3.2 1B")
GPU = f"{_DECODER.name} on an L4"
TITLE = f"{_DECODER.name} on an NVIDIA L4, estimated from its datasheet"
_COMPARED = (1, 8, 32)
_REQUESTS = 300
#: Repetitions, whose medians are reported, to two significant digits: requests of one repetition are random.
REPETITIONS, DIGITS = 5, 2
#: The highest rate, in requests per second, and the ratio of two rates.
_HIGHEST, _STEP, _RATES = 64.0, 2**0.5, 16


def gpu_scenario(rate_per_s: float, requests: int, max_batch: int, seed: int = 0) -> DecoderScenario:
    """Return a load with Orca's lengths."""
    content = {
        "seed": seed,
        "decoder": {
            "hardware": HARDWARE,
            "weights_gb": _DECODER.weights * ITEM / GB,
            "slot_bytes": _DECODER.slot_bytes,
            "query_heads": _DECODER.heads // _DECODER.kv_heads,
        },
        "batching": {"max_batch": max_batch},
        "requests": {"rate_per_s": rate_per_s, "requests": requests, **scaled_lengths(1)},
    }
    return build_decoder_scenario(ScenarioSource("gpu", content, Path()))


def saturated_on_gpu() -> list[DecoderScenario]:
    """Return scenarios with more requests than can be served, by max batch."""
    return [gpu_scenario(1e6, saturating_requests(size), size) for size in BATCHES]


def estimated_points(*, homogeneous: bool = False) -> list[LoadPoint]:
    """Return the points of both policies at many rates, in several repetitions with other requests.

    Args:
        homogeneous: All requests have the mean lengths.
    """
    found = []
    rates = (_HIGHEST / _STEP ** np.arange(_RATES)[::-1]).tolist()
    for seed, batch, rate in itertools.product(range(REPETITIONS), _COMPARED, rates):
        scenario = gpu_scenario(rate, _REQUESTS, batch, seed)
        for result in simulate_decoder(equal_lengths(scenario) if homogeneous else scenario):
            own = summarise(result)
            run = (_DECODER.name, 1, result.policy, batch, rate, rate, _REQUESTS, seed)
            found.append(LoadPoint(*run, own.requests_per_s, own.normalised_p50_ms))
    return sorted(found, key=lambda point: (POLICIES.index(point.policy), point.max_batch, point.offered_per_s))
