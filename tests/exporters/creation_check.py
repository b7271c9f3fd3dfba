"""Creation and first requests of a HybridSession compared with those of a plain InferenceSession.

Both are created in alternation in one process that has created a session before, so that neither pays for the loading
of libraries. The cache is empty: the HybridSession serves its first requests while it waits for tuning.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from cases import Feed, feed_shapes, read_case, read_feeds

from chrion import HybridSession

#: Ratios that no model should exceed: of the creation alone, and of the creation or a new shape with its first request.
CREATION_AIM, AIM = 1.5, 2.0
HEAD = ("model", "plain ms", "hybrid ms", "ratio", "plain first ms", "hybrid first ms", "ratio", "new shape")
#: Pairs of sessions, until so many seconds have passed.
_MIN_PAIRS, _MAX_PAIRS, _LIMIT_S = 5, 60, 1.0


@dataclass(frozen=True)
class CreationComparison:
    """Medians over sessions, in ms; ratios are hybrid over plain.

    Attributes:
        name: The case.
        plain_ms: Creation.
        plain_first_ms: Creation and first request.
        created: Ratio of creations.
        first: Ratio of creations with their first requests.
        shapes: Ratio of the first requests of all further shapes together; None without any.
    """

    name: str
    plain_ms: float
    plain_first_ms: float
    created: float
    first: float
    shapes: float | None

    @property
    def above_aim(self) -> bool:
        """Whether a ratio exceeds its aim."""
        return self.created > CREATION_AIM or max(self.first, self.shapes or 0.0) > AIM

    def cells(self) -> list[str]:
        """Return the case's line of the table."""
        created_ms, first_ms = self.plain_ms * self.created, self.plain_first_ms * self.first
        figures = [self.plain_ms, created_ms, self.created, self.plain_first_ms, first_ms, self.first]
        return [self.name, *(f"{figure:.2f}" for figure in figures), f"{self.shapes:.2f}" if self.shapes else "-"]


def compare_creation(folder: Path) -> CreationComparison:
    """Compare the sessions of the case in a folder.

    Raises:
        Exception: Raised by InferenceSession, or by HybridSession.
    """
    ort.set_default_logger_severity(4)
    model, feeds = str(folder / "model.onnx"), read_feeds(folder)
    makers: dict[str, Callable[[str], Any]] = {"plain": ort.InferenceSession, "hybrid": _hybrid}
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in makers}
    _create(ort.InferenceSession, model, feeds)
    start = time.perf_counter()
    for pair in range(_MAX_PAIRS):
        for name in list(makers)[:: 1 if pair % 2 else -1]:
            times[name].append(_create(makers[name], model, feeds))
        if pair + 1 >= _MIN_PAIRS and time.perf_counter() > start + _LIMIT_S:
            break
    plain, hybrid = ([statistics.median(column) for column in zip(*times[name], strict=True)] for name in times)
    shapes = hybrid[2] / plain[2] if plain[2] else None
    name = read_case(folder).name
    return CreationComparison(name, plain[0], plain[1], hybrid[0] / plain[0], hybrid[1] / plain[1], shapes)


def summarise_creation(comparisons: Sequence[CreationComparison]) -> str:
    """Return quantiles of the ratios, and how many models exceed each aim."""
    ratios = {
        f"creation (aim {CREATION_AIM})": ([c.created for c in comparisons], CREATION_AIM),
        f"creation and first request (aim {AIM})": ([c.first for c in comparisons], AIM),
        f"first request of further shapes (aim {AIM})": ([c.shapes for c in comparisons if c.shapes], AIM),
    }
    lines = []
    for name, (values, aim) in ratios.items():
        middle, high = (float(np.quantile(values, q)) for q in (0.5, 0.95)) if values else (0.0, 0.0)
        above = sum(value > aim for value in values)
        figures = f"median {middle:.2f}, 95th percentile {high:.2f}, {above} of {len(values)} above the aim"
        lines.append(f"- {name}: {figures}")
    return "\n".join(lines)


def _hybrid(model: str) -> HybridSession:
    return HybridSession(model, tune="background")


def _create(make: Callable[[str], Any], model: str, feeds: list[Feed]) -> tuple[float, float, float]:
    """Return creation, creation with the first request, and the first requests of further shapes, in ms."""
    start = time.perf_counter()
    session = make(model)
    created = time.perf_counter()
    with suppress(Exception):  # both kinds of session raise it; other checks compare errors
        session.run(None, feeds[0])
    first = time.perf_counter()
    further_s, seen = 0.0, [feed_shapes(feeds[0])]
    for feed in feeds[1:]:
        if feed_shapes(feed) in seen:
            continue
        seen.append(feed_shapes(feed))
        before = time.perf_counter()
        with suppress(Exception):
            session.run(None, feed)
        further_s += time.perf_counter() - before
    if isinstance(session, HybridSession):
        session.close()
    return (created - start) * 1e3, (first - start) * 1e3, further_s * 1e3
