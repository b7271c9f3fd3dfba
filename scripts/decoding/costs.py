"""Costs of iterations, fitted to those of a Generator, and a file of them."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import to_builtins

from chrion.generation import Generator
from chrion.generation.scheduling import POLICIES
from chrion.serving.simulator.decoder_costs import IterationCosts
from chrion.serving.simulator.decoder_requests import DecoderWorkload
from chrion.serving.simulator.iterations import draw_requests
from decoding.code_version import check_version
from decoding.load import Costs, load_scenario, scheduled
from decoding.recorder import Batch, recorded

#: Max batches whose iterations are measured.
BATCHES = (1, 2, 4, 8, 16, 32)
#: Requests before the first measured ones.
_WARM_UP = 40
#: Rounds of a fit, the longest iteration relative to its fitted time, and the shortest fitted time relative to it.
_FIT_ROUNDS, _LONGEST_DELAY, _LEAST_SHARE = 8, 3.0, 0.05

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Costs of a decoder's iterations without and with prompts, for lengths that are divided by ``scale``."""

    model: str
    scale: int
    costs: IterationCosts
    prompt_costs: IterationCosts
    #: The version of the code that measured them, by :func:`decoding.code_version.code_version`.
    code: str = ""


class CostMeter:
    """A measurement of the costs of iterations, in a generator that always has requests.

    Some requests are served at once as a warm-up.

    Args:
        generator: A generator without requests.
        scale: Divides Orca's lengths.
        send: Has the generator serve requests that arrive at once; by default, they are submitted here.

    Attributes:
        rows: All measured iterations, and how long they took in ms.
    """

    def __init__(
        self, generator: Generator, scale: int, send: Callable[[DecoderWorkload], object] | None = None
    ) -> None:
        self.generator, self._scale = generator, scale
        self._send = send or functools.partial(_submit, generator)
        self.rows: list[tuple[Batch, float]] = []
        self._record(_WARM_UP)  # a process that has just begun is slower for a second or two

    def measure(self, batches: Sequence[int] = BATCHES) -> None:
        """Add iterations with several max batches, and for each with iteration-level and request-level scheduling.

        Args:
            batches: The max batches, instead of that of the generator.
        """
        for size, policy in itertools.product(sorted(batches, reverse=True), POLICIES):
            requests = max(24, 3 * size) if policy == "iteration" else size
            with scheduled(self.generator, policy, size):
                self.rows += self._record(requests)

    def fit(self) -> Costs:
        """Return the costs that fit all measured iterations; there has to be a measurement."""
        single = [row for row in self.rows if max(row[0][0]) == 1]
        others = [row for row in self.rows if max(row[0][0]) > 1]
        return _fit(single), _fit(others)

    def _record(self, requests: int) -> list[tuple[Batch, float]]:
        """Return the iterations that serve some requests, with their times in ms."""
        workload = draw_requests(load_scenario(self._scale, 1.0, requests))
        with recorded(self.generator) as recorder:
            self._send(workload._replace(arrivals_ms=np.zeros(requests)))
        return recorder.iterations()


def _submit(generator: Generator, workload: DecoderWorkload) -> None:
    """Serve requests that all come at once."""
    pairs = zip(workload.prompts.tolist(), workload.new.tolist(), strict=True)
    with generator._loop.gate:  # noqa: SLF001 - the first batch has as many requests as possible
        streams = [generator.submit([1] * prompt, new, stop_tokens=()) for prompt, new in pairs]
    for stream in streams:
        stream.result()


def _fit(rows: Sequence[tuple[Batch, float]]) -> IterationCosts:
    return fit_costs([batch for batch, _ in rows], [span_ms for _, span_ms in rows])


def append_costs(path: Path, found: MeasuredCosts) -> None:
    """Add costs to a file of JSON lines."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(to_builtins(found)) + "\n")


def read_costs(path: Path) -> dict[tuple[str, int], Costs]:
    """Return the costs of a file by model and scale; of several measurements, the mean of each term.

    Raises:
        OptionError: They were measured with several versions of the code.
    """
    check_version(path)
    found: dict[tuple[str, int], list[Costs]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        costs = (IterationCosts(**row["costs"]), IterationCosts(**row["prompt_costs"]))
        found.setdefault((row["model"], row["scale"]), []).append(costs)
    return {key: (_mean([c[0] for c in several]), _mean([c[1] for c in several])) for key, several in found.items()}


def _mean(several: Sequence[IterationCosts]) -> IterationCosts:
    terms = {name: float(np.mean([getattr(c, name) for c in several])) for name in IterationCosts.__struct_fields__}
    return IterationCosts(**terms)


def fit_costs(batches: Sequence[tuple[Any, ...]], times_ms: Sequence[float]) -> IterationCosts:
    """Return the costs that fit measured iterations best, none of them below zero.

    Residuals are divided by the fitted times, in rounds. Divided by the measured times, as relative errors are, they
    would weigh delayed iterations less than fast ones, and the sum of many iterations would be fitted too low. This is
    the fit of a gamma distribution with an identity link (McCullagh and Nelder, *Generalized linear models*, 1989,
    chapter 8). A delay counts up to three times the fitted time, because one stall of a machine would move all terms.

    Args:
        batches: For each iteration, the arguments of :meth:`IterationCosts.features`.
        times_ms: Durations of the iterations.
    """
    rows = np.array([IterationCosts.features(*batch) for batch in batches], np.float64)
    times = np.asarray(times_ms, np.float64)
    fitted = times
    for _ in range(_FIT_ROUNDS):
        terms = _non_negative(rows / fitted[:, None], np.minimum(times / fitted, _LONGEST_DELAY))
        fitted = np.maximum(rows @ terms, _LEAST_SHARE * times)
    return IterationCosts(*map(float, terms))


def _non_negative(rows: Floats, values: Floats) -> Floats:
    """Return terms of least squares; those below zero are left out, the lowest first."""
    kept = list(range(rows.shape[1]))
    while True:
        found = np.linalg.lstsq(rows[:, kept], values, rcond=None)[0]
        if not kept or found.min() >= 0.0:
            break
        del kept[int(found.argmin())]
    terms = np.zeros(rows.shape[1])
    terms[kept] = found
    return terms
