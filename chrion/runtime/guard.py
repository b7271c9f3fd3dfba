"""The guard: is the plan really better than a plain session? Timed on the spot, and remembered.

A plan that is slower than what the user had before is worse than none, however good predictions are. So a session that
makes its own plan first times its candidates: the plain session as the caller would have it, plain ones on the CPU with
other numbers of threads, and the plan. Each has the machine to itself, for a fraction of a second. The winner is kept,
here and in the cache: per machine, model, shapes and goal.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from chrion.cores import physical_cores
from chrion.errors import PlanError
from chrion.files import cache_folder, recall, remember
from chrion.profiler.quiet import CoreWatch, Watch
from chrion.scheduler.plan import Plan

#: How long a candidate is timed in one turn, after a run to warm up; and how often at least.
_WINDOW_S = 0.025
_LEAST_RUNS = 3
#: Turns each candidate has at least and at most; between the two, no further round is begun once candidates have run
#: for so many seconds.
_LEAST_ROUNDS, _ROUNDS = 3, 12
_BUDGET_S = 1.2
#: Who is so far behind the best after one round goes on no more; after the least rounds, only who is close to it does.
_FAR, _CLOSE = 1.5, 1.15
#: A plan must beat a plain session by so much, best turn against best turn: less is noise, and a plain session is
#: simpler. Nor may it be the slower one in most turns, as a lucky one would be.
_MARGIN = 0.95
#: How long to wait for moments in which nobody else uses the cores.
_PATIENCE_S = 2.0

#: Makes a candidate: what runs one request, and what takes it down.
Opener = Callable[[], tuple[Callable[[], object], Callable[[], None]]]


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to run the model."""

    name: str
    open: Opener
    #: Accelerator memory it is predicted to hold.
    resident_mb: float = 0.0
    plain: bool = True
    #: It may stay open between its turns: it is idle then, and takes little memory. Threads of plain sessions are not.
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """How a contender did in its best turn; a failed one has an infinite latency."""

    name: str
    median_ms: float
    resident_mb: float


def decide(
    contenders: Sequence[Contender], slo_ms: float | None, watch: Watch | None = None
) -> tuple[str, tuple[Trial, ...]]:
    """Time all contenders and choose.

    Args:
        contenders: Plain ones first: they win ties.
        slo_ms: Among those that meet it, the one with the least accelerator memory is chosen; without it, or if none
            does, the fastest.
        watch: Tells whether the cores are quiet; if missing, all physical cores are watched.

    Returns:
        The winner's name, and all trials.
    """
    watch = watch or CoreWatch(physical_cores(), _PATIENCE_S)
    turns_ms: dict[str, list[float]] = {c.name: [] for c in contenders}
    _race(contenders, turns_ms, watch)
    trials = tuple(Trial(c.name, min(turns_ms[c.name]), c.resident_mb) for c in contenders)
    handicap = {c.name: 1.0 if c.plain else 1 / _MARGIN for c in contenders}
    usual_ms = {c.name: statistics.median(turns_ms[c.name]) for c in contenders}
    plain = min((c.name for c in contenders if c.plain), key=lambda name: min(turns_ms[name]), default=None)
    lucky = [c.name for c in contenders if plain and not c.plain and usual_ms[c.name] > usual_ms[plain]]
    handicap |= dict.fromkeys(lucky, float("inf"))

    def weighted_ms(trial: Trial) -> float:
        return trial.median_ms * handicap[trial.name]

    fitting = [t for t in trials if slo_ms is not None and t.median_ms <= slo_ms]
    if fitting:
        return min(fitting, key=lambda t: (t.resident_mb, weighted_ms(t))).name, trials
    return min(trials, key=weighted_ms).name, trials


@dataclass(frozen=True, slots=True)
class Decision:
    """What a session settled for: a plain contender by name, or a plan."""

    winner: str
    plan: Plan | None
    #: In words.
    why: str


class Memory:
    """Decisions of earlier sessions, one small file each; one that cannot be read counts as not there."""

    def __init__(self, *key: object) -> None:
        name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
        self._path = cache_folder() / "choices" / f"{name}.json"

    def recall(self) -> Decision | None:
        """What was decided, if anything was."""
        content = recall(self._path)
        if content is None:
            return None
        try:
            plan = None if content["plan"] is None else Plan.from_json(content["plan"])
            return Decision(str(content["winner"]), plan, str(content["why"]))
        except (KeyError, PlanError):
            return None

    def keep(self, decision: Decision) -> None:
        """Remember a decision."""
        plan = decision.plan.to_json() if decision.plan else None
        remember(self._path, {"winner": decision.winner, "plan": plan, "why": decision.why})


def _race(contenders: Sequence[Contender], turns_ms: Mapping[str, list[float]], watch: Watch) -> None:
    """Some turns for everyone, alternating, and further ones for those that are close or the best in most turns."""
    racing, ran_s = contenders, 0.0
    with contextlib.ExitStack() as opened:
        openers = {c.name: _kept_open(c, opened) if c.lasting else c.open for c in contenders}
        for turn in range(_ROUNDS):
            if turn:
                close_ms = (_CLOSE if turn >= _LEAST_ROUNDS else _FAR) * min(min(turns_ms[c.name]) for c in racing)
                usual_ms = {c.name: statistics.median(turns_ms[c.name]) for c in racing}
                ahead = min(usual_ms, key=usual_ms.__getitem__)
                racing = [c for c in racing if min(turns_ms[c.name]) <= close_ms or c.name == ahead]
            if len(racing) < 2 or (turn >= _LEAST_ROUNDS and ran_s > _BUDGET_S):
                break
            for contender in racing:
                watch.wait()
                median_ms, took_s = _timed(openers[contender.name])
                turns_ms[contender.name].append(median_ms)
                ran_s += took_s


def _kept_open(contender: Contender, opened: contextlib.ExitStack) -> Opener:
    """Opens a contender once, and takes it down in the end."""

    @functools.cache
    def run() -> Callable[[], object]:
        made, close = contender.open()
        opened.callback(close)
        return made

    return lambda: (run(), lambda: None)


def _timed(opener: Opener) -> tuple[float, float]:
    """Median latency in ms, and how many seconds it ran, which opening is no part of."""
    try:
        run, close = opener()
    except Exception:  # noqa: BLE001 - a contender that cannot even start has lost
        return float("inf"), 0.0
    start = time.perf_counter()
    try:
        run()
        times: list[float] = []
        end = time.perf_counter() + _WINDOW_S
        while len(times) < _LEAST_RUNS or time.perf_counter() < end:
            before = time.perf_counter()
            run()
            times.append((time.perf_counter() - before) * 1e3)
        return statistics.median(times), time.perf_counter() - start
    except Exception:  # noqa: BLE001 - nor can one that fails be chosen
        return float("inf"), time.perf_counter() - start
    finally:
        close()
