"""Weights folders are removed by the process that created them, and after a crash by the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no signals, and no forks")

#: A program that loads a graph, prints its weights folder and waits for a line.
LOADS = """
import sys
from chrion import load
from chrion.zoo import build
graph = load(build("lstm", {"layers": 1, "seq": 1, "batch": 1, "io": 32}))
print(graph.weights_folder, flush=True)
sys.stdin.readline()
"""
#: The same, with a forked child that drops the graph and runs its exit handlers. It does not call ``sys.exit`` itself,
#: which may hang in onnxruntime: the child has none of its threads.
FORKS = (
    LOADS
    + """
import atexit, gc, os
child = os.fork()
if child == 0:
    del graph
    gc.collect()
    atexit._run_exitfuncs()
    os._exit(0)
os.waitpid(child, 0)
print(any(graph.weights_folder.iterdir()), flush=True)
"""
)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], Path]]]:
    """Start processes that load a graph, with a folder of their own for temporary files."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str) -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(tmp_path)},
        )
        started.append(process)
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert any(folder.iterdir()), "no weights"
        return process, folder

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_process_removes_its_folders(
    run: Callable[[str], tuple[subprocess.Popen[str], Path]], tmp_path: Path
) -> None:
    """A process leaves no folder after a normal exit."""
    process, _ = run(LOADS)
    process.communicate("\n", timeout=60)
    assert not list(tmp_path.glob("chrion-*"))


def test_a_forked_child_leaves_the_folder(run: Callable[[str], tuple[subprocess.Popen[str], Path]]) -> None:
    """The parent still has its weights after the child has dropped the graph and exited."""
    process, _ = run(FORKS)
    assert process.communicate("\n", timeout=60)[0].strip() == "True"


def test_the_folder_of_a_killed_process_is_removed_by_the_next(
    run: Callable[[str], tuple[subprocess.Popen[str], Path]], tmp_path: Path
) -> None:
    """Folders of living processes are kept, and so are files that are not Chrion's."""
    (tmp_path / "chrion-weights-other").mkdir()
    (tmp_path / "chrion-weights-file").touch()
    _, living = run(LOADS)
    killed, left = run(LOADS)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert left.exists()
    run(LOADS)
    assert not left.parent.exists()
    assert any(living.iterdir())
    assert (tmp_path / "chrion-weights-other").exists()
    assert (tmp_path / "chrion-weights-file").exists()
