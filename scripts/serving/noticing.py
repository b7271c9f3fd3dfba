"""The time until a session notices that a neighbour has become busy, and that it is idle again."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serving.fleet import Fleet, Trial
from serving.surroundings import Neighbour

#: Times at which the neighbour becomes busy and idle again, and length of a trial, in seconds.
_BUSY_S, _IDLE_S, _TRIAL_S = 4.0, 7.0, 11.0
#: Length of a window whose median latency is compared, interval between two windows, and windows in a row that must be
#: fast enough.
_WINDOW_S, _STEP_S, _IN_A_ROW = 0.2, 0.05, 3
_TOLERANCE = 1.05


@dataclass(frozen=True, slots=True)
class Noticed:
    """What a trial showed.

    Attributes:
        busy_s: Time from the start of the neighbour until latencies were as low as a plain session's beside it.
        idle_s: Time from its end until latencies were as low as before it.
    """

    busy_s: float
    idle_s: float


def time_noticing(fleet: Fleet, neighbour: Neighbour, plain_ms: float) -> Noticed:
    """Let one client call a session while the neighbour becomes busy and idle again.

    Args:
        fleet: Processes of the session.
        neighbour: The neighbour, suspended.
        plain_ms: Median latency of the best plain session beside the busy neighbour.
    """
    changes: list[float] = []

    def change() -> None:
        for pause_s, act in ((_BUSY_S, neighbour.resume), (_IDLE_S - _BUSY_S, neighbour.suspend)):
            time.sleep(pause_s)
            act()
            changes.append(time.perf_counter())

    changer = threading.Thread(target=change)
    changer.start()
    trial = fleet.trial(1, _TRIAL_S, warm_up_s=0.0)
    changer.join()
    busy, idle = changes
    before_ms = float(np.median(trial.latencies_ms[trial.starts_s < busy - 0.1]))
    return Noticed(_time_until(trial, busy, idle, plain_ms), _time_until(trial, idle, np.inf, before_ms))


def _time_until(trial: Trial, start_s: float, end_s: float, limit_ms: float) -> float:
    """Return the time from a start until the median latencies of windows stay within the tolerance; or infinity."""
    end_s = min(end_s, float(trial.starts_s[-1]))
    fast_enough = 0
    for at_s in np.arange(start_s, end_s - _WINDOW_S, _STEP_S):
        inside = (trial.starts_s >= at_s) & (trial.starts_s < at_s + _WINDOW_S)
        median_ms = np.median(trial.latencies_ms[inside]) if inside.any() else np.inf
        fast_enough = fast_enough + 1 if median_ms <= _TOLERANCE * limit_ms else 0
        if fast_enough == _IN_A_ROW:
            return float(max(0.0, at_s - start_s - (_IN_A_ROW - 1) * _STEP_S))
    return float("inf")


def format_noticed(model: str, noticed: Sequence[Noticed]) -> tuple[str, ...]:
    """Return the line of a model: medians and longest times."""
    cells = [model, str(len(noticed))]
    for times_s in ([each.busy_s for each in noticed], [each.idle_s for each in noticed]):
        cells += [
            f"{time_s:.2f}" if time_s < np.inf else "not noticed" for time_s in (np.median(times_s), max(times_s))
        ]
    return tuple(cells)


HEAD = ("model", "trials", "busy: median, s", "longest, s", "idle again: median, s", "longest, s")
TEXT = """Times from the moment the neighbour becomes busy until HybridSession's median latency over 0.2 s is within 5 %
of the best plain session's beside that neighbour, and from the moment it is idle again until the latency is within 5 %
of the one before. The neighbour is idle for four seconds, busy for three, and idle for
four again; longer times are not seen."""
