"""MultiSession in processes that exit or fork without closing it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.process

BEGIN = """
import os
import numpy as np
from chrion import MultiSession
from chrion.zoo import build

model = build("squeezenet", {"resolution": 64, "width": 0.25})
feed = {"X": np.zeros((1, 3, 64, 64), np.float32)}
session = MultiSession({"a": model}, block=0.5)
"""


def run_script(text: str) -> str:
    """Run a program that begins with an open session; return what it prints."""
    done = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-c", BEGIN + textwrap.dedent(text)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_tasks_in_flight_end_before_the_process() -> None:
    """A program that ends at once after its last ``submit`` exits normally, and its tasks are served."""
    text = """
        def answer(future):
            os.write(1, b"%d\\n" % future.result()["Y"].size)

        for _ in range(20):
            session.submit("a", feed).add_done_callback(answer)
    """
    assert run_script(text) == "1000\n" * 20


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork")
def test_a_forked_child_is_refused() -> None:
    """The child has no lanes: it cannot submit, and closing does not wait; the parent's session goes on."""
    text = """
        import warnings
        warnings.simplefilter("ignore")
        future = session.submit("a", feed)
        child = os.fork()
        if not child:
            try:
                session.submit("a", feed)
            except RuntimeError as error:
                print(error, flush=True)
            session.close()
            os._exit(0)
        os.waitpid(child, 0)
        print(future.result()["Y"].shape)
        session.close()
    """
    assert (
        run_script(text) == "the session was created before the process was forked; create it in the child\n(1, 1000)\n"
    )
