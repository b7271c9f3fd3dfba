"""Times of a graph's operators inside one session of the whole model, as onnxruntime's own profiler reports them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.graph.model import Graph
from chrion.graph.ort_sessions import open_session, weights_folder_option

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
