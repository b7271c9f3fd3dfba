"""The command itself: help, version, completion, interruption, closed and full outputs, logging."""

from __future__ import annotations

import logging
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import chrion
from chrion.cli import app as app_module
from chrion.scheduler import POLICIES
from chrion.simulator.scenario import scenario_names
from chrion.zoo import names
from command_line import Chrion, run_chrion

COMMANDS = (
    "demo devices model profile partition sweep plan run bench report compare simulate cache".split()  # noqa: SIM905 - a list of words
)
PLAIN = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "80"}


@pytest.fixture(autouse=True)
def _quiet_again() -> Iterator[None]:
    yield
    logger = logging.getLogger("chrion")
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_is_printed(cli: Chrion, option: str) -> None:
    """The version is printed on stdout, on a line of its own."""
    assert cli(option) == (0, f"chrion {chrion.__version__}\n", "")


def test_the_package_runs_as_a_module() -> None:
    """``python -m chrion`` runs the command, whose help calls it ``chrion``."""
    done = run_chrion("--help", env={**os.environ, **PLAIN})
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: chrion [OPTIONS] COMMAND" in done.stdout
    assert all(re.search(rf"^│ {name} ", done.stdout, re.MULTILINE) for name in COMMANDS)
    assert all(panel in done.stdout for panel in ("Start", "Plan", "Run", "Study", "Files"))


def test_without_arguments_help_is_printed(cli: Chrion) -> None:
    """Without arguments the command prints the same text as with ``-h`` and ``--help``, and exits without an error."""
    code, out, err = cli()
    assert (code, err) == (0, "")
    assert out.strip() == cli("-h")[1].strip() == cli("--help")[1].strip()
    assert "Exit codes:" in out


@pytest.mark.parametrize("command", [*([name] for name in COMMANDS), ["plan", "show"], ["cache", "clear"]])
def test_every_command_has_help_with_an_example(cli: Chrion, command: list[str]) -> None:
    """Every command accepts ``-h`` and ``--help``, and its help contains an example."""
    code, out, err = cli(*command, "-h")
    assert (code, err) == (0, "")
    assert out == cli(*command, "--help")[1]
    if command not in (["plan"], ["cache"]):
        assert re.search(rf"Examples?.*chrion {' '.join(command)}", out, re.DOTALL)


def test_help_names_policies_and_defaults(cli: Chrion) -> None:
    """The help lists every scheduler with its description, and the defaults of options."""
    descriptions = {name: policy.description for name, policy in POLICIES.items()}
    out = " ".join(cli("partition", "--help")[1].replace("│", " ").split())
    assert all(f"{name}: {description}" in out for name, description in descriptions.items())
    assert "MODEL.plan.json in the current folder" in out
    assert "all physical cores" in out


def completions(*words: str) -> list[str]:
    """Return the completions that bash would offer for the last word."""
    environment = {
        **os.environ,
        "_CHRION_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["chrion", *words]),
        "COMP_CWORD": str(len(words)),
    }
    done = run_chrion(env=environment)
    assert done.stderr == ""
    return done.stdout.split()


def test_completion_offers_commands_and_names() -> None:
    """Completion offers commands, policies, models and bundled scenarios."""
    assert completions("part") == ["partition"]
    assert set(completions("partition", "m.onnx", "--policy", "chr")) == {"chrion", "chrion-paper"}
    assert completions("compare", "m.onnx", "--policies", "heft,gre") == ["heft,greedy"]
    assert completions("model", "nasnet") == [name for name in names() if name.startswith("nasnet")]
    assert completions("simulate", "fig") == [name for name in scenario_names() if name.startswith("fig")]
    assert completions("run", "m.onnx", "--accelerator", "no") == ["none"]


def test_an_interrupt_during_imports_is_one_line() -> None:
    """Ctrl-C works before onnxruntime is imported, which takes a second."""
    code = """
import sys
class Interrupt:
    def find_spec(self, name, *_):
        if name in ("onnx", "onnxruntime", "typer"):
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from chrion.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "chrion: interrupted\n")


def test_an_interrupt_during_work_is_one_line(model: Path) -> None:
    """A step is announced before it begins; Ctrl-C ends it with exit code 130 and no traceback."""
    command = [sys.executable, "-m", "chrion", "bench", str(model), "--rounds", "1000"]
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
@pytest.mark.parametrize("arguments", [("simulate", "--list", "--json"), ("model", "--list"), ("--help",)])
def test_a_full_disk_is_one_line_and_exit_code_1(arguments: tuple[str, ...]) -> None:
    """If results cannot be printed, the command fails with one line and without a traceback."""
    command = [sys.executable, "-m", "chrion", *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)  # noqa: S603
    assert (done.returncode, done.stderr) == (1, "chrion: error: standard output: No space left on device\n")


@pytest.mark.parametrize("arguments", [("simulate", "--list", "--json"), ("model", "--list"), ("--help",)])
def test_a_closed_pipe_is_silent(arguments: tuple[str, ...]) -> None:
    """``chrion ... | head`` prints no error."""
    command = [sys.executable, "-m", "chrion", *arguments]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)  # noqa: S603
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("arguments", ["simulate --list --json", "model --list", "--version"])
def test_closed_streams_discard(arguments: str, closed: str) -> None:
    """A standard stream that the caller has closed is a null device: the command succeeds."""
    command = f'exec "{sys.executable}" -m chrion {arguments} {closed}'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)  # noqa: S602 - of the test
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (" >&-" not in f" {closed}")


def test_a_terminal_shows_progress_at_once(model: Path) -> None:
    """The first text is written to the terminal before the libraries are imported."""
    screen, terminal = pty.openpty()
    command = [sys.executable, "-m", "chrion", "partition", str(model), "-o", str(model.parent / "p.json")]
    with subprocess.Popen(command, stderr=terminal, stdout=subprocess.PIPE) as process:  # noqa: S603
        first = os.read(screen, 1000)
        process.communicate(timeout=60)
    os.close(terminal)
    os.close(screen)
    assert first.startswith(b"chrion: loading")


def test_verbosity_concerns_chrion_only(cli: Chrion, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``-v``, before or after the command's name, shows Chrion's steps, and ``-vv`` their details.

    Messages of libraries are not shown.
    """

    def chatty(*arguments: Any, **options: Any) -> Any:
        for name in ("chrion.profiler.operator_bench", "onnx_ir.passes"):
            logging.getLogger(name).debug("a detail of %s", name)
        return real(*arguments, **options)

    from chrion.cli import steps  # noqa: PLC0415 - beside what it is used for

    real = steps.load
    monkeypatch.setattr(steps, "load", chatty)
    assert "operators" not in cli("partition", str(model))[2]
    for arguments in (("-v", "partition", str(model)), ("partition", str(model), "-v")):
        err = cli(*arguments)[2]
        assert "m.onnx: 4 operators" in err
        assert re.search(r"planning m took [\d.]+ s", err)
        assert "a detail" not in err
    err = cli("partition", str(model), "-vv")[2]
    assert "chrion: debug: a detail of chrion.profiler.operator_bench" in err
    assert "onnx_ir" not in err


def test_a_bug_keeps_its_traceback(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error is reported with its traceback and not as invalid input."""

    def broken(*_: Any) -> None:
        raise OSError(5, "not of stdout")

    monkeypatch.setattr("chrion.cli.steps.load", broken)
    monkeypatch.setattr(sys, "argv", ["chrion", "partition", str(model)])
    with pytest.raises(OSError, match="not of stdout"):
        app_module.run()
