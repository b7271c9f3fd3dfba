"""Measurement of the time to wake a thread that does not spin."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import onnxruntime as ort

from chrion.common.timing import time_calls
from chrion.devices import CPU_PROVIDER
from chrion.devices.intra_op import set_threads
from chrion.devices.small_models import product_session
from chrion.machine.cores import run_on_cores

#: The product that is timed: some tenths of a millisecond on one core, so that waking a thread pays.
_ROWS, _SIDE = 64, 512
#: Rounds, so that interference affects both sessions alike, and calls of each (choices, not measured).
_ROUNDS, _CALLS = 4, 60


def measure_wake_ms(cores: Sequence[int]) -> float:
    """Measure how much longer a matrix product on two cores takes if the second thread has to be woken.

    Args:
        cores: Logical CPUs, of which the first two are used.

    Returns:
        The difference in ms, 0 or more; 0 with a single core.
    """
    if len(cores) < 2:
        return 0.0
    x = np.ones((_ROWS, _SIDE), np.float32)

    def lower_quartile_ms(*, spinning: bool) -> float:
        options = ort.SessionOptions()
        set_threads(options, 2, cores[1:2], in_a_loop=spinning)
        session = product_session(CPU_PROVIDER, _ROWS, _SIDE, options)
        return statistics.quantiles(time_calls(lambda: session.run(None, {"x": x}), _CALLS), n=4)[0]

    def difference_ms() -> float:
        rounds = [(lower_quartile_ms(spinning=False), lower_quartile_ms(spinning=True)) for _ in range(_ROUNDS)]
        # Interference only adds time. The median of the wake-ups counts, since they vary.
        return statistics.median(woken for woken, _ in rounds) - min(spun for _, spun in rounds)

    [wake_ms] = run_on_cores(cores[:1], difference_ms)
    return max(0.0, wake_ms)
