"""The guard: is the plan really better than a plain session? Timed on the spot, and remembered.

A plan that is slower than what the user had before is worse than none, however good predictions are. So a session that
makes its own plan first times its candidates: the plain session as the caller would have it, plain ones on the CPU with
other numbers of threads, and the plan. Each has the machine to itself, for a fraction of a second. A plan that seems to
win has to go on doing so for longer than a plain session: where others use the cores, a few turns tell little. The
winner is kept, here and in the cache: per machine, model, shapes and goal.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chrion.cores import physical_cores
from chrion.errors import PlanError
from chrion.files import cache_folder, recall, remember
from chrion.profiler.quiet import CoreWatch, Watch
from chrion.scheduler.plan import Plan

#: How long a candidate is timed in one turn, after a run to warm up; and how often at least.
_WINDOW_S = 0.025
_LEAST_RUNS = 3
#: Rounds of turns at least; from then on none is begun once candidates have run for so many seconds.
_LEAST_ROUNDS, _BUDGET_S = 3, 3.0
#: Rounds that it takes to settle for a plain session that is ahead, or a plan that is so far ahead; and for any.
_ENOUGH_ROUNDS, _SURE, _ROUNDS = 6, 0.8, 12
#: Who is so far behind the best after one round goes on no more; after the least rounds, only who is close to it does,
#: and the best plain session, which every plan has to beat.
_FAR, _CLOSE = 1.5, 1.15
#: A plan must beat a plain session by so much, fastest run against fastest run: less is noise, and a plain session is
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


class _Record:
    """A contender's turns so far."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self.medians_ms: list[float] = []
        #: The fastest run of all: what others take from the cores can only be added to it.
        self.fastest_ms = math.inf

    def beats(self, plain: _Record | None) -> bool:
        """Whether this is a plan worth having in place of a plain session."""
        if plain is None:
            return True
        usual_ms = statistics.median(self.medians_ms)
        return self.fastest_ms <= _MARGIN * plain.fastest_ms and usual_ms <= statistics.median(plain.medians_ms)


def decide(
    contenders: Sequence[Contender], slo_ms: float | None, watch: Watch | None = None
) -> tuple[str, tuple[Trial, ...]]:
    """Time all contenders and choose.

    Args:
        contenders: Plain ones first: they win ties.
        slo_ms: Among those that meet it in their best turn, the one with the least accelerator memory is chosen;
            without it, or if none does, the fastest.
        watch: Tells whether the cores are quiet; if missing, all physical cores are watched.

    Returns:
        The winner's name, and all trials.
    """
    watch = watch or CoreWatch(physical_cores(), _PATIENCE_S)
    records = [_Record(c) for c in contenders]
    _race(records, watch)
    trials = tuple(Trial(r.contender.name, min(r.medians_ms), r.contender.resident_mb) for r in records)
    fitting = [r for r in records if slo_ms is not None and min(r.medians_ms) <= slo_ms]
    least_mb = min((r.contender.resident_mb for r in fitting), default=0.0)
    able = [r for r in fitting if r.contender.resident_mb == least_mb] or records
    worthy = [r for r in able if r.contender.plain or r.beats(_fastest(able, plain=True))]
    return min(worthy, key=lambda r: r.fastest_ms).contender.name, trials


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


def _race(records: Sequence[_Record], watch: Watch) -> None:
    """Turns for everyone, alternating, and further ones for who may still win, until that is clear."""
    racing, ran_s = list(records), 0.0
    with contextlib.ExitStack() as opened:
        openers = {r: _kept_open(r.contender, opened) if r.contender.lasting else r.contender.open for r in records}
        for done in range(_ROUNDS):
            if done:
                close_ms = (_CLOSE if done >= _LEAST_ROUNDS else _FAR) * min(r.fastest_ms for r in racing)
                plain = _fastest(racing, plain=True)
                racing = [r for r in racing if r.fastest_ms <= close_ms or r is plain]
            spent = done >= _LEAST_ROUNDS and ran_s > _BUDGET_S
            if len(racing) < 2 or spent or (done >= _ENOUGH_ROUNDS and _clear(racing)):
                break
            for record in racing:
                times_ms, took_s = _timed(openers[record], watch)
                record.medians_ms.append(statistics.median(times_ms))
                record.fastest_ms = min(record.fastest_ms, *times_ms)
                ran_s += took_s


def _clear(racing: Sequence[_Record]) -> bool:
    """Whether plain sessions are ahead of the plans, or a plan far ahead of them."""
    plain, plan = _fastest(racing, plain=True), _fastest(racing, plain=False)
    if plain is None or plan is None or plan.fastest_ms > plain.fastest_ms:
        return True
    return plan.fastest_ms <= _SURE * plain.fastest_ms and plan.beats(plain)


def _fastest(records: Sequence[_Record], *, plain: bool) -> _Record | None:
    """The plain session, or the plan, with the fastest run; None where there is none."""
    return min((r for r in records if r.contender.plain is plain), key=lambda r: r.fastest_ms, default=None)


def _kept_open(contender: Contender, opened: contextlib.ExitStack) -> Opener:
    """Opens a contender once, and takes it down in the end."""

    @functools.cache
    def run() -> Callable[[], object]:
        made, close = contender.open()
        opened.callback(close)
        return made

    return lambda: (run(), lambda: None)


def _timed(opener: Opener, watch: Watch) -> tuple[list[float], float]:
    """Latencies in ms, and how many seconds they took all together."""
    try:
        run, close = opener()
    except Exception:  # noqa: BLE001 - a contender that cannot even start has lost
        return [math.inf], 0.0
    start = time.perf_counter()
    try:
        run()
        watch.wait()  # only now: opening takes a while
        times: list[float] = []
        start = time.perf_counter()
        while len(times) < _LEAST_RUNS or time.perf_counter() < start + _WINDOW_S:
            before = time.perf_counter()
            run()
            times.append((time.perf_counter() - before) * 1e3)
        return times, time.perf_counter() - start
    except Exception:  # noqa: BLE001 - nor can one that fails be chosen
        return [math.inf], time.perf_counter() - start
    finally:
        close()
