"""Lanes in a forked child, which has none of their threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

#: Serves requests at the same time, forks while a thread holds the lock of the groups of lanes, and serves again.
FORKS = """
import os, threading
import numpy as np, pytest
from concurrent.futures import ThreadPoolExecutor
from helpers import branches, cut_session
from seams.execution import groups_of, lock_of, serve_crowds, use_cores
use_cores(pytest.MonkeyPatch(), range(8))
serve_crowds(pytest.MonkeyPatch())
session, feed = cut_session(branches()), {"x": np.ones((2, 4), np.float32)}
def serve(count):
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda _: session.run(None, feed), range(50)))
serve(8)
held, release = threading.Event(), threading.Event()
def hold():
    with lock_of(groups_of(session)):
        held.set()
        release.wait()
threading.Thread(target=hold).start()
held.wait()
if os.fork() == 0:
    try:
        session.run(None, feed)
    except RuntimeError as error:
        assert "fork" in str(error)
        session.close()
        os._exit(0)
    os._exit(1)
release.set()
assert os.wait()[1] == 0
serve(8)
session.close()
"""


def test_a_forked_child_can_drop_a_session_with_groups() -> None:
    """The child refuses requests and closes its copy; the parent's groups keep serving."""
    path = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-c", FORKS],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
