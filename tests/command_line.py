"""Commands run by tests, in this process or in one of their own."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from chrion.cli import main
from chrion.common.files import bundled_folder
from seams.commands import quicken_commands

#: The stored profile of the paper's machine.
PAPER = str(bundled_folder("profiles") / "gtx1080ti-paper.json")

#: Runs a command; returns its exit code, stdout and stderr.
Chrion = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Chrion]:
    """Return a function that runs the command in this process and returns its exit code, stdout and stderr.

    The current folder is empty, outputs have 100 columns, and trials of sessions are short.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    quicken_commands(monkeypatch)

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        out, err = capfd.readouterr()
        return int(exit_.value.code or 0), out, err

    yield run
    logger = logging.getLogger("chrion")
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def assert_refused(result: tuple[int, str, str], about: str) -> None:
    """Assert exit code 2, nothing on stdout, and one line on stderr, mentioning a text, after steps and warnings."""
    code, out, err = result
    lines = [line for line in err.splitlines() if line.strip()]
    assert (code, out) == (2, ""), err
    assert lines[-1].startswith("chrion: error: "), err
    assert all(line.endswith(" ...") or line.startswith("chrion: warning: ") for line in lines[:-1]), err
    assert about.lower() in lines[-1].lower()


def assert_each_refused(cli: Chrion, cases: Iterable[tuple[Sequence[str], str]]) -> None:
    """Assert as :func:`assert_refused` for each command with the text that its error mentions."""
    for words, about in cases:
        try:
            assert_refused(cli(*words), about)
        except AssertionError as error:
            error.add_note(f"of the command: chrion {' '.join(words)}")
            raise


def run_chrion(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "chrion", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return] # noqa: S603
