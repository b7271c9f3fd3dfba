"""Classes of requests, each with an objective and a priority of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from chrion.serving.simulator.requests import Details, Floats, Requests
from chrion.serving.simulator.settings import ClassSpec
from chrion.serving.simulator.workload import Workload, draw


@dataclass(frozen=True, slots=True, eq=False)
class ClassifiedWorkload:
    """The requests of another workload, each of a class that is drawn by the shares.

    What a trace gives for a request takes precedence over what its class gives.
    """

    whole: Workload
    classes: Sequence[ClassSpec]
    seed: int

    @property
    def requests(self) -> int:
        """As of the whole workload."""
        return self.whole.requests

    @property
    def details(self) -> Details | None:
        """The figures of single requests of the whole workload, and one request of each class."""
        rows = self._details(np.arange(len(self.classes)))
        given = self.whole.details
        if given:
            rows = Details(*(np.concatenate([a, b]) for a, b in zip(given[:3], rows[:3], strict=True)))
        return rows

    def chunks(self) -> Iterator[Requests]:
        """Yield chunks of requests; see :class:`chrion.serving.simulator.workload.Workload`."""
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, 3]))
        shares: Floats = np.array([own.share for own in self.classes])
        for times, models, given in self.whole.chunks():
            index = draw(rng, shares / shares.sum(), len(times))
            rows = self._details(index)
            if given:
                deadlines = np.where(np.isnan(given.deadline_ms), rows.deadline_ms, given.deadline_ms)
                priority = np.where(given.priority != 0, given.priority, rows.priority)
                rows = Details(given.duration_ms, deadlines, priority, index)
            yield Requests(times, models, rows)

    def _details(self, index: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Details:
        deadlines: Floats = np.array([own.slo_ms or np.nan for own in self.classes])
        priority = np.array([own.priority for own in self.classes], np.int64)
        return Details(np.full(len(index), np.nan), deadlines[index], priority[index], index)
