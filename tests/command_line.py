"""Helpers of the tests of the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chrion.cli import main
from chrion.files import bundled_folder

#: The stored profile of the paper's machine.
PAPER = str(bundled_folder("profiles") / "gtx1080ti-paper.json")

#: Runs a command; returns its exit code, stdout and stderr.
Chrion = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Chrion:
    """Return a function that runs the command in this process and returns its exit code, stdout and stderr.

    The current folder is empty.
    """
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["chrion", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capfd.readouterr()
        return int(exit_.value.code or 0), out, err

    return run


def assert_refused(result: tuple[int, str, str], about: str) -> None:
    """Assert exit code 2, nothing on stdout, and one line on stderr, which mentions a text, after those of steps."""
    code, out, err = result
    lines = [line for line in err.splitlines() if line.strip()]
    assert (code, out) == (2, ""), err
    assert lines[-1].startswith("chrion: error: "), err
    assert all(line.endswith(" ...") for line in lines[:-1]), err
    assert about.lower() in lines[-1].lower()


def run_chrion(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "chrion", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return] # noqa: S603
