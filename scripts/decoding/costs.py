"""Costs of iterations, fitted to those of a Generator, and a file of them."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from chrion.generation import Generator
from chrion.generation.iteration import Outcome, Work
from chrion.generation.scheduling import POLICIES
from chrion.simulator.decoder_scenario import IterationCosts
from chrion.simulator.iterations import draw_requests, fit_costs
from decoding.load import load_scenario, scheduled

#: Requests that are served before anything is measured.
_WARM_UP = 40
Costs = tuple[IterationCosts, IterationCosts]
Batch = tuple[list[int], list[int], int]
#: Model, scale, greatest batch and seed.
Runs = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Costs of a decoder's iterations without and with prompts, measured beside the runs of a greatest batch."""

    model: str
    #: Divides Orca's lengths.
    scale: int
    max_batch: int
    #: That of the requests of the runs.
    seed: int
    costs: IterationCosts
    prompt_costs: IterationCosts

    @property
    def runs(self) -> Runs:
        """What the costs were measured for."""
        return self.model, self.scale, self.max_batch, self.seed


class Recorder:
    """An engine that notes its iterations; it replaces that of a generator.

    Attributes:
        starts_s: Times at which iterations began.
        batches: New tokens of their requests, tokens in the cache, and how many requests get a token.
    """

    def __init__(self, generator: Generator) -> None:
        self.engine = generator._engine  # noqa: SLF001 - what is measured
        self._in_flight = generator._scheduler.in_flight  # noqa: SLF001
        self.starts_s: list[float] = []
        self.batches: list[Batch] = []
        generator._engine = self  # noqa: SLF001

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def run(self, batch: Sequence[Work]) -> list[Outcome]:
        """Run an iteration."""
        self.starts_s.append(time.perf_counter())
        chosen = sum(share.last for share in self._in_flight[-1])
        self.batches.append(([len(work.ids) for work in batch], [work.past for work in batch], chosen))
        return self.engine.run(batch)


class CostMeter:
    """A measurement of the costs of iterations, in a generator that always has requests.

    An iteration takes from its beginning to that of the next one, so that the choice of tokens counts, too.

    Args:
        generator: A generator without requests.
        scale: Divides Orca's lengths.
    """

    def __init__(self, generator: Generator, scale: int) -> None:
        self._generator, self._scale = generator, scale
        self._rows: list[tuple[Batch, float]] = []

    def measure(self, max_batch: int) -> None:
        """Add iterations of single requests and of a greatest batch, with both policies.

        Args:
            max_batch: The greatest batch, instead of that of the generator.
        """
        for size, policy in itertools.product(sorted({1, max_batch}, reverse=True), POLICIES):
            requests = max(24, 3 * size) if policy == "iteration" else size
            with scheduled(self._generator, policy, size):
                self._rows += _record(self._generator, requests, self._scale)

    def fit(self) -> Costs:
        """Return the costs that fit all measured iterations; there has to be a measurement."""
        single = [row for row in self._rows if max(row[0][0]) == 1]
        others = [row for row in self._rows if max(row[0][0]) > 1]
        return _fit(single), _fit(others)


def warm_up(generator: Generator, scale: int) -> None:
    """Serve some requests; a process that has just begun is slower for a second or two."""
    _record(generator, _WARM_UP, scale)


def _record(generator: Generator, requests: int, scale: int) -> list[tuple[Batch, float]]:
    """Return the iterations that serve some requests, with their times in ms."""
    workload = draw_requests(load_scenario(scale, 1.0, requests))
    recorder = Recorder(generator)
    pairs = zip(workload.prompts.tolist(), workload.new.tolist(), strict=True)
    with generator._lock:  # noqa: SLF001 - the first batch has as many requests as possible
        streams = [generator.submit([1] * prompt, new, stop_tokens=()) for prompt, new in pairs]
    for stream in streams:
        stream.result()
    generator._engine = recorder.engine  # noqa: SLF001
    return list(zip(recorder.batches[:-1], (np.diff(recorder.starts_s) * 1e3).tolist(), strict=True))


def _fit(rows: Sequence[tuple[Batch, float]]) -> IterationCosts:
    return fit_costs([batch for batch, _ in rows], [span_ms for _, span_ms in rows])


def append_costs(path: Path, found: MeasuredCosts) -> None:
    """Add costs to a file of JSON lines."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(found)) + "\n")


def read_costs(path: Path) -> list[MeasuredCosts]:
    """Return the costs of a file."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [
        MeasuredCosts(**row | {name: IterationCosts(**row[name]) for name in ("costs", "prompt_costs")}) for row in rows
    ]


def mean_costs(measured: Iterable[MeasuredCosts]) -> dict[tuple[str, int], dict[int, Costs]]:
    """Return the means over runs of each term, by model and scale, and by greatest batch."""
    found: dict[tuple[str, int], dict[int, list[MeasuredCosts]]] = {}
    for one in measured:
        found.setdefault((one.model, one.scale), {}).setdefault(one.max_batch, []).append(one)
    return {
        workload: {
            batch: (_mean([one.costs for one in several]), _mean([one.prompt_costs for one in several]))
            for batch, several in sorted(batches.items())
        }
        for workload, batches in found.items()
    }


def _mean(several: Sequence[IterationCosts]) -> IterationCosts:
    terms = {term.name: float(np.mean([getattr(c, term.name) for c in several])) for term in fields(IterationCosts)}
    return IterationCosts(**terms)
