"""The time until a session notices that a neighbour has become busy, and that it is idle again."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serving.fleet import Fleet, Trial
from serving.surroundings import Neighbour
from serving.worker import Times

#: Times at which the neighbour becomes busy and idle again, and length of a trial, in seconds.
_BUSY_S, _IDLE_S, _TRIAL_S = 4.0, 7.0, 11.0
#: Length of a window whose mean latency is compared, interval between two windows, and windows in a row that must be
#: fast enough.
_WINDOW_S, _STEP_S, _IN_A_ROW = 0.25, 0.05, 3
#: Quantile of the windows of a session beside the same neighbour, up to which a window is as fast as they are.
_USUAL = 0.95


@dataclass(frozen=True, slots=True)
class Noticed:
    """What a trial showed.

    Attributes:
        busy_s: Time from the start of the neighbour until latencies were as low as a plain session's beside it.
        idle_s: Time from its end until latencies were as low as before it.
    """

    busy_s: float
    idle_s: float


def usual_ms(trials: Sequence[Trial]) -> float:
    """Return the mean latency that few windows of a session exceed, in ms."""
    means_ms = [_means(trial, float(trial.starts_s[0]), float(trial.starts_s[-1]), _WINDOW_S)[1] for trial in trials]
    return float(np.quantile(np.concatenate(means_ms), _USUAL))


def time_noticing(fleet: Fleet, neighbour: Neighbour, plain_ms: float) -> Noticed:
    """Let one client call a session while the neighbour becomes busy and idle again.

    Args:
        fleet: Processes of the session.
        neighbour: The neighbour, suspended.
        plain_ms: Mean latency that few windows of the best plain session exceed beside the busy neighbour.
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
    before = trial.starts_s < busy - 0.1
    quiet = Trial(trial.starts_s[before], trial.latencies_ms[before], trial.ms_per_request, trial.cpu_ms)
    return Noticed(time_until(trial, busy, idle, plain_ms), time_until(trial, idle, np.inf, usual_ms([quiet])))


def time_until(trial: Trial, start_s: float, end_s: float, limit_ms: float) -> float:
    """Return the time from a start until the mean latencies of windows stay within a limit; or infinity."""
    starts_s, means_ms = _means(trial, start_s, min(end_s, float(trial.starts_s[-1])), _STEP_S)
    fast_enough = 0
    for at_s, mean_ms in zip(starts_s, means_ms, strict=True):
        fast_enough = fast_enough + 1 if mean_ms <= limit_ms else 0
        if fast_enough == _IN_A_ROW:
            return float(max(0.0, at_s - start_s - (_IN_A_ROW - 1) * _STEP_S))
    return float("inf")


def _means(trial: Trial, start_s: float, end_s: float, step_s: float) -> tuple[Times, Times]:
    """Return the starts of the windows between two times that have requests, and their mean latencies in ms."""
    windows = [
        (at_s, trial.latencies_ms[inside].mean())
        for at_s in np.arange(start_s, end_s - _WINDOW_S, step_s)
        if (inside := (trial.starts_s >= at_s) & (trial.starts_s < at_s + _WINDOW_S)).any()
    ]
    starts_s, means_ms = np.array(windows, np.float64).reshape(-1, 2).T
    return starts_s, means_ms


def format_noticed(model: str, noticed: Sequence[Noticed]) -> tuple[str, ...]:
    """Return the line of a model: medians and longest times."""
    cells = [model, str(len(noticed))]
    for times_s in ([each.busy_s for each in noticed], [each.idle_s for each in noticed]):
        cells += [
            f"{time_s:.2f}" if time_s < np.inf else "not noticed" for time_s in (np.median(times_s), max(times_s))
        ]
    return tuple(cells)


HEAD = ("model", "trials", "busy: median, s", "longest, s", "idle again: median, s", "longest, s")
TEXT = f"""Times from the moment the neighbour becomes busy until HybridSession's mean latency over {_WINDOW_S} s is
what the best plain session's is in {_USUAL:.0%} of such windows beside that neighbour, and from the moment it is idle
again until it is what it was in {_USUAL:.0%} of the windows before. The neighbour is idle for {_BUSY_S:.0f} seconds,
busy for {_IDLE_S - _BUSY_S:.0f}, and idle for {_TRIAL_S - _IDLE_S:.0f} again; longer times are not seen."""
