"""The measurement of several models: its combined graph, its candidates, and the variance of queues."""

from __future__ import annotations

import contextlib
import multiprocessing
from concurrent.futures import Future
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from bench_multi import (
    SETS,
    combine,
    combined_graph,
    feed,
    figures,
    global_thread_pool,
    one_thread_ms,
    queue_variance,
    serialised,
)

from chrion.serving.multi.simulation import Served

SMALL = {"resolution": 32, "width": 0.25}


def done(model: str, arrival_ms: float, end_ms: float) -> Served:
    """Return a task that was done within its time of 20 ms, or late."""
    return Served(model, arrival_ms, end_ms, "done", 20.0)


def test_the_variance_is_that_between_queues() -> None:
    """While one model has two open tasks and another none, it is 1; while both have two, 0."""
    tasks = [done("a", 0, 500), done("a", 0, 500), done("b", 100, 500), done("b", 100, 500), done("b", 200, 500)]
    assert queue_variance([*tasks[:2], done("b", 200, 300)]) == pytest.approx(1.0)
    assert queue_variance(tasks) == pytest.approx(0.5, abs=0.03)


def test_figures_are_those_of_all_windows() -> None:
    """Throughput, mean, 99th percentile, and the shares of misses, of those of each model and of drops."""
    first = [done("a", 0, 10), done("a", 0, 10), done("b", 990, 1000)]
    windows = [first, [done("a", 0, 30), Served("b", 0, 1000, "full", 20.0)]]
    cells = figures(windows, ["b", "a"]).split(" | ")
    assert cells[:2] == ["2.0", "15.0"]
    assert cells[3:6] == ["40.0%", "50.0% 33.3%", "20.0%"]


def test_the_published_set_has_the_rates_of_table_2() -> None:
    """Lin et al. (2024): 30, 60 and 120 tasks per second for Inception-v3, ResNet-50 and SqueezeNet."""
    rates = {"inception-v3": 30, "resnet-50": 60, "squeezenet": 120}
    assert {name: 30 * share for name, (_, share) in SETS["published"].items()} == rates


def test_a_combined_graph_has_the_outputs_of_its_models() -> None:
    """Each model's output is that of its own session, and tasks of all models are served in rounds."""
    models = {"a": serialised("squeezenet", SMALL), "b": serialised("googlenet", SMALL)}
    feeds: dict[str, dict[str, Any]] = {name: feed(model) for name, model in models.items()}
    session = ort.InferenceSession(combine(models), providers=["CPUExecutionProvider"])
    inputs = {f"{name}/{key}": value for name, own in feeds.items() for key, value in own.items()}
    outputs = dict(zip([o.name for o in session.get_outputs()], session.run(None, inputs), strict=True))
    for name, model in models.items():
        plain = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
        np.testing.assert_allclose(outputs[f"{name}/Y"], plain.run(None, feeds[name])[0], rtol=1e-4, atol=1e-6)
    with contextlib.ExitStack() as stack:
        submit = stack.enter_context(combined_graph(models, feeds))
        tasks: list[Future[Any]] = [submit(name) for name in ("a", "a", "b", "a")]
        assert all(len(task.result(60)) == 2 for task in tasks)


def test_sessions_of_a_global_pool_serve_in_another_process() -> None:
    """All tasks are done, and the process ends with the context."""
    models = {"a": serialised("squeezenet", SMALL)}
    with global_thread_pool(models) as submit:
        tasks = [submit("a") for _ in range(5)]
        assert [task.result(60) for task in tasks] == [None] * 5
    assert not multiprocessing.active_children()


def test_inputs_are_those_of_the_model() -> None:
    """Whole numbers are valid indices, and the time of one thread is measured."""
    model = serialised("bert", {"layers": 1, "seq": 8, "hidden": 16, "heads": 2, "inner": 16})
    assert one_thread_ms(model, feed(model)) > 0
