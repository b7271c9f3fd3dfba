"""MultiSession: several models whose blocks share the cores, with real sessions and threads."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, wait
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import psutil
import pytest

from chrion.errors import DroppedError, OptionError
from chrion.machine.core_leases import lease_cores
from chrion.machine.cores import physical_cores
from chrion.runtime.block_chain import BlockChain
from chrion.serving.multi.combined import TopPlan
from chrion.serving.multi.dispatcher import Replan
from chrion.serving.multi.load import measure_times
from chrion.serving.multi.policies import POLICIES
from chrion.serving.multi.session import MultiSession
from chrion.serving.multi.top_search import TopPlanner
from chrion.zoo import build
from helpers import FLOAT, INT64, make_model, node, value
from server_client import wait_until

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


@pytest.mark.parametrize("policy", sorted(POLICIES))
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


@pytest.mark.skipif(len(physical_cores()) < 2, reason="needs two cores")
def test_a_session_that_a_callback_closes_releases_its_cores(
    models: dict[str, onnx.ModelProto], gate: threading.Event
) -> None:
    """Its cores are free for other lanes when its last task is over."""

    def leased() -> tuple[int, ...]:
        """Return the core that another session of one lane would get."""
        lease = lease_cores(1)
        lease.release()
        return lease.cores

    gc.collect()  # sessions of other tests
    leased_before = leased()
    session = MultiSession({"light": models["light"]}, cores=1)
    assert leased() != leased_before
    gate.clear()
    session.submit("light", FEED).add_done_callback(lambda _: session.close())
    gate.set()
    wait_until(lambda: leased() == leased_before)


def test_a_callback_of_another_session_waits_for_the_end(
    models: dict[str, onnx.ModelProto], gate: threading.Event
) -> None:
    """``close`` waits on the lane of another session, as on any other thread."""
    first, second = MultiSession({"light": models["light"]}), MultiSession({"light": models["light"]})
    done: Future[bool] = Future()

    def close_second(_: Future[Any]) -> None:
        task = second.submit("light", FEED)
        second.close()
        done.set_result(task.done())

    gate.clear()
    first.submit("light", FEED).add_done_callback(close_second)
    gate.set()
    assert done.result(60)
    first.close()


def test_recorders_of_several_threads_are_independent(models: dict[str, onnx.ModelProto]) -> None:
    """Each has the blocks that end within its context."""
    with MultiSession({"light": models["light"]}, cores=1) as session:
        with session.record() as outer:
            session.submit("light", FEED).result(60)
            with session.record() as inner:
                session.submit("light", FEED).result(60)
            session.submit("light", FEED).result(60)
        session.submit("light", FEED).result(60)
    blocks = len(outer) // 3
    assert [span.task for span in inner] == [1] * blocks
    assert [span.task for span in outer] == [task for task in range(3) for _ in range(blocks)]


@pytest.mark.parametrize("as_value", [False, True], ids=["array", "OrtValue"])
def test_inputs_are_copied(models: dict[str, onnx.ModelProto], gate: threading.Event, *, as_value: bool) -> None:
    """What the caller writes into an input after ``submit`` does not change the task."""
    with MultiSession({"light": models["light"]}, cores=1) as session:
        expected = session.submit("light", FEED).result(60)["Y"]
        value = ort.OrtValue.ortvalue_from_shape_and_type([1, 3, 64, 64], np.float32)
        array = value.numpy()
        array[...] = FEED["X"]
        gate.clear()
        future = session.submit("light", {"X": value if as_value else array})
        array[...] = 7
        gate.set()
        np.testing.assert_array_equal(future.result(60)["Y"], expected)


def test_blocks_are_measured_whatever_the_limits_of_the_queue(models: dict[str, onnx.ModelProto]) -> None:
    """Every block is measured while all lanes are busy, though tasks are dropped that wait or are late."""
    options: dict[str, Any] = {"queue": 1, "deadlines": "1us", "drop_late": True}
    with MultiSession(models, block=0.1, **options) as session, session.record() as spans:
        times = measure_times(session, dict.fromkeys(models, FEED))
        counts = session.counts()
    assert all(counts[name] == {"done": 1 + 4 * session.lanes, "waiting": 0} for name in models)
    assert {(s.model, s.block) for s in spans} == {(n, at) for n, own in times.items() for at in range(len(own[0]))}


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


def test_a_block_that_raises_fails_its_task_only() -> None:
    """An index out of range is onnxruntime's error; the next task is served."""
    nodes = [node("Gather", ["w", "X"], ["g"]), node("Relu", ["g"], ["Y"])]
    rows = make_model(nodes, [value("X", INT64, [2])], [value("Y", FLOAT, [2])], {"w": np.arange(4, dtype=np.float32)})
    with MultiSession({"rows": rows}, block="0.1ms") as session:
        with pytest.raises(Exception, match="out of data bounds"):
            session.submit("rows", {"X": np.array([1, 9])}).result(60)
        found = session.submit("rows", {"X": np.array([1, 3])}).result(60)
        np.testing.assert_array_equal(found["Y"], [1, 3])
        assert session.counts()["rows"] == {"failed": 1, "done": 1, "waiting": 0}


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


