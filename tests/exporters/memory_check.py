"""Resident memory of a HybridSession compared with that of a plain InferenceSession serving the same requests.

Each session has a fresh process (``memory_worker.py``). The HybridSession finds the measurements and the choice of an
earlier one in its cache, as from the second start of a program on. Two ratios are reported: that of the whole
processes, and that of the memory beyond the imports: what each process held before its session was created, that is the
interpreter and the libraries, is subtracted. The aim is on the latter, since the former is dominated by the libraries.
Modules that a HybridSession imports only when it is used count as imports: one process finds them, and the process that
is measured imports them before its session is created.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cases import read_case
from memory_worker import HYBRID, PLAIN

#: The ratio that no model should exceed.
AIM = 1.3
HEAD = ("model", "segments", "plain MB", "hybrid MB", "ratio", "plain PSS", "hybrid PSS")
HEAD += ("plain beyond imports", "hybrid beyond imports", "ratio", "plain peak", "hybrid peak", "ratio")
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Footprint:
    """The memory of one process, in MB (10^6 bytes).

    Attributes:
        imports_mb: Resident after the imports, before the session is created.
        peak_mb: The most that was resident from then on.
        steady_mb: Resident once all requests have been served and freed memory returned.
        steady_pss_mb: The same with shared pages divided among the processes that map them.
        served: Requests without an exception.
        segments: Segments of the largest plan that served a request; 0 without one.
        later_modules: Modules that were imported after that.
    """

    imports_mb: float
    peak_mb: float
    steady_mb: float
    steady_pss_mb: float
    served: int
    segments: int
    later_modules: Sequence[str] = ()

    @property
    def beyond_mb(self) -> float:
        """Steady memory beyond the imports."""
        return self.steady_mb - self.imports_mb

    @property
    def peak_beyond_mb(self) -> float:
        """Peak memory beyond the imports."""
        return self.peak_mb - self.imports_mb


@dataclass(frozen=True)
class Comparison:
    """A case's two processes; all ratios are hybrid over plain."""

    name: str
    plain: Footprint
    hybrid: Footprint

    @property
    def whole_ratio(self) -> float:
        """Ratio of the steady memory of the whole processes."""
        return self.hybrid.steady_mb / self.plain.steady_mb

    @property
    def beyond_ratio(self) -> float:
        """Ratio of the steady memory beyond the imports; infinite if the plain session's is not positive."""
        return self.hybrid.beyond_mb / self.plain.beyond_mb if self.plain.beyond_mb > 0 else math.inf

    @property
    def peak_ratio(self) -> float:
        """Ratio of the peak memory beyond the imports; infinite if the plain session's is not positive."""
        return self.hybrid.peak_beyond_mb / self.plain.peak_beyond_mb if self.plain.peak_beyond_mb > 0 else math.inf

    def cells(self) -> list[str]:
        """Return the case's line of the table."""
        p, h = self.plain, self.hybrid
        whole = [f"{p.steady_mb:.1f}", f"{h.steady_mb:.1f}", f"{self.whole_ratio:.2f}"]
        shares = [f"{p.steady_pss_mb:.1f}", f"{h.steady_pss_mb:.1f}"]
        beyond = [f"{p.beyond_mb:.1f}", f"{h.beyond_mb:.1f}", f"{self.beyond_ratio:.2f}"]
        peak = [f"{p.peak_beyond_mb:.1f}", f"{h.peak_beyond_mb:.1f}", f"{self.peak_ratio:.2f}"]
        return [self.name, str(h.segments), *whole, *shares, *beyond, *peak]


def compare_memory(folder: Path, cache: Path | None = None, *, plans: bool = False) -> Comparison:
    """Measure both sessions for the case in a folder.

    Args:
        folder: The case.
        cache: A cache that is kept, so that the first HybridSession need not profile again next time; a temporary one
            if missing.
        plans: Use plans whatever their latency; see ``plan_decisions.py``.

    Raises:
        RuntimeError: A process failed, or the sessions served different numbers of requests.
    """
    with tempfile.TemporaryDirectory() as temporary:
        kept = cache or Path(temporary)
        if plans:
            _run_program("plan_decisions.py", folder, [], kept)
        _measure_separately(folder, HYBRID, kept)  # fills the cache
        later = _measure_separately(folder, HYBRID, kept).later_modules
        plain, hybrid = _measure_separately(folder, PLAIN, kept), _measure_separately(folder, HYBRID, kept, later)
    if plain.served != hybrid.served:
        raise RuntimeError(f"served requests: {hybrid.served} by HybridSession, {plain.served} by InferenceSession")
    return Comparison(read_case(folder).name, plain, hybrid)


def above_aim(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons whose steady memory beyond the imports exceeds the aim."""
    return [c for c in comparisons if c.beyond_ratio > AIM]


def summarise(comparisons: Sequence[Comparison]) -> str:
    """Return the median baseline of either process, and the models above the aim by each ratio, largest first."""
    ratios: dict[str, Callable[[Comparison], float]] = {
        "steady memory beyond the imports": lambda c: c.beyond_ratio,
        "peak memory beyond the imports": lambda c: c.peak_ratio,
        "steady memory of the whole process": lambda c: c.whole_ratio,
    }
    lines = []
    if comparisons:
        plain = statistics.median(c.plain.imports_mb for c in comparisons)
        hybrid = statistics.median(c.hybrid.imports_mb for c in comparisons)
        lines.append(f"after the imports: {plain:.1f} MB with onnxruntime alone, {hybrid:.1f} MB with Chrion")
    for title, ratio in ratios.items():
        above = sorted((c for c in comparisons if ratio(c) > AIM), key=ratio, reverse=True)
        listed = ", ".join(f"{c.name} {ratio(c):.2f}" for c in above)
        lines.append(f"{title}: {len(above)} of {len(comparisons)} models above {AIM}{': ' if above else ''}{listed}")
    return "\n".join(lines)


def _measure_separately(folder: Path, kind: str, cache: Path, modules: Sequence[str] = ()) -> Footprint:
    """Run the worker in a separate process."""
    output = _run_program("memory_worker.py", folder, [kind, *modules], cache)
    return Footprint(**json.loads(output.splitlines()[-1]))


def _run_program(name: str, folder: Path, arguments: Sequence[str], cache: Path) -> str:
    """Run a program of this folder in a separate process and return what it prints.

    Raises:
        RuntimeError: It failed.
    """
    environment = {**os.environ, "CHRION_CACHE": str(cache)}
    command = [sys.executable, str(Path(__file__).with_name(name)), str(folder.resolve()), *arguments]
    done = subprocess.run(  # noqa: S603 - a module of the repository
        command, check=False, capture_output=True, text=True, env=environment, timeout=_TIMEOUT_S
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{name} {' '.join(arguments[:1])}: exit code {done.returncode}: {last}")
    return done.stdout
