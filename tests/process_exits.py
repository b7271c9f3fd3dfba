"""A process that ends, or forks, with a session in use: ``python process_exits.py HOW``."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from chrion import HybridSession, load
from chrion.runtime import process_hooks
from chrion.scheduler import fixed_plan
from helpers import FLOAT, make_model, node, value

_SIZE = 600


def busy_session() -> tuple[HybridSession, dict[str, np.ndarray]]:
    """Two lanes that compute for a while."""
    w = np.eye(_SIZE, dtype=np.float32)
    nodes = []
    for side in "ab":
        for step in range(6):
            before = f"{side}{step - 1}" if step else "x"
            nodes.append(node("MatMul", [before, "w"], [f"{side}{step}"], name=f"{side}{step}"))
    nodes.append(node("Add", ["a5", "b5"], ["y"], name="sum"))
    shape = [_SIZE, _SIZE]
    graph = load(make_model(nodes, [value("x", FLOAT, shape)], [value("y", FLOAT, shape)], {"w": w}))
    plan = fixed_plan(graph, [1 + name.startswith("b") for name in graph.dag.names])
    return HybridSession(graph, plan=plan), {"x": np.ones((_SIZE, _SIZE), np.float32)}


def tell(*what: object) -> None:
    """Write a line that is out before the process is."""
    sys.stdout.write(" ".join(map(str, what)) + "\n")
    sys.stdout.flush()


def in_flight() -> HybridSession:
    """Daemon threads that call all the time, one call under way."""
    session, feed = busy_session()

    def call() -> None:
        try:
            while True:
                session.run(None, feed)
        except RuntimeError as error:
            tell(error)

    begun = time.perf_counter()
    session.run(None, feed)
    took = time.perf_counter() - begun
    for _ in range(2):
        threading.Thread(target=call, daemon=True).start()
    time.sleep(1.5 * took)
    return session


def end() -> None:
    """The main thread comes to its end."""
    in_flight()


def leave() -> None:
    """``sys.exit``."""
    in_flight()
    sys.exit(3)


def fail() -> None:
    """An exception that nobody handles."""
    in_flight()
    raise ValueError("unhandled")


def late() -> None:
    """A run when the process is ending already: before the session is told of it, and after."""
    session, feed = busy_session()
    session.run(None, feed)

    def run() -> None:
        try:
            tell(session.run(None, feed)[0].shape)
        except RuntimeError as error:
            tell(error)

    atexit.unregister(process_hooks._run_exit_hooks)
    atexit.register(run)
    atexit.register(process_hooks._run_exit_hooks)
    atexit.register(run)


def fork() -> None:
    """A child of a process that has a session, while other threads are using it."""
    session = in_flight()
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
    tell("child", os.waitstatus_to_exitcode(status))


def thread() -> None:
    """A thread that is no daemon is waited for, as ever."""
    session, feed = busy_session()
    threading.Thread(target=lambda: tell(session.run(None, feed)[0].shape)).start()


HOW: dict[str, Callable[[], object]] = {f.__name__: f for f in (end, leave, fail, late, fork, thread)}

if __name__ == "__main__":
    HOW[sys.argv[1]]()