def test_a_task_that_runs_can_be_cancelled(models: dict[str, onnx.ModelProto], monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends after the block that runs, which frees its lane, and counts as cancelled."""
    with MultiSession({"heavy": models["heavy"]}, cores=1, block=0.1) as session, session.record() as spans:
        blocks = len(session.rules["heavy"].block_ms)
        begin, begun = BlockChain.begin, threading.Event()
        futures: list[Future[Any]] = []

        def cancel_at_once(self: BlockChain, feed: Any) -> Any:
            begun.wait()
            assert futures[0].cancel()
            monkeypatch.setattr(BlockChain, "begin", begin)
            return begin(self, feed)

        monkeypatch.setattr(BlockChain, "begin", cancel_at_once)
        futures.append(session.submit("heavy", FEED))
        begun.set()
        wait(futures, 60)
        with pytest.raises(CancelledError):
            futures[0].result()
        assert session.submit("heavy", FEED).result(60)["Y"].shape == (1, 1000)
        assert not futures[0].cancel() or futures[0].cancelled()
        assert session.counts()["heavy"] == {"cancelled": 1, "done": 1, "waiting": 0}
    assert [span.block for span in spans] == [0, *range(blocks)]


def test_models_have_their_own_rule_of_dropping(models: dict[str, onnx.ModelProto], gate: threading.Event) -> None:
    """One model keeps its latest task, another one its first, in queues of one."""
    with MultiSession(models, queue=1, drop={"light": "oldest"}, cores=1) as session:
        gate.clear()
        first = session.submit("light", FEED)
        futures = {name: [session.submit(name, FEED) for _ in range(2)] for name in models}
        gate.set()
        dropped = {name: [f.exception(60) is not None for f in own] for name, own in futures.items()}
        assert dropped == {"light": [True, False], "heavy": [False, True]}
        assert first.result(60)["Y"].shape == (1, 1000)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
def test_models_in_the_background_run_on_threads_of_higher_niceness(
    models: dict[str, onnx.ModelProto], gate: threading.Event
) -> None:
    """Whole models run side by side with the outputs of blocks; the model of the later deadline is nice."""
    with MultiSession(models) as plain:
        expected = {name: plain.submit(name, FEED).result(60)["Y"] for name in models}
    deadlines = {"light": "1s", "heavy": "2s"}
    niceness: dict[str, Future[int]] = {name: Future() for name in models}

    def note(name: str) -> None:
        niceness[name].set_result(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    with MultiSession(models, deadlines=deadlines, background=True, cores=1, block=0.1) as session:
        for name in models:
            gate.clear()
            future = session.submit(name, FEED)
            future.add_done_callback(lambda _, name=name: note(name))
            gate.set()
            np.testing.assert_array_equal(future.result(60)["Y"], expected[name])
        assert all(len(rules.block_ms) == 1 for rules in session.rules.values())
        assert session.lanes == 2
        assert "niceness 19" in session.explain()
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert {name: level.result(60) for name, level in niceness.items()} == {"light": own, "heavy": 19}


def test_models_on_an_accelerator_have_lanes_of_their_own(models: dict[str, onnx.ModelProto]) -> None:
    """With the CPU in its place: they run whole, on two lanes that others do not use, with the outputs of blocks."""
    with MultiSession(models) as plain:
        expected = {name: plain.submit(name, FEED).result(60)["Y"] for name in models}
    with MultiSession(models, accelerators={"heavy": "cpu"}, cores=1, block=0.1) as session:
        with session.record() as spans:
            futures = [(name, session.submit(name, FEED)) for _ in range(8) for name in models]
            for name, future in futures:
                np.testing.assert_array_equal(future.result(60)["Y"], expected[name])
        assert session.lanes == 3
        assert len(session.rules["heavy"].block_ms) == 1 < len(session.rules["light"].block_ms)
        assert "CPUExecutionProvider" in session.explain()
    assert {s.lane for s in spans if s.model == "light"} == {0}
    assert {s.lane for s in spans if s.model == "heavy"} == {1, 2}


@pytest.mark.slow
def test_many_tasks_leave_no_memory_behind() -> None:
    """After 100 000 tasks of two models, some of them cancelled or dropped, the process is as large as after 5 000."""
    tiny = {name: build("squeezenet", {"resolution": 32, "width": 0.0625}) for name in ("a", "b")}
    feed = {"X": np.zeros((1, 3, 32, 32), np.float32)}
    process = psutil.Process()

    def serve(session: MultiSession, count: int) -> int:
        window: deque[Future[Any]] = deque()
        for at in range(count):
            window.append(session.submit("ab"[at % 2], feed))
            if at % 20 == 0:
                window[-1].cancel()
            if len(window) > 40:
                wait([window.popleft()])
        wait(window)
        gc.collect()
        return process.memory_info().rss

    with MultiSession(tiny, queue=16, drop={"a": "oldest"}, deadlines="50ms", drop_late=True) as session:
        first = serve(session, 5_000)
        grown = serve(session, 95_000) - first
        assert sum(sum(own.values()) for own in session.counts().values()) == 100_000
    assert grown < 4_000_000


def test_wrong_arguments_are_refused(models: dict[str, onnx.ModelProto]) -> None:
    """Names, policies, queues and inputs are checked when they are given."""
    for wrong, message in (
        ({"policy": "eddf"}, "did you mean 'edf'"),
        ({"queue": 0}, "queue: expected"),
        ({"deadlines": {"lite": 3}}, "unknown model 'lite'"),
        ({"deadlines": "soon"}, "deadline"),
        ({"deadlines": {"light": [3]}}, "deadlines: expected"),
        ({"rates": -1.0}, "rates: expected"),
        ({"rates": "30"}, "rates: expected"),
        ({"rates": {"light": True}}, "rates: expected"),
        ({"priorities": {"light": 1.5}}, "priorities: expected"),
        ({"shapes": {"light": 3}}, "shapes: expected"),
        ({"drop": "all"}, "drop: expected"),
        ({"drop": {"light": ["oldest"]}}, "drop: expected"),
        ({"policy": 5}, "unknown policy 5"),
        ({"block": "10us"}, "block: expected at least 0.1 ms"),
        ({"cores": 0}, "cores"),
        ({"background": True}, "different priorities or deadlines"),
        ({"accelerators": {"lite": "cpu"}}, "unknown model 'lite'"),
        ({"accelerators": "cpu"}, "accelerators: expected"),
        ({"accelerators": {"light": "cpu"}, "shapes": {"light": {"N": 1}}}, "shapes"),
        ({"background": True, "policy": "static"}, "static"),
    ):
        with pytest.raises(OptionError, match=message):
            MultiSession(models, **wrong)  # type: ignore[arg-type]
    for none in ({}, [models["light"]]):
        with pytest.raises(OptionError, match="at least one model"):
            MultiSession(none)  # type: ignore[arg-type]
    with MultiSession({"light": models["light"]}) as session:
        with pytest.raises(OptionError, match="unknown model 'lite'"):
            session.submit("lite", FEED)
        with pytest.raises(Exception, match="invalid dimensions"):
            session.submit("light", {"X": np.zeros((1, 3, 8, 8), np.float32)})
        with pytest.raises(RuntimeError, match="expected an array"):
            session.submit("light", {"X": 3})


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
        assert "light 0.00 ms" in session.explain()
        futures = [session.submit("heavy", FEED)]
        until = time.monotonic() + 60
        while "light 1.50 ms" not in session.explain():
            assert time.monotonic() < until
            futures += [session.submit("light", FEED) for _ in range(20)]
            time.sleep(0.05)
    assert all(future.result()["Y"].shape == (1, 1000) for future in futures)


def test_closing_does_not_wait_for_the_launcher(
    models: dict[str, onnx.ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks that the launcher holds back for a second each are served at once when the session closes; none is late."""
    search = TopPlanner.__init__

    def slow(self: TopPlanner, *arguments: Any) -> None:
        search(self, *arguments)
        self.first = replace(self.first, intervals_ms=dict.fromkeys(models, 1000.0))

    monkeypatch.setattr(TopPlanner, "__init__", slow)
    session = MultiSession(models, policy="top", deadlines="20s", drop_late=True)
    futures = [session.submit("light", FEED) for _ in range(30)]
    begin = time.perf_counter()
    session.close()
    assert all(future.result(0)["Y"].shape == (1, 1000) for future in futures)
    assert time.perf_counter() - begin < 10
