"""Programs that end or fork while a session is in use: ``python process_exits.py PROGRAM``."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import numpy as np
import onnxruntime as ort
import psutil
import pytest

from chrion import Graph, HybridSession, load
from chrion.runtime import process_hooks
from chrion.runtime.process_hooks import in_flight
from chrion.runtime.selection.decisions import Decision
from chrion.scheduler import fixed_plan
from helpers import FLOAT, alternating_lanes, branches, make_model, node, value
from seams.sessions import engine_of, engines_of, replace_tuning_process, shorten_waits
from session_paths import indexed_branches, request

_SIZE = 600


def busy_session() -> tuple[HybridSession, dict[str, np.ndarray]]:
    """Return a session with two lanes that compute for a while, and its feed."""
    w = np.eye(_SIZE, dtype=np.float32)
    nodes = []
    for tower in "ab":
        for step in range(6):
            source = f"{tower}{step - 1}" if step else "x"
            nodes.append(node("MatMul", [source, "w"], [f"{tower}{step}"], name=f"{tower}{step}"))
    nodes.append(node("Add", ["a5", "b5"], ["y"], name="sum"))
    shape = [_SIZE, _SIZE]
    graph = load(make_model(nodes, [value("x", FLOAT, shape)], [value("y", FLOAT, shape)], {"w": w}))
    plan = fixed_plan(graph, [1 + name.startswith("b") for name in graph.dag.names])
    return HybridSession(graph, plan=plan), {"x": np.ones((_SIZE, _SIZE), np.float32)}


def write_line(*words: object) -> None:
    """Write a line at once, without the lock of ``sys.stdout``: a daemon thread that holds it at exit aborts Python."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def start_calls() -> HybridSession:
    """Start daemon threads that call a session continuously, and return while a call is in flight."""
    session, feed = busy_session()

    def call() -> None:
        try:
            while True:
                session.run(None, feed)
        except RuntimeError as error:
            write_line(error)

    session.run(None, feed)
    for _ in range(2):
        threading.Thread(target=call, daemon=True).start()
    while not in_flight:
        time.sleep(0.001)
    return session


def end() -> None:
    """Return from the main thread."""
    start_calls()


def call_plain(*, bound: bool = False) -> None:
    """Return from the main thread while daemon threads call a plain session, perhaps with onnxruntime's bindings."""
    w = np.eye(_SIZE, dtype=np.float32)
    nodes = [node("MatMul", [f"a{step}", "w"], [f"a{step + 1}"]) for step in range(6)]
    shape = [_SIZE, _SIZE]
    model = make_model(nodes, [value("a0", FLOAT, shape)], [value("a6", FLOAT, shape)], {"w": w})
    session, x = HybridSession(model, tune="never"), np.ones(shape, np.float32)

    def call() -> None:
        binding = ort.IOBinding(session)
        binding.bind_cpu_input("a0", x)
        binding.bind_output("a6")
        try:
            while True:
                if bound:
                    session.run_with_iobinding(binding)
                else:
                    session.run(None, {"a0": x})
        except RuntimeError as error:
            write_line(error)

    for _ in range(8):
        threading.Thread(target=call, daemon=True).start()
    while not in_flight:
        time.sleep(0.001)


def call_bound() -> None:
    """The same with bindings."""
    call_plain(bound=True)


def leave() -> None:
    """Call ``sys.exit``."""
    start_calls()
    sys.exit(3)


def fail() -> None:
    """Raise an unhandled exception."""
    start_calls()
    raise ValueError("unhandled")


def late() -> None:
    """Run requests in exit handlers, one before the session's own handler and one after it."""
    session, feed = busy_session()
    session.run(None, feed)

    def run() -> None:
        try:
            write_line(session.run(None, feed)[0].shape)
        except RuntimeError as error:
            write_line(error)

    atexit.unregister(process_hooks.run_exit_hooks)
    atexit.register(run)
    atexit.register(process_hooks.run_exit_hooks)
    atexit.register(run)


def fork() -> None:
    """Fork while other threads use a session, and use the session in the child."""
    session = start_calls()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            session.run(None, {"x": np.ones((_SIZE, _SIZE), np.float32)})
        except RuntimeError as error:
            session.close()
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    write_line("child", os.waitstatus_to_exitcode(status))


def thread() -> None:
    """Return from the main thread while a non-daemon thread runs a request."""
    session, feed = busy_session()
    threading.Thread(target=lambda: write_line(session.run(None, feed)[0].shape)).start()


def tune() -> None:
    """Return right after the first request of a session, before tuning begins."""
    HybridSession(branches(), tune="background").run(None, {"x": np.ones((2, 4), np.float32)})


def decide() -> None:
    """Return while the tuning process of a session decides."""
    shorten_waits(pytest.MonkeyPatch())
    session = HybridSession(branches(), tune="background")
    while not psutil.Process().children():
        time.sleep(0.001)
    write_line(session.plan)


