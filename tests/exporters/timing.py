"""Creation, first requests, memory and latency of a default HybridSession, relative to plain onnxruntime.

Each session is created in a separate process (``python timing.py FOLDER plain``), which prints its measurements.
*cold* is a HybridSession with an empty cache, *warm* one with the measurements and the decision of an earlier one in
its cache. Creations alternate, and medians are compared.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort
import psutil
from cases import feed_shapes, read_feeds

from chrion import HybridSession
from chrion.report.benchmark.latency import SessionFactory, plain_baseline, time_candidates

PLAIN, COLD, WARM = "plain", "cold", "warm"
_TIMEOUT_S = 300.0
_TUNING_LIMIT_S = 200.0


@dataclass(frozen=True)
class Creation:
    """The measurements of a session in a separate process.

    Attributes:
        created_s: Time of the creation and the first request in seconds.
        shapes_s: Time of the first request of each further shape in seconds.
        memory_mb: Growth of resident memory in MB after all requests, and after tuning if the session is warm.
    """

    created_s: float
    shapes_s: tuple[float, ...]
    memory_mb: float


@dataclass(frozen=True)
class Timing:
    """Ratios of HybridSession to plain onnxruntime, of medians over repeats.

    Attributes:
        cold: Creation and first request, with an empty cache.
        warm: The same, with the cache of an earlier session.
        shapes: First request of each further shape, with an empty cache; None if all requests have one shape.
        memory: Growth of resident memory, with the cache of an earlier session.
        latency: Steady state, first request.

    A ratio is None if plain onnxruntime's median is not positive.
    """

    cold: float | None
    warm: float | None
    shapes: float | None
    memory: float | None
    latency: float | None


def measure(folder: Path, repeats: int = 3) -> Timing:
    """Measure the case in a folder."""
    found: dict[str, list[Creation]] = {PLAIN: [], COLD: [], WARM: []}
    with tempfile.TemporaryDirectory() as kept:
        _create_separately(folder, WARM, Path(kept))  # fills the cache
        for _ in range(repeats):
            found[PLAIN].append(_create_separately(folder, PLAIN, Path(kept)))
            with tempfile.TemporaryDirectory() as empty:
                found[COLD].append(_create_separately(folder, COLD, Path(empty)))
            found[WARM].append(_create_separately(folder, WARM, Path(kept)))
        with _cache(Path(kept)):
            steady = latency(folder)
    return Timing(
        _ratio([c.created_s for c in found[COLD]], [c.created_s for c in found[PLAIN]]),
        _ratio([c.created_s for c in found[WARM]], [c.created_s for c in found[PLAIN]]),
        _ratio([s for c in found[COLD] for s in c.shapes_s], [s for c in found[PLAIN] for s in c.shapes_s]),
        _ratio([c.memory_mb for c in found[WARM]], [c.memory_mb for c in found[PLAIN]]),
        steady,
    )


def create(folder: Path, kind: str) -> Creation:
    """Create a session in this process and run each request once."""
    feeds = read_feeds(folder)
    process = psutil.Process()
    before, start = process.memory_info().rss, time.perf_counter()
    model = str(folder / "model.onnx")
    session: Any = ort.InferenceSession(model) if kind == PLAIN else HybridSession(model)
    session.run(None, feeds[0])
    created_s = time.perf_counter() - start
    shapes_s, seen = [], [feed_shapes(feeds[0])]
    for feed in feeds[1:]:
        start = time.perf_counter()
        session.run(None, feed)
        if feed_shapes(feed) not in seen:
            shapes_s.append(time.perf_counter() - start)
            seen.append(feed_shapes(feed))
    if kind == WARM:  # memory is that of the selected engines; the first warm session fills the cache
        session.wait_until_tuned(_TUNING_LIMIT_S)
        for feed in feeds:
            session.run(None, feed)
    return Creation(created_s, tuple(shapes_s), (process.memory_info().rss - before) / 1e6)


def _create_separately(folder: Path, kind: str, cache: Path) -> Creation:
    tests = Path(__file__).parent.parent
    path = os.pathsep.join(filter(None, [str(tests), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "CHRION_CACHE": str(cache), "PYTHONPATH": path}
    command = [sys.executable, str(Path(__file__)), str(folder.resolve()), kind]
    done = subprocess.run(  # noqa: S603 - this module
        command, check=True, capture_output=True, text=True, env=environment, timeout=_TIMEOUT_S
    )
    return Creation(*json.loads(done.stdout.splitlines()[-1]))


def latency(folder: Path) -> float:
    """Return the ratio of steady-state latencies; each session runs alone, in alternating rounds."""
    feed, model = read_feeds(folder)[0], str(folder / "model.onnx")

    def hybrid() -> Any:
        session = HybridSession(model, tune="now")
        return lambda: session.run(None, feed), session.close

    candidates: Mapping[str, SessionFactory] = {"hybrid": hybrid, PLAIN: plain_baseline(model, feed, None)}
    times = {timing.name: timing.median_ms for timing in time_candidates(candidates, rounds=6, trial_s=0.1)}
    return times["hybrid"] / times[PLAIN]


@contextmanager
def _cache(folder: Path) -> Iterator[None]:
    """Make sessions of this process use a cache."""
    kept = os.environ.get("CHRION_CACHE")
    os.environ["CHRION_CACHE"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("CHRION_CACHE") if kept is None else os.environ.update(CHRION_CACHE=kept)


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Return the ratio of medians; None if the divisor is missing or not positive."""
    if not ours or not theirs or statistics.median(theirs) <= 0:
        return None
    return statistics.median(ours) / statistics.median(theirs)


if __name__ == "__main__":
    ort.set_default_logger_severity(4)
    made = create(Path(sys.argv[1]), sys.argv[2])
    print(json.dumps([made.created_s, made.shapes_s, made.memory_mb]))
