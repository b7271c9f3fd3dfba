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
from chrion.files import cache_folder, read_cached, write_cached
from chrion.graph.loader import first_line
from chrion.profiler.interference import CoreMonitor, InterferenceMonitor
from chrion.scheduler.plan import Plan

#: How long a candidate is timed in one turn, after a run to warm up; and how often at least.
_WINDOW_S = 0.025
_LEAST_RUNS = 3
#: Rounds of turns at least; from then on none is begun once candidates have run for so many seconds.
_LEAST_ROUNDS, _BUDGET_S = 3, 3.0
#: Rounds that it takes to settle for a plain session that is ahead, or a plan that is so far ahead; and for any.
_ENOUGH_ROUNDS, _SURE, _ROUNDS = 6, 0.8, 12
#: Who is so far behind the best after one round goes on no more; after the least rounds, only who is close to it does,
#: and the best plain sessions, which every plan has to beat.
_FAR, _CLOSE = 1.5, 1.15
#: A plan must beat a plain session by so much, fastest run against fastest run: less is noise, and a plain session is
#: simpler. Nor may it be the slower one in most turns, as a lucky one would be.
_MARGIN = 0.95
#: How long to wait for moments in which nobody else uses the cores.
_PATIENCE_S = 2.0

#: Makes a candidate: what runs one request, and what takes it down.
Opener = Callable[[], tuple[Callable[[], object], Callable[[], None]]]


@dataclass(frozen=True, slots=True)
class Candidate:
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
    """How a contender did in its best turn; one that failed or was not timed has an infinite latency."""

    name: str
    median_ms: float
    resident_mb: float
    #: Why it failed; empty if it did not.
    failure: str = ""


class _Record:
    """A contender's turns so far; one that has failed once has lost."""

    def __init__(self, contender: Candidate) -> None:
        self.contender = contender
        self.medians_ms: list[float] = []
        #: The fastest run of all: what others take from the cores can only be added to it.
        self.fastest_ms = math.inf
        self.failure = ""

    @property
    def best_ms(self) -> float:
        """The median of its best turn; infinite if it had none."""
        return min(self.medians_ms, default=math.inf)

    @property
    def usual_ms(self) -> float:
        """The median over its turns."""
        return statistics.median(self.medians_ms)

    def add(self, times_ms: Sequence[float]) -> None:
        """Add a turn."""
        self.medians_ms.append(statistics.median(times_ms))
        self.fastest_ms = min(self.fastest_ms, *times_ms)

    def fail(self, error: Exception) -> None:
        """Discard all turns: a contender that fails once cannot be chosen."""
        self.medians_ms, self.fastest_ms = [math.inf], math.inf
        self.failure = f"{type(error).__name__}: {first_line(error)}"

    def beats(self, plain: Sequence[_Record]) -> bool:
        """Whether this is a plan worth having in place of any of some plain sessions."""
        fastest_ms = min((r.fastest_ms for r in plain), default=math.inf)
        as_long = [r for r in plain if len(r.medians_ms) >= len(self.medians_ms)]
        usual_ms = min((r.usual_ms for r in as_long), default=math.inf)
        return self.fastest_ms <= _MARGIN * fastest_ms and self.usual_ms <= usual_ms


def decide(
    contenders: Sequence[Candidate], slo_ms: float | None, monitor: InterferenceMonitor | None = None
) -> tuple[str, tuple[Trial, ...]]:
    """Time all contenders and choose.

    Args:
        contenders: Plain ones first: they win ties.
        slo_ms: Among those that meet it in their best turn, the one with the least accelerator memory is chosen;
            without it, or if none does, the fastest.
        monitor: Tells whether the cores are quiet; if missing, all physical cores are watched.

    Returns:
        The winner's name, and all trials. A lone contender wins without being timed.
    """
    monitor = monitor or CoreMonitor(physical_cores(), _PATIENCE_S)
    records = [_Record(c) for c in contenders]
    _race(records, monitor)
    trials = tuple(Trial(r.contender.name, r.best_ms, r.contender.resident_mb, r.failure) for r in records)
    fitting = [r for r in records if slo_ms is not None and r.best_ms <= slo_ms]
    least_mb = min((r.contender.resident_mb for r in fitting), default=0.0)
    plain, plans = _parted([r for r in fitting if r.contender.resident_mb == least_mb] or records)
    worthy = [r for r in plans if r.beats(plain)]
    return min([*plain, *worthy], key=lambda r: r.best_ms).contender.name, trials


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
        content = read_cached(self._path)
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
        write_cached(self._path, {"winner": decision.winner, "plan": plan, "why": decision.why})


