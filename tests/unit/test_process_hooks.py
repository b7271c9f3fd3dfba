"""The registry of hooks for forks and exits."""

from __future__ import annotations

import sys
import threading

import onnxruntime as ort

from chrion import HybridSession
from chrion.runtime import process_hooks


def test_the_hooks_are_not_methods_of_the_session() -> None:
    """A session has only the public methods of InferenceSession and those of its own documentation."""
    added = {name for name in dir(HybridSession) if not name.startswith("_")} - set(dir(ort.InferenceSession))
    assert added == {"close", "explain", "plan", "trace", "wait_until_tuned"}


def test_hooks_run_while_other_threads_create_sessions() -> None:
    """Sessions that are registered while the hooks run do not affect the iteration."""

    class Owner:
        pass

    stop = threading.Event()

    def register() -> None:
        while not stop.is_set():
            for owner in [Owner() for _ in range(50)]:
                process_hooks.register(owner, lambda _: None, lambda *_: None)

    def after_fork(_: Owner) -> None:
        """Do nothing."""

    def at_exit(_: Owner, until: float) -> None:
        """Do nothing."""

    owner = Owner()
    process_hooks.register(owner, after_fork, at_exit)
    threads = [threading.Thread(target=register) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(1000):
            assert dict(process_hooks.registered())[owner] == (after_fork, at_exit)
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        for thread in threads:
            thread.join()
