"""The latency of a whole model in a plain session on the CPU, with the number of threads with which it is lowest."""

from __future__ import annotations

import gc
import logging
import statistics
import time
from functools import partial

import onnxruntime as ort

from chrion.common.timing import time_call, time_calls_until
from chrion.devices import CPU_PROVIDER
from chrion.graph.model import Graph
from chrion.graph.ort_sessions import first_line
from chrion.profiler.profiles import PlainLatency
from chrion.profiler.synthetic_inputs import synthetic_inputs

log = logging.getLogger(__name__)

#: Durations of the warm-up and of the trial of each session (choices, not measured), and the fewest runs in a trial.
_WARM_UP_S, _TRIAL_S, _MIN_RUNS = 0.02, 0.08, 3
#: Trials of each session. Interference only ever adds time, so the fastest counts.
_ROUNDS = 2


def measure_plain_latency(graph: Graph, cores: int) -> PlainLatency | None:
    """Time plain sessions of the model of a graph with one thread, with a thread per core, and between.

    The sessions are those that a caller of onnxruntime would open. Each is timed with no other one open, since their
    threads spin on after a run.

    Args:
        graph: The graph.
        cores: The number of CPU cores to use.

    Returns:
        The fastest; None if the model does not run on synthetic inputs.
    """
    counts = sorted({1, cores // 2 if cores >= 8 else cores, cores} - {0})
    try:
        trials = [PlainLatency(count, _trial_ms(graph, count)) for _ in range(_ROUNDS) for count in counts]
    except Exception as error:  # noqa: BLE001 - any error of a kernel; the latency is then predicted
        log.info("model %s: its plain session is not measured: %s", graph.name, first_line(error))
        return None
    return min(trials, key=lambda trial: trial.latency_ms, default=None)


def _trial_ms(graph: Graph, threads: int) -> float:
    """Return the median latency of one session."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    session = graph.source.use(lambda model: ort.InferenceSession(model, options, [CPU_PROVIDER]))
    run = partial(session.run, None, synthetic_inputs(graph))
    try:
        if time_call(run) < _TRIAL_S * 1e3:
            time_calls_until(run, time.perf_counter() + _WARM_UP_S)
        return statistics.median(time_calls_until(run, time.perf_counter() + _TRIAL_S, _MIN_RUNS))
    finally:
        del session, run
        gc.collect()
