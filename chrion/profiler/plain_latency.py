"""Times of a whole model in plain sessions on the CPU: its least latency, and the times of its operators inside."""

from __future__ import annotations

import gc
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.common.timing import time_call, time_calls_until
from chrion.devices import CPU_PROVIDER
from chrion.graph.model import Graph
from chrion.graph.ort_sessions import first_line, open_session, weights_folder_option
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


#: Runs before the measured ones, and those.
_WARM_UP, _RUNS = 2, 5
_SUFFIX = "_kernel_time"


def measure_node_times(
    graph: Graph, feed: Mapping[str, np.ndarray[Any, Any]], options: ort.SessionOptions
) -> tuple[float, ...]:
    """Return the time of every operator in ms: the least of several runs, since interference only adds time.

    Args:
        graph: The graph.
        feed: Its inputs.
        options: The session options, of one thread; they are changed.

    Raises:
        ModelError: onnxruntime refuses the model.
        Exception: Raised by onnxruntime while it runs the model.
    """
    with tempfile.TemporaryDirectory(prefix="chrion-") as folder:
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder, "times"))
        for key, value in weights_folder_option(graph.weights_folder).items():
            options.add_session_config_entry(key, value)
        session = open_session(graph.model, options, graph.name)
        for _ in range(_WARM_UP + _RUNS):
            session.run(None, feed)
        events = json.loads(Path(session.end_profiling()).read_text())
    times: dict[str, list[float]] = {}
    for event in events:
        if event["cat"] == "Node" and event["name"].endswith(_SUFFIX):
            times.setdefault(event["name"].removesuffix(_SUFFIX), []).append(event["dur"] / 1e3)
    least = {name: min(own[_WARM_UP:] or own) for name, own in times.items()}
    nodes = graph.model.graph.node
    return tuple(sum(least.get(nodes[n].name, 0.0) for n in group) for group in graph.nodes)
