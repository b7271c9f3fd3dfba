"""Decisions of the guard, and the cache in which sessions share them.

A decision is stored twice: by the graph it was made for, which requires the model to be loaded, and by the digest of
the model's file or bytes, by which a later session finds it without loading the model.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from chrion.common.files import cache_folder, read_cached, write_cached
from chrion.errors import PlanError
from chrion.runtime.execution.engine import Footprint
from chrion.scheduler.plan import Plan

#: An uncertain decision is valid for this many seconds, and each further one in a row for four times as long, up to a
#: year; a machine that is always busy is not tuned all the time (choices, not measured).
_FIRST_RETRY_S, _RETRY_GROWTH, _LAST_RETRY_S = 60.0, 4.0, 365 * 86400.0

#: Times in files are at most this, the year 9999, in seconds since the epoch.
_LATEST_S = 253370764800.0


@dataclass(frozen=True, slots=True)
class TimedCandidate:
    """Result of one candidate in a comparison."""

    name: str
    #: Whether it is a plain session; otherwise it is a plan.
    plain: bool
    #: Latency in ms, by which candidates are compared: the lower quartile of the rounds, each of which counts by its
    #: lower quartile, or by its fastest run under interference. Infinite if the candidate failed or was not timed;
    #: decisions have only those that were.
    latency_ms: float
    #: Number of rounds in which it was timed.
    rounds: int
    #: Reason of its failure; empty if it did not fail.
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """Result of comparing plans with plain sessions."""

    #: Name of the fastest candidate.
    winner: str
    #: The plan, if a plan is the fastest candidate.
    plan: Plan | None
    #: Reason, for :meth:`chrion.HybridSession.explain`.
    why: str
    #: Whether it is based on timings with interference, so that it is made again after ``valid_s``.
    uncertain: bool = False
    #: Number of uncertain decisions in a row, including this one.
    attempts: int = 1
    #: Message about a missed SLO; empty if the SLO is met or there is none.
    missed: str = ""
    #: Candidates that were timed, the caller's plain session first if it was; empty if none was timed.
    timings: tuple[TimedCandidate, ...] = ()
    #: Memory of the plan; None if there is no plan, or if its memory is not limited (fixed shapes, or an accelerator).
    footprint: Footprint | None = None
    #: The plan with the best prediction, if timings were too uncertain to select one; it is compared on live requests.
    candidate: Plan | None = None
    #: Time at which it was stored, in seconds since the epoch; 0 before. Not compared.
    made_s: float = field(default=0.0, compare=False)
    #: File beside the model in which it was found; empty for one of this machine's cache. Not compared, not stored.
    origin: str = field(default="", compare=False)

    @property
    def latency_ms(self) -> float | None:
        """Latency of the winner in ms; None if it was not timed."""
        return next((timed.latency_ms for timed in self.timings if timed.name == self.winner), None)

    @property
    def plain_ms(self) -> float | None:
        """Latency of the fastest plain session in ms; None if none was timed."""
        return min((timed.latency_ms for timed in self.timings if timed.plain), default=None)

    @property
    def evidence(self) -> str:
        """The reason, with the time at which it was found and its origin, for :meth:`chrion.HybridSession.explain`."""
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.made_s)) if self.made_s else ""
        place = f"found in {self.origin}" if self.origin else ""
        details = ", ".join(part for part in (when and f"tuned {when}", place) if part)
        return f"{self.why} ({details})" if details else self.why

    @property
    def valid_s(self) -> float:
        """Number of seconds for which the decision is valid."""
        return retry_s(self.attempts) if self.uncertain else math.inf

    def to_json(self) -> dict[str, Any]:
        """Return the decision as data for JSON."""
        return {
            "winner": self.winner,
            "plan": self.plan.to_json() if self.plan else None,
            "why": self.why,
            "uncertain": self.uncertain,
            "attempts": self.attempts,
            "missed": self.missed,
            "timings": [[t.name, t.plain, t.latency_ms, t.rounds] for t in self.timings],
            "footprint": [self.footprint.plain_mb, self.footprint.plan_mb] if self.footprint else None,
            "candidate": self.candidate.to_json() if self.candidate else None,
            "made_s": self.made_s,
        }


def decision_from_json(content: Mapping[str, Any]) -> Decision:
    """Read a decision from data written by :meth:`Decision.to_json`.

    Raises:
        KeyError, TypeError, ValueError: A field is missing or of another type.
        PlanError: The plan is damaged.
    """
    plan, candidate = (None if content[key] is None else Plan.from_json(content[key]) for key in ("plan", "candidate"))
    return Decision(
        winner=str(content["winner"]),
        plan=plan,
        why=str(content["why"]),
        uncertain=bool(content["uncertain"]),
        attempts=int(content["attempts"]),
        missed=str(content["missed"]),
        timings=tuple(_timed(*timed) for timed in content["timings"]),
        footprint=None if content["footprint"] is None else Footprint(*map(float, content["footprint"])),
        candidate=candidate,
        made_s=_time_s(content["made_s"]),
    )


def _time_s(value: Any) -> float:
    """Return a time in seconds since the epoch that can be printed.

    Raises:
        TypeError, ValueError: The value is not such a number.
    """
    if not 0 <= float(value) <= _LATEST_S:
        raise ValueError(f"expected a time in seconds, found {value!r}")
    return float(value)


def _timed(name: object, plain: object, latency_ms: Any, rounds: Any) -> TimedCandidate:
    """Return a timing from a file.

    Raises:
        TypeError, ValueError: A field is of another type, or the latency is not positive and finite.
    """
    if not 0 < float(latency_ms) < math.inf:
        raise ValueError(f"latency of {name}: expected a positive number, found {latency_ms!r}")
    return TimedCandidate(str(name), bool(plain), float(latency_ms), int(rounds))


def retry_s(attempts: int) -> float:
    """Return the number of seconds before a decision is made again that was made so often."""
    growth = _RETRY_GROWTH ** max(0, min(attempts - 1, 100))  # a damaged file may hold any number
    return min(_FIRST_RETRY_S * growth, _LAST_RETRY_S)


class DecisionCache:
    """Decisions under one key, in a small file of the cache folder.

    Args:
        key: Everything that the decision depends on. Values are compared by their ``repr``.
        clock: Returns the time in seconds since the epoch.
    """

    def __init__(self, *key: object, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
        self._path = cache_folder() / "decisions" / f"{name}.json"

    def recall(self) -> Decision | None:
        """Return the stored decision.

        Returns:
            None if there is none, it is damaged, or it is no longer valid.
        """
        decision, age_s = self._stored()
        return decision if decision and 0 <= age_s < decision.valid_s else None

    def keep(self, decision: Decision) -> Decision:
        """Store a decision and return it with its number of attempts. Do nothing if the cache cannot be written."""
        if not decision.made_s:  # else it was made before, and is stored under another key
            before, _ = self._stored()
            if decision.uncertain and before and before.uncertain:
                decision = replace(decision, attempts=before.attempts + 1)
            decision = replace(decision, made_s=self._clock())
        self.store(decision)
        return decision

    def store(self, decision: Decision) -> None:
        """Store a decision as it is, with the time at which it was made."""
        write_cached(self._path, decision.to_json())

    def mark_uncertain(self) -> None:
        """Mark the stored decision as uncertain, so that it is made again after a while."""
        decision, _ = self._stored()
        if decision:
            self.keep(replace(decision, uncertain=True, made_s=0.0))

    def _stored(self) -> tuple[Decision | None, float]:
        """Return the decision in the file, valid or not, and its age in seconds."""
        content = read_cached(self._path)
        if content is None:
            return None, 0.0
        try:
            decision = decision_from_json(content)
            return decision, self._clock() - decision.made_s
        except (KeyError, TypeError, ValueError, OverflowError, PlanError):
            return None, 0.0
