"""The command in a process of its own: imports, interrupts, terminals, closed and full outputs."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from command_line import run_chrion
from helpers import branches

CHRION = [sys.executable, "-m", "chrion"]
#: Commands that print JSON, a table, and Typer's help.
PRINTING = (("simulate", "--list", "--json"), ("model", "--list"), ("--help",))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the path of a small model."""
    path = tmp_path / "m.onnx"
    onnx.save(branches(), path)
    return path


def test_the_package_runs_as_a_module() -> None:
    """``python -m chrion`` runs the command, whose help calls it ``chrion``."""
    done = run_chrion("--help", env={**os.environ, "NO_COLOR": "1", "TERM": "dumb"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: chrion [OPTIONS] COMMAND" in done.stdout


def test_a_shell_gets_completions() -> None:
    """Completion writes nothing but the words that bash offers."""
    words = {"_CHRION_COMPLETE": "complete_bash", "COMP_WORDS": "chrion part", "COMP_CWORD": "1"}
    done = run_chrion(env={**os.environ, **words})
    assert (done.stdout.split(), done.stderr) == (["partition"], "")


def test_an_interrupt_during_imports_is_one_line() -> None:
    """Ctrl-C works before onnxruntime is imported, which takes a second."""
    code = """
import sys
class Interrupt:
    def find_spec(self, name, *_):
        if name in ("onnx", "typer"):
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from chrion.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "chrion: interrupted\n")


def test_an_interrupt_during_work_is_one_line(model: Path) -> None:
    """A step is announced before it begins; Ctrl-C ends it with exit code 130 and no traceback."""
    command = [*CHRION, "bench", str(model), "--rounds", "1000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stderr is not None
        lines = [process.stderr.readline()]
        while "timing" not in lines[-1] and lines[-1]:
            lines.append(process.stderr.readline())
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    assert rest == "chrion: interrupted\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", PRINTING)
def test_a_full_disk_is_one_line_and_exit_code_1(arguments: tuple[str, ...]) -> None:
    """If results cannot be printed, the command fails with one line and without a traceback."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*CHRION, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)  # noqa: S603
    assert (done.returncode, done.stderr) == (1, "chrion: error: standard output: No space left on device\n")


@pytest.mark.parametrize("arguments", PRINTING)
def test_a_closed_pipe_is_silent(arguments: tuple[str, ...]) -> None:
    """``chrion ... | head`` prints no error."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([*CHRION, *arguments], stdout=writing, stderr=subprocess.PIPE, text=True, check=False)  # noqa: S603
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("arguments", "closed"),
    [
        ("model --list", "<&-"),
        ("simulate table7 --set requests=9", "2>&-"),
        ("simulate --list --json", ">&-"),
        ("model --list", ">&-"),
        ("--version", ">&-"),
        ("simulate table7 --set requests=9", "<&- >&- 2>&-"),
    ],
)
def test_closed_streams_discard(arguments: str, closed: str) -> None:
    """A standard stream that the caller has closed is a null device: the command succeeds."""
    command = f'exec "{sys.executable}" -m chrion {arguments} {closed}'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)  # noqa: S602 - of the test
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (" >&-" not in f" {closed}")


def test_a_sweep_in_two_processes_has_the_results_of_one() -> None:
    """The points of a grid are in order, with equal results."""
    options = ("table7", "--set", "requests=300", "--sweep", "gpu_memory_gb=9,12", "--sweep", "seed=1,2", "--json")
    one, two = (run_chrion("simulate", *options, "--workers", workers) for workers in "12")
    assert (two.returncode, two.stdout) == (0, one.stdout)


def test_a_terminal_shows_progress_at_once(model: Path) -> None:
    """The first text is written to the terminal before the libraries are imported."""
    screen, terminal = pty.openpty()
    command = [*CHRION, "partition", str(model), "-o", str(model.parent / "p.json")]
    with subprocess.Popen(command, stderr=terminal, stdout=subprocess.PIPE) as process:  # noqa: S603
        first = os.read(screen, 1000)
        process.communicate(timeout=60)
    os.close(terminal)
    os.close(screen)
    assert first.startswith(b"chrion: loading")
