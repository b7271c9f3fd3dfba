"""The iterations of a generator, and how long they take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from chrion.generation import Generator
from chrion.generation.iteration import Outcome, Work

Batch = tuple[list[int], list[int], int]
#: The longest time that the choice of tokens takes, in ms. If new requests come later, the generator had none.
_LONGEST_CHOICE_MS = 2.0


class Recorder:
    """An engine that notes its iterations; it replaces that of a generator.

    Attributes:
        batches: For each iteration, new tokens of its requests, tokens in the cache, and how many requests get a token.
        times_s: When each began and ended.
    """

    def __init__(self, generator: Generator) -> None:
        self.engine = generator._loop.engine  # noqa: SLF001 - what is measured
        self._in_flight = generator._loop.scheduler.in_flight  # noqa: SLF001
        self.batches: list[Batch] = []
        self.times_s: list[tuple[float, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def run(self, batch: Sequence[Work]) -> list[Outcome]:
        """Run an iteration."""
        chosen = sum(share.last for share in self._in_flight[-1])
        began = time.perf_counter()
        found = self.engine.run(batch)
        self.times_s.append((began, time.perf_counter()))
        self.batches.append(([len(work.ids) for work in batch], [work.past for work in batch], chosen))
        return found

    def iterations(self) -> list[tuple[Batch, float]]:
        """Return all iterations but the last one, with their times in ms.

        An iteration takes from its beginning to that of the next one, so that the choice of tokens counts, too. If the
        generator then had to wait for a request, it takes until its end.
        """
        spans = []
        for at, (began, ended) in enumerate(self.times_s[:-1]):
            following = self.times_s[at + 1][0]
            idle = not any(self.batches[at + 1][1]) and (following - ended) * 1e3 > _LONGEST_CHOICE_MS
            spans.append(((ended if idle else following) - began) * 1e3)
        return list(zip(self.batches[:-1], spans, strict=True))


@contextlib.contextmanager
def recorded(generator: Generator) -> Iterator[Recorder]:
    """Note the iterations of a generator with one worker, which has no requests before and after."""
    recorder = Recorder(generator)
    generator._loop.engine = recorder  # noqa: SLF001
    try:
        yield recorder
    finally:
        generator._loop.engine = recorder.engine  # noqa: SLF001