def collect() -> None:
    """Return right after a session was closed and collected while the tuning thread opens a plan for it."""
    opening, weight = threading.Event(), np.zeros((2000, 2000), np.float32)
    nodes = [node("MatMul", [f"a{step}", f"w{step}"], [f"a{step + 1}"]) for step in range(4)]
    weights = {f"w{step}": weight for step in range(4)}
    model = make_model(nodes, [value("a0", FLOAT, [1, 2000])], [value("a4", FLOAT, [1, 2000])], weights)

    def decide_on_lanes(graph: Graph) -> Decision:
        opening.set()
        return doubt(graph)

    patch = pytest.MonkeyPatch()
    patch.setenv("CHRION_CACHE", tempfile.mkdtemp())
    shorten_waits(patch)
    replace_tuning_process(patch, decide_on_lanes)
    with HybridSession(model, tune="background"):
        assert opening.wait(30)
        time.sleep(0.05)


def fork_tuned() -> None:
    """Fork while other threads call a session that is being tuned; tell whether the child has tuning or a crowd."""
    session, stop = HybridSession(branches(), tune="background"), threading.Event()

    def call() -> None:
        while not stop.is_set():
            session.run(None, {"x": np.ones((2, 4), np.float32)})

    threads = [threading.Thread(target=call) for _ in range(4)]
    for calling in threads:
        calling.start()
    while not psutil.Process().children():
        time.sleep(0.001)
    child = os.fork()
    if child == 0:
        engines_of(session).close_at_exit(time.monotonic() + 30)
        os._exit(0 if session.wait_until_tuned(0) and not in_flight else 1)
    stop.set()
    for calling in threads:
        calling.join()
    write_line("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def fork_tuning() -> None:
    """Fork while the tuning thread waits; tell whether the child can tune a session of its own, and exit at once."""
    asked = threading.Event()

    def never(_: Graph) -> Decision:
        asked.set()
        time.sleep(60)
        raise AssertionError

    shorten_waits(pytest.MonkeyPatch())
    replace_tuning_process(pytest.MonkeyPatch(), never)
    session = HybridSession(branches(), tune="background")
    assert asked.wait(30)
    if os.fork() == 0:
        own = HybridSession(branches(), tune="never")
        write_line(session.wait_until_tuned(), own.wait_until_tuned(30), "switched off" in own.explain())
        start_s = time.monotonic()
        process_hooks.run_exit_hooks()
        write_line(time.monotonic() - start_s < process_hooks.EXIT_LIMIT_S)
    else:
        os.wait()
    os._exit(0)  # a normal exit would wait for onnxruntime's threads of the parent's session


def fork_plain() -> None:
    """Fork with a plain session that is idle, and again with a request in flight; tell what the children can do."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # other threads would not exist in a child
    model, feed = indexed_branches(), request(0)
    session = HybridSession(model, options, tune="never")
    session.run(None, feed)
    for state in ("idle", "in flight"):
        if state != "idle":
            in_flight.append(None)
        child = os.fork()
        if child == 0:
            new = HybridSession(model, options, tune="never")
            write_line(f"{state}: {attempt(session, feed)}, created in the child: {attempt(new, feed)}")
            os._exit(0)
        os.waitpid(child, 0)


def fork_comparing() -> None:
    """Fork while live requests compare a plan; tell whether the child is served, and whether the parent decides."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    model, feed = indexed_branches(), request(0)
    patch = pytest.MonkeyPatch()
    patch.setenv("CHRION_CACHE", tempfile.mkdtemp())
    shorten_waits(patch)
    replace_tuning_process(patch, doubt)
    session = HybridSession(model, options, tune="background")
    session.wait_until_tuned(30)
    trial = engine_of(session).comparison
    while not trial.diverts:
        session.run(None, feed)
    if os.fork() == 0:
        write_line("child:", *{attempt(session, feed) for _ in range(200)}, trial.diverts)
        os._exit(0)
    os.wait()
    while trial.plan_wins is None:
        session.run(None, feed)
    write_line("parent:", attempt(session, feed), trial.pairs > 0)
    os._exit(0)


def doubt(graph: Graph) -> Decision:
    """Leave the decision on a plan of two lanes to live requests."""
    candidate = fixed_plan(graph, alternating_lanes(graph))
    return Decision("plain", None, "by the test", uncertain=True, candidate=candidate)


def attempt(session: HybridSession, feed: dict[str, np.ndarray]) -> str:
    """Return whether a session serves or refuses a request."""
    try:
        session.run(None, feed)
    except RuntimeError as error:
        return "refused" if "requests were in flight" in str(error) else str(error)
    return "served"


PROGRAMS: dict[str, Callable[[], object]] = {
    f.__name__: f
    for f in (
        *(end, call_plain, call_bound, leave, fail, late, thread, tune, decide, collect),
        *(fork, fork_plain, fork_tuned, fork_tuning, fork_comparing),
    )
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
