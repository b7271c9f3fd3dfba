"""MultiSession: several models whose blocks share the cores, with real sessions and threads."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, wait
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from chrion.errors import DroppedError, OptionError
from chrion.runtime.block_chain import BlockChain
from chrion.serving.multi.combined import TopPlan
from chrion.serving.multi.dispatcher import Replan
from chrion.serving.multi.policies import SESSION_POLICIES
from chrion.serving.multi.session import MultiSession
from chrion.serving.multi.top import TopDispatcher
from chrion.serving.multi.top_search import TopPlanner
from chrion.zoo import build

SMALL = {"resolution": 64, "width": 0.25}
FEED = {"X": np.full((1, 3, 64, 64), 0.5, np.float32)}


@pytest.fixture(scope="module")
def models() -> dict[str, onnx.ModelProto]:
    return {"light": build("squeezenet", SMALL), "heavy": build("googlenet", SMALL)}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let no block begin until the event is set."""
    event = threading.Event()
    begin = BlockChain.begin

    def late(self: BlockChain, feed: Any) -> Any:
        event.wait()
        return begin(self, feed)

    event.set()
    monkeypatch.setattr(BlockChain, "begin", late)
    yield event
    event.set()


@pytest.mark.parametrize("policy", sorted(SESSION_POLICIES))
def test_outputs_are_those_of_onnxruntime(models: dict[str, onnx.ModelProto], policy: str) -> None:
    """Tasks of both models from several threads have the outputs of plain sessions, by every policy."""
    expected = {}
    for name, model in models.items():
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        plain = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        expected[name] = plain.run(None, FEED)[0]
    futures: list[tuple[str, Future[dict[str, Any]]]] = []
    with MultiSession(models, policy=policy, deadlines="10s", block=0.1) as session:
        assert all(len(rules.block_ms) > 1 for rules in session.rules.values())

        def submit() -> None:
            futures.extend((name, session.submit(name, FEED)) for _ in range(5) for name in models)

        threads = [threading.Thread(target=submit) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name, future in futures:
            np.testing.assert_array_equal(future.result(60)["Y"], expected[name])
        assert session.counts() == {name: {"done": 15, "waiting": 0} for name in models}


def test_closing_serves_what_was_submitted(models: dict[str, onnx.ModelProto]) -> None:
    """After ``close`` all tasks are over, and further ones are refused; closing again does nothing."""
    session = MultiSession(models)
    futures = [session.submit(name, FEED) for name in models for _ in range(5)]
    session.close()
    assert all(future.done() and future.result()["Y"].shape == (1, 1000) for future in futures)
    session.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.submit("light", FEED)


def test_a_callback_may_submit_and_close(models: dict[str, onnx.ModelProto]) -> None:
    """A callback runs on a lane without blocking it: it can submit the next task, and close the session."""
    session = MultiSession(models)
    last: Future[Future[dict[str, Any]]] = Future()

    def follow(_: Future[dict[str, Any]]) -> None:
        following = session.submit("heavy", FEED)
        session.close()
        last.set_result(following)

    session.submit("light", FEED).add_done_callback(follow)
    assert last.result(60).result(60)["Y"].shape == (1, 1000)
    session.close()


def test_a_failing_block_fails_its_task_only(
    models: dict[str, onnx.ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the failure, and later tasks are served."""
    begin = BlockChain.begin
    failing = [True]

    def broken(self: BlockChain, feed: Any) -> Any:
        if failing.pop() if failing else False:
            raise MemoryError("no memory")
        return begin(self, feed)

    with MultiSession(models) as session:
        monkeypatch.setattr(BlockChain, "begin", broken)
        with pytest.raises(MemoryError, match="no memory"):
            session.submit("light", FEED).result(60)
        assert session.submit("light", FEED).result(60)["Y"].shape == (1, 1000)
        assert session.counts()["light"] == {"failed": 1, "done": 1, "waiting": 0}


def test_a_stream_keeps_its_latest_frame(models: dict[str, onnx.ModelProto], gate: threading.Event) -> None:
    """With a queue of one that drops the oldest, the tasks that begin are the first ones and the last one."""
    with MultiSession(models, queue=1, drop="oldest", cores=1) as session:
        gate.clear()
        futures = [session.submit("light", FEED) for _ in range(5)]
        dropped = [future.exception(60) for future in futures[1:-1]]
        gate.set()
        wait([futures[0], futures[-1]], 60)
    assert all(isinstance(error, DroppedError) and error.outcome == "full" for error in dropped)
    assert futures[0].exception() is futures[-1].exception() is None


def test_late_tasks_are_dropped_on_request(models: dict[str, onnx.ModelProto], gate: threading.Event) -> None:
    """Tasks that wait beyond their deadlines raise an error; those before are served."""
    with MultiSession(models, deadlines="10s", drop_late=True, cores=1) as session:
        gate.clear()
        first = session.submit("light", FEED)
        late = session.submit("heavy", FEED, deadline="1us")
        gate.set()
        with pytest.raises(DroppedError, match="deadline"):
            late.result(60)
        assert first.result(60)["Y"].shape == (1, 1000)


def test_waiting_tasks_can_be_cancelled(models: dict[str, onnx.ModelProto], gate: threading.Event) -> None:
    """A cancelled task takes no place in the queue, and a running one cannot be cancelled."""
    with MultiSession(models, queue=1, cores=1) as session:
        gate.clear()
        first = session.submit("light", FEED)
        second = session.submit("light", FEED)
        assert second.cancel()
        with pytest.raises(CancelledError):
            second.result(60)
        third = session.submit("light", FEED)
        gate.set()
        assert third.result(60)["Y"].shape == first.result(60)["Y"].shape


def test_wrong_arguments_are_refused(models: dict[str, onnx.ModelProto]) -> None:
    """Names, policies, queues and inputs are checked when they are given."""
    for wrong, message in (
        ({"policy": "eddf"}, "did you mean 'edf'"),
        ({"queue": 0}, "queue: expected"),
        ({"deadlines": {"lite": 3}}, "unknown model 'lite'"),
        ({"deadlines": "soon"}, "deadline"),
        ({"rates": -1.0}, "rates: expected"),
        ({"drop": "all"}, "drop: expected"),
        ({"cores": 0}, "cores"),
    ):
        with pytest.raises(OptionError, match=message):
            MultiSession(models, **wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="at least one model"):
        MultiSession({})
    with MultiSession({"light": models["light"]}) as session:
        with pytest.raises(OptionError, match="unknown model 'lite'"):
            session.submit("lite", FEED)
        with pytest.raises(Exception, match="invalid dimensions"):
            session.submit("light", {"X": np.zeros((1, 3, 8, 8), np.float32)})


def test_an_abandoned_session_stops_its_lanes(models: dict[str, onnx.ModelProto]) -> None:
    """A session that is not closed leaves no threads behind."""
    before = threading.active_count()
    session = MultiSession(models)
    session.submit("light", FEED).result(60)
    gone = weakref.ref(session)
    del session
    gc.collect()
    assert gone() is None
    for thread in threading.enumerate():
        if thread.name.startswith("chrion-lane-"):
            thread.join(60)
    assert threading.active_count() <= before


def test_top_replaces_its_plan_while_tasks_go_on(
    models: dict[str, onnx.ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With uneven queues, another plan is asked for and adopted; every task has its result."""

    def replan(self: TopPlanner, _: Replan) -> TopPlan:
        return replace(self.first, intervals_ms=dict.fromkeys(models, 1.5))

    monkeypatch.setattr(TopPlanner, "replan", replan)
    with MultiSession(models, policy="top", queue=4096) as session:
        assert "light 0.0 ms" in session.explain()
        futures = [session.submit("heavy", FEED)]
        until = time.monotonic() + 60
        while "light 1.5 ms" not in session.explain():
            assert time.monotonic() < until
            futures += [session.submit("light", FEED) for _ in range(20)]
            time.sleep(0.05)
    assert all(future.result()["Y"].shape == (1, 1000) for future in futures)


def test_closing_does_not_wait_for_the_launcher(
    models: dict[str, onnx.ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks that the launcher holds back for a second each are served at once when the session is closed."""
    new_dispatcher = TopPlanner.new_dispatcher

    def slow(self: TopPlanner, **options: Any) -> TopDispatcher:
        dispatcher = new_dispatcher(self, **options)
        dispatcher.adopt(replace(dispatcher.plan, intervals_ms=dict.fromkeys(models, 1000.0)), 0.0)
        return dispatcher

    monkeypatch.setattr(TopPlanner, "new_dispatcher", slow)
    session = MultiSession(models, policy="top")
    futures = [session.submit("light", FEED) for _ in range(30)]
    begin = time.perf_counter()
    session.close()
    assert all(future.done() for future in futures)
    assert time.perf_counter() - begin < 10