def _race(records: Sequence[_Record], monitor: InterferenceMonitor) -> None:
    """Turns for everyone, alternating, and further ones for who may still win, until that is clear."""
    racing, ran_s = list(records), 0.0
    with contextlib.ExitStack() as opened:
        openers = {r: _kept_open(r.contender, opened) if r.contender.lasting else r.contender.open for r in records}
        for done in range(_ROUNDS):
            if done:
                racing = _still_racing(racing, _CLOSE if done >= _LEAST_ROUNDS else _FAR)
            spent = done >= _LEAST_ROUNDS and ran_s > _BUDGET_S
            if len(racing) < 2 or spent or (done >= _ENOUGH_ROUNDS and _clear(racing)):
                break
            for record in racing:
                try:
                    times_ms, took_s = _timed(openers[record], monitor)
                except Exception as error:  # noqa: BLE001 - whatever a contender raises, it has lost
                    record.fail(error)
                    continue
                record.add(times_ms)
                ran_s += took_s


def _still_racing(racing: Sequence[_Record], close: float) -> list[_Record]:
    """Those close to the best, and plain sessions: the caller's own, the fastest in a run, and the usually fastest."""
    running = [r for r in racing if r.fastest_ms < math.inf]
    close_ms = close * min((r.fastest_ms for r in running), default=0.0)
    plain = _parted(running)[0]
    kept = [plain[0], min(plain, key=lambda r: r.fastest_ms), min(plain, key=lambda r: r.usual_ms)] if plain else []
    return [r for r in running if r.fastest_ms <= close_ms or r in kept]


def _clear(racing: Sequence[_Record]) -> bool:
    """Whether plain sessions are ahead of the plans, or a plan far ahead of them."""
    plain, plans = _parted(racing)
    if not plain or not plans:
        return True
    plain_ms, plan = min(r.fastest_ms for r in plain), min(plans, key=lambda r: r.fastest_ms)
    return plan.fastest_ms > plain_ms or (plan.fastest_ms <= _SURE * plain_ms and plan.beats(plain))


def _parted(records: Sequence[_Record]) -> tuple[list[_Record], list[_Record]]:
    """Plain sessions and plans."""
    return [r for r in records if r.contender.plain], [r for r in records if not r.contender.plain]


def _kept_open(contender: Candidate, opened: contextlib.ExitStack) -> Opener:
    """Opens a contender once, and takes it down in the end."""

    @functools.cache
    def run() -> Callable[[], object]:
        made, close = contender.open()
        opened.callback(close)
        return made

    return lambda: (run(), lambda: None)


def _timed(opener: Opener, monitor: InterferenceMonitor) -> tuple[list[float], float]:
    """Return the latencies of one turn in ms, and how many seconds they took all together.

    Raises:
        Exception: What the contender raises when it is opened or run.
    """
    run, close = opener()
    try:
        run()
        monitor.wait()  # only now: opening takes a while
        start = time.perf_counter()
        times: list[float] = []
        run()  # to warm up
        while len(times) < _LEAST_RUNS or time.perf_counter() < start + _WINDOW_S:
            before = time.perf_counter()
            run()
            times.append((time.perf_counter() - before) * 1e3)
        return times, time.perf_counter() - start
    finally:
        close()
