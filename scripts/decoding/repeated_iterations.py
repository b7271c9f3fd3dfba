"""Iterations of a decoder that can be repeated, by selective batching and by plain sessions, and their times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chrion.generation.cache import CacheManager
from chrion.generation.iteration import DecoderEngine, Outcome, Work
from chrion.generation.rewrites.decoder import DecoderSignature

Array = np.ndarray[Any, Any]
#: How long an iteration is repeated before it is timed.
WARM_S = 0.01


@dataclass(frozen=True)
class Shape:
    """The tokens of a request in an iteration."""

    past: int
    new: int


def draw_inputs(signature: DecoderSignature, shape: Shape, number: int) -> tuple[Array, list[Array]]:
    """Return random tokens of a request, and its caches in the order of the signature, [heads, past, width].

    Args:
        signature: The inputs and outputs of the decoder.
        shape: Its tokens.
        number: Determines what is drawn, so that requests differ, and one has the same inputs in every way.
    """
    rng = np.random.default_rng(number)
    ids = rng.integers(0, signature.vocabulary, shape.new)
    caches = [rng.standard_normal((heads, shape.past, width), np.float32) for heads, width in signature.cache_shapes]
    return ids, caches


def selective_run(engine: DecoderEngine, shapes: Sequence[Shape]) -> Callable[[], object]:
    """Return an iteration by selective batching, which can be repeated."""
    batch = []
    slots = sum(shape.past + shape.new for shape in shapes)
    manager = CacheManager(engine.signature, slots, by_token=engine.by_token)
    for at, shape in enumerate(shapes):
        cache = manager.get(at, shape.past + shape.new)
        ids, past = draw_inputs(engine.signature, shape, at)
        for array, values in zip(cache.arrays, past, strict=True):
            if engine.by_token:
                array[: shape.past] = values.swapaxes(0, 1)
            else:
                array[:, : shape.past] = values
        batch.append(Work(cache, ids, shape.past))

    def run() -> list[Outcome]:
        outcomes = engine.run(batch)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes

    return run


def padded_feed(signature: DecoderSignature, shapes: Sequence[Shape], first: int = 0) -> dict[str, Array]:
    """Return the inputs of the whole model for a batch that is padded to the longest past and the most new tokens.

    Args:
        signature: The inputs and outputs of the decoder.
        shapes: The tokens of the requests.
        first: The number of the first request, for :func:`draw_inputs`.
    """
    past, new = max(shape.past for shape in shapes), max(shape.new for shape in shapes)
    mask = [[0] * (past - s.past) + [1] * s.past + [0] * (new - s.new) + [1] * s.new for s in shapes]
    positions = [[0] * (new - s.new) + [*range(s.past, s.past + s.new)] for s in shapes]
    feed: dict[str, Array] = {
        "input_ids": np.zeros((len(shapes), new), np.int64),
        "attention_mask": np.array(mask),
        "position_ids": np.array(positions),
    }
    for name, (heads, width) in zip(signature.past, signature.cache_shapes, strict=True):
        feed[name] = np.zeros((len(shapes), heads, past, width), np.float32)
    for at, shape in enumerate(shapes):
        ids, caches = draw_inputs(signature, shape, first + at)
        feed["input_ids"][at, new - shape.new :] = ids
        for name, values in zip(signature.past, caches, strict=True):
            feed[name][at, :, past - shape.past :] = values
    return feed


def padded_run(
    session: Any, signature: DecoderSignature, shapes: Sequence[Shape], first: int = 0
) -> Callable[[], object]:
    """Return an iteration of the whole model on a padded batch; the arguments are as in :func:`padded_feed`."""
    feed = padded_feed(signature, shapes, first)
    return lambda: session.run(None, feed)


def single_runs(session: Any, signature: DecoderSignature, shapes: Sequence[Shape]) -> Callable[[], object]:
    """Return an iteration of the whole model for each request."""
    runs = [padded_run(session, signature, [shape], at) for at, shape in enumerate(shapes)]

    def run() -> None:
        for one in runs:
            one()

    return run


def time_in_turn(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the times in ms of each run in each round, after a warm-up.

    A run follows others of its own, as it does in use: its weights are in the caches as far as they fit, and no thread
    of another one waits actively.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for at in range(rounds + 1):
        for name, run in runs.items():
            warm_s = time.perf_counter() + WARM_S
            while time.perf_counter() < warm_s:
                run()
            before = time.perf_counter()
            run()
            if at:
                times[name].append((time.perf_counter() - before) * 1e3)
    return times
