"""``chrion generate MODEL --prompt TEXT`` as a person runs it: on a terminal, in a pipe, and until Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import run_chrion
from text_decoder import save_text_decoder, text_after

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    """Write a decoder of texts; return its file."""
    return save_text_decoder(tmp_path)


class Terminal:
    """A command on a terminal of 80 columns.

    Args:
        arguments: The arguments of the command.
    """

    def __init__(self, *arguments: str) -> None:
        self._screen, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        command = [sys.executable, "-m", "chrion", *arguments]
        environment = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "NO_COLOR"}}
        self.process = subprocess.Popen(  # noqa: S603
            command, stdin=terminal, stdout=terminal, stderr=terminal, env={**environment, "TERM": "xterm"}
        )
        os.close(terminal)
        self._bytes = b""

    @property
    def shown(self) -> str:
        """What the command has written so far, without escape sequences."""
        return ESCAPES.sub("", self._bytes.decode(errors="ignore"))

    def read_until(self, found: Callable[[str], bool]) -> None:
        """Read until something is shown, or the command has ended."""
        while not found(self.shown):
            try:
                self._bytes += os.read(self._screen, 4096)
            except OSError:  # the command has ended
                return

    def close(self) -> int:
        """Wait for the end of the command; return its exit code."""
        code = self.process.wait(60)
        os.close(self._screen)
        return code


def test_a_terminal_of_80_columns_shows_the_text(decoder: Path) -> None:
    """The text is one piece from the beginning of a line, which the terminal wraps, and the speed is below it."""
    terminal = Terminal("generate", str(decoder), "--prompt", "wörd1 wörd2", "--max-new-tokens", "40")
    terminal.read_until(lambda _: False)
    assert terminal.close() == 0
    lines = re.split(r"[\r\n]+", terminal.shown)
    *before, shown, speed, last = lines
    assert (shown, last) == (text_after([1, 2], 40), "")
    assert speed.startswith("chrion: 40 tokens, ")
    assert all(len(line) <= 80 for line in before)


def test_ctrl_c_ends_a_text(decoder: Path) -> None:
    """The text is shown while it is generated; after Ctrl-C it ends with its line, and one line follows."""
    expected = text_after([1], 6)
    terminal = Terminal("generate", str(decoder), "-p", "wörd1", "--max-new-tokens", "19000")
    terminal.read_until(lambda shown: expected in shown)
    assert terminal.process.poll() is None
    terminal.process.send_signal(signal.SIGINT)
    terminal.read_until(lambda _: False)
    assert terminal.close() == 130
    lines = [line for line in re.split(r"[\r\n]+", terminal.shown) if line]
    assert lines[-1] == "chrion: interrupted"
    assert lines[-2].startswith(expected)
    assert "Traceback" not in terminal.shown


def test_ctrl_c_ends_a_text_whose_reader_has_ended(decoder: Path) -> None:
    """Ctrl-C also ends the reader, for example ``head``; the exit code is that of an interruption."""
    program = """
import os
from chrion.cli import main
from chrion.generation import Stream
reading, writing = os.pipe()
os.dup2(writing, 1)
os.close(writing)
def interrupted(stream):
    os.close(reading)
    raise KeyboardInterrupt
Stream.events = interrupted
main()
"""
    command = [sys.executable, "-c", program, "generate", str(decoder), "-p", "wörd1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "chrion: interrupted"
    assert "Traceback" not in done.stderr


def test_a_pipe_gets_the_text_only(decoder: Path) -> None:
    """Progress goes to stderr; ``head`` may leave in the middle."""
    arguments = ("generate", str(decoder), "--prompt", "wörd1 wörd2", "--max-new-tokens")
    done = run_chrion(*arguments, "12", timeout=60, encoding="utf-8", env={**os.environ, "PYTHONUTF8": "1"})
    assert (done.returncode, done.stdout) == (0, f"{text_after([1, 2], 12)}\n")
    command = [sys.executable, "-m", "chrion", *arguments, "19000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:  # noqa: S603
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(5)
        process.stdout.close()
        err = process.stderr.read().decode()
        assert process.wait(60) == 1
    assert "Traceback" not in err


def test_characters_that_stdout_lacks_are_replaced(decoder: Path) -> None:
    """An encoding without the characters of the text is no error."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = run_chrion("generate", str(decoder), "-p", "a", "--max-new-tokens", "3", timeout=60, env=environment)
    assert (done.returncode, done.stdout) == (0, f"{text_after([0], 3)}\n".replace("ö", "?"))
