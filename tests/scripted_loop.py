"""The loop of a generator with an engine without a model, whose tokens follow from a script."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from chrion.generation import Sampling, Stream
from chrion.generation.cache import CacheManager
from chrion.generation.iteration import Outcome, Work
from chrion.generation.loop import IterationLoop
from chrion.generation.requests import GenerationRequest
from chrion.generation.rewrites.decoder import DecoderSignature
from chrion.generation.sampling import Sampler
from chrion.generation.scheduling import IterationScheduler

VOCABULARY = 256
LONG = 50_000
Run = Callable[[Sequence[Work]], list[Outcome]]


def count_on(work: Work) -> int:
    """Return the number after the last token."""
    return (int(work.ids[-1]) + 1) % VOCABULARY


class ScriptedEngine:
    """An engine without a model.

    Args:
        follow: Returns the token that follows.
        around: Runs an iteration; it gets a function that does so, and the batch.
    """

    refused, by_token, weight_copies = "", True, 1
    signature = DecoderSignature(
        ("input_ids",), ("past.key", "past.value"), ("key", "value"), ((1, 4),) * 2, np.dtype(np.float32), VOCABULARY, 0
    )

    def __init__(
        self, around: Callable[[Run, Sequence[Work]], list[Outcome]] | None = None, follow: Any = count_on
    ) -> None:
        self.follow, self.around, self.stopped = follow, around, False

    def run(self, batch: Sequence[Work]) -> list[Outcome]:
        """Make the token that follows the most probable one."""
        return self.around(self._run, batch) if self.around else self._run(batch)

    def _run(self, batch: Sequence[Work]) -> list[Outcome]:
        return [np.eye(VOCABULARY, dtype=np.float32)[self.follow(work)] if work.wanted else None for work in batch]

    def stop(self) -> None:
        """Note that iterations end."""
        self.stopped = True

    def supports_chunks(self) -> bool:
        """Return that results do not depend on chunks."""
        return True


class Served:
    """A loop and what it serves."""

    def __init__(self, engine: ScriptedEngine, scheduler: IterationScheduler, caches: CacheManager) -> None:
        self.loop = IterationLoop(engine, scheduler, caches, 0)
        self._numbers = itertools.count()

    def submit(self, prompt: list[int], count: int, text: Any = None) -> Stream:
        """Submit a request as a generator does."""
        if self.loop.refused:
            raise RuntimeError(self.loop.refused)
        number = next(self._numbers)
        stream = Stream(len(prompt), lambda stream: self.loop.cancel(number, stream))
        capacity = self.loop.scheduler.needed_slots(len(prompt), count)
        sampler = Sampler(Sampling(), prompt)
        self.loop.submit(GenerationRequest(number, stream, sampler, prompt, count, frozenset(), text, capacity))
        return stream

    def check_idle(self) -> None:
        """Wait until there are no requests, and check that nothing of them is left."""
        wait_for(lambda: not self.loop.requests)
        loop = self.loop
        assert (loop.waiting, loop.scheduler.reserved, loop.caches.reserved) == (0, 0, 0)
        assert not loop.scheduler.pool
        assert not loop.scheduler.in_flight


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.0005)


@contextmanager
def serving(
    engine: ScriptedEngine | None = None,
    *,
    n_slots: int = 2 * LONG,
    max_batch: int = 4,
    scheduler: type[IterationScheduler] = IterationScheduler,
    caches: type[CacheManager] = CacheManager,
    **options: Any,
) -> Iterator[Served]:
    """Run a loop; at the end its threads have ended and nothing is left."""
    engine = engine or ScriptedEngine()
    before = set(threading.enumerate())
    scheduling = scheduler(max_batch, n_slots, **options)
    served = Served(engine, scheduling, caches(engine.signature, n_slots, by_token=True))
    try:
        yield served
    finally:
        served.loop.close(time.monotonic() + 60)
    assert set(threading.enumerate()) <= before
    assert engine.stopped
    served.check_idle()


def counted(start: int, count: int) -> list[int]:
    """Return the tokens after one of the scripted engine."""
    return [(start + at) % VOCABULARY for at in range(1, count + 1)]
