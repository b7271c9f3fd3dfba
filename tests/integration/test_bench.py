"""Racing rivals, and the inputs they are given."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from chrion import load
from chrion.benchmark.latency import hybrid_candidate, largest_difference, plain_baselines, race, read_feed
from chrion.errors import OptionError
from chrion.profiler.measure import synthetic_inputs
from helpers import (
    BOOL,
    FLOAT,
    INT64,
    QuietCores,
    alternating,
    assert_equal,
    branches,
    forced_plan,
    make_model,
    node,
    plain,
    value,
)

Log = list[tuple[str, str]]


def rival(name: str, log: Log) -> Callable[[], tuple[Callable[[], object], Callable[[], None]]]:
    """One that notes when it is made, run and taken down."""

    def make() -> tuple[Callable[[], object], Callable[[], None]]:
        log.append((name, "made"))
        return lambda: log.append((name, "run")), lambda: log.append((name, "closed"))

    return make


def test_each_rival_has_the_machine_to_itself_in_alternating_turns() -> None:
    """Nobody is made before the last one is taken down; every round starts with another."""
    log: Log = []
    steps: list[tuple[int, int, str]] = []
    timings = race(
        {name: rival(name, log) for name in "abc"},
        cycles=3,
        turn_s=0.0,
        progress=lambda *step: steps.append(step),
        monitor=QuietCores(),
    )
    turns = [(name, what) for name, what in log if what != "run"]
    order = "abc" + "bca" + "cab"
    assert turns == [(name, what) for name in order for what in ("made", "closed")]
    alive = ""
    for name, what in log:
        alive = {"made": name, "closed": ""}.get(what, alive)
        assert what != "run" or alive == name
    assert [t.name for t in timings] == ["a", "b", "c"]
    assert all(t.runs >= 15 and t.low_ms <= t.median_ms <= t.high_ms for t in timings)
    assert steps == [(at + 1, 9, name) for at, name in enumerate(order)]


def test_a_disturbed_turn_is_timed_again() -> None:
    """Its times are thrown away, and its rival is timed anew at once."""
    log: Log = []
    timings = race(
        {name: rival(name, log) for name in "ab"}, cycles=1, turn_s=0.0, monitor=QuietCores(disturbed_at=[0])
    )
    assert [name for name, what in log if what == "made"] == ["a", "b"]
    runs = {name: log.count((name, "run")) for name in "ab"}
    assert timings[0].runs < runs["a"] / 2 + 1
    assert timings[1].runs < runs["b"]


def test_a_machine_that_is_never_quiet_is_timed_all_the_same() -> None:
    """After some tries the last times stand."""
    monitor = QuietCores(disturbed_at=range(99))
    (timing,) = race({"a": rival("a", [])}, cycles=2, turn_s=0.0, monitor=monitor)
    assert timing.runs >= 10
    assert monitor.looks == 2 * 8


def test_the_cores_are_looked_at_when_the_rival_is_ready() -> None:
    """Making a session takes a while, in which much may change; so looks are next to what is timed."""
    log: Log = []
    monitor = QuietCores()
    monitor.wait = lambda: not log.append(("", "before"))  # type: ignore[method-assign, func-returns-value]
    monitor.has_interference = lambda: bool(log.append(("", "after")))  # type: ignore[method-assign, func-returns-value]
    race({"a": rival("a", log)}, cycles=1, turn_s=0.0, monitor=monitor)
    steps = [what for what, _ in itertools.groupby(what for _, what in log)]
    assert steps == ["made", "run", "before", "run", "after", "closed"]


def test_without_patience_turns_are_taken_as_they_come() -> None:
    """Once each, however disturbed."""
    monitor = QuietCores(disturbed_at=range(99))
    monitor.wait = lambda: False  # type: ignore[method-assign]
    race({"a": rival("a", [])}, cycles=2, turn_s=0.0, monitor=monitor)
    assert monitor.looks == 0


def test_a_rival_that_fails_is_taken_down() -> None:
    """Its error reaches the caller."""
    closed: list[int] = []

    def fail() -> object:
        raise KeyError("broken")

    with pytest.raises(KeyError):
        race({"a": lambda: (fail, lambda: closed.append(1))}, cycles=1)
    assert closed == [1]


def test_hybrid_and_plain_rivals_compute_the_same() -> None:
    """What is timed is the model."""
    model = branches()
    graph = load(model)
    feed = synthetic_inputs(graph)
    expected = plain(model, feed)
    makers = {
        "hybrid": hybrid_candidate(graph, forced_plan(graph, alternating(graph)), feed),
        **plain_baselines(model.SerializeToString(), feed),
    }
    assert len(makers) == 4
    for make in makers.values():
        run, close = make()
        assert_equal(run(), expected)  # type: ignore[arg-type]
        close()


def test_made_up_inputs_fit_the_model() -> None:
    """Every type and shape; the same seed gives the same values."""
    inputs = [value("x", FLOAT, [2, 3]), value("i", INT64, [0]), value("b", BOOL, [])]
    nodes = [node("Identity", [i.name], ["o" + i.name]) for i in inputs]
    graph = load(make_model(nodes, inputs, [value("o" + i.name, i.type.tensor_type.elem_type, None) for i in inputs]))
    feed = synthetic_inputs(graph)
    assert {n: (a.dtype.name, a.shape) for n, a in feed.items()} == {
        "x": ("float32", (2, 3)),
        "i": ("int64", (0,)),
        "b": ("bool", ()),
    }
    np.testing.assert_array_equal(feed["x"], synthetic_inputs(graph)["x"])
    assert not np.array_equal(feed["x"], synthetic_inputs(graph, 1)["x"])


def test_inputs_are_read_by_name(tmp_path: Path) -> None:
    """A missing one is named, with what the file holds instead."""
    graph = load(branches())
    np.savez(tmp_path / "x.npz", x=np.ones((2, 4), np.float32))
    np.testing.assert_array_equal(read_feed(tmp_path / "x.npz", graph)["x"], np.ones((2, 4)))
    np.savez(tmp_path / "y.npz", y=np.ones(3))
    with pytest.raises(OptionError, match=r"no array for input 'x' \(it holds y\)"):
        read_feed(tmp_path / "y.npz", graph)


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([NAN, 1.0], [NAN, 1.0], 0.0),
        ([NAN, 1.0], [1.0, 1.0], INFINITE),
        ([INFINITE], [INFINITE], 0.0),
        ([INFINITE], [-INFINITE], INFINITE),
        ([1.0], [1.0, 2.0], INFINITE),
        ([], [], 0.0),
        (["a"], ["a"], 0.0),
        (["a"], ["b"], INFINITE),
        ([True], [False], 1.0),
        ([2**40], [2**40 + 3], 3.0),
    ],
)
def test_the_largest_difference(ours: list[object], theirs: list[object], expected: float) -> None:
    """Absolute; shapes, NaNs and text that differ are infinitely far apart."""
    assert largest_difference([np.array(ours)], [np.array(theirs)]) == expected
