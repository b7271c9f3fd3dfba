"""The command itself: help, version, completion, logging, unexpected errors."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

import chrion
from chrion.cli.app import app
from chrion.scheduler import POLICIES, SchedulePolicy
from chrion.serving.simulator.scenario import scenario_names
from chrion.zoo import names
from command_line import PAPER, Chrion


def command_names(group: Any, *above: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command and subcommand."""
    for name, command in group.commands.items():
        yield (*above, name)
        if hasattr(command, "commands"):
            yield from command_names(command, *above, name)


COMMANDS = list(command_names(typer.main.get_command(app)))


def test_the_version_is_printed(cli: Chrion) -> None:
    """The version is printed on stdout, on a line of its own."""
    assert cli("--version") == cli("-V") == (0, f"chrion {chrion.__version__}\n", "")


def test_without_arguments_help_is_printed(cli: Chrion) -> None:
    """Without arguments the command prints the same text as with ``-h`` and ``--help``, and exits without an error."""
    code, out, err = cli()
    assert (code, err) == (0, "")
    assert out.strip() == cli("-h")[1].strip() == cli("--help")[1].strip()
    assert "Usage: chrion [OPTIONS] COMMAND" in out
    assert "Exit codes:" in out
    assert all(re.search(rf"^│ {name} ", out, re.MULTILINE) for name, *below in COMMANDS if not below)
    assert all(panel in out for panel in ("Start", "Plan", "Run", "Study", "Files"))


def test_every_command_has_help_with_an_example(cli: Chrion) -> None:
    """Every command accepts ``-h`` and ``--help``, and its help contains an example."""
    for at, command in enumerate(COMMANDS):
        code, out, err = cli(*command, ("-h", "--help")[at % 2])
        assert (code, err) == (0, ""), command
        example = re.search(rf"Examples?.*chrion {' '.join(command)}", out, re.DOTALL)
        assert example or command in {("plan",), ("cache",)}, command
    for command in (("run",), ("plan", "show")):
        assert cli(*command, "-h") == cli(*command, "--help")


def test_help_names_policies_and_defaults(cli: Chrion) -> None:
    """The help lists every scheduler with its description, and the defaults of options."""
    descriptions = {name: policy.description for name, policy in POLICIES.items()}
    out = " ".join(cli("partition", "--help")[1].replace("│", " ").split())
    assert all(f"{name}: {description}" in out for name, description in descriptions.items())
    assert "MODEL.plan.json in the current folder" in out
    assert "all physical cores" in out


def test_completion_offers_commands_and_names(cli: Chrion, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completion offers commands, policies, models and bundled scenarios."""
    cases: list[tuple[tuple[str, ...], list[str]]] = [
        (("part",), ["partition"]),
        (("partition", "m.onnx", "--policy", "chr"), ["chrion", "chrion-paper"]),
        (("compare", "m.onnx", "--policies", "heft,gre"), ["heft,greedy"]),
        (("model", "nasnet"), [name for name in names() if name.startswith("nasnet")]),
        (("simulate", "fig"), [name for name in scenario_names() if name.startswith("fig")]),
        (("run", "m.onnx", "--accelerator", "no"), ["none"]),
    ]
    monkeypatch.setenv("_CHRION_COMPLETE", "complete_bash")
    for words, expected in cases:
        monkeypatch.setenv("COMP_WORDS", " ".join(["chrion", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        code, out, err = cli()
        assert (code, sorted(out.split()), err) == (0, sorted(expected), ""), words


def test_tables_in_a_pipe_have_100_columns(cli: Chrion, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal, tables are as wide as on one of 100 columns, or as COLUMNS says."""
    wide = cli("hardware", "l4+epyc-16")[1]
    monkeypatch.delenv("COLUMNS")
    assert cli("hardware", "l4+epyc-16")[1] == wide
    monkeypatch.setenv("COLUMNS", "60")
    narrow = cli("hardware", "l4+epyc-16")[1]
    assert max(map(len, narrow.splitlines())) <= 60 < max(map(len, wide.splitlines())) <= 100


@pytest.mark.usefixtures("model")
def test_verbosity_concerns_chrion_only(cli: Chrion, capfd: pytest.CaptureFixture[str]) -> None:
    """``-v``, before or after the command's name, shows Chrion's steps, and ``-vv`` their details.

    Messages of libraries are not shown.
    """

    def details() -> str:
        for name in ("chrion.profiler.operator_bench", "onnx_ir.passes"):
            logging.getLogger(name).debug("a detail of %s", name)
        return capfd.readouterr().err

    command = ("partition", "m.onnx", "--profile", PAPER, "--policy", "heft", "--force")
    assert "operators" not in cli(*command)[2]
    for arguments in (("-v", *command), (*command, "-v")):
        err = cli(*arguments)[2]
        assert "m.onnx: 4 operators" in err
        assert re.search(r"planning m took [\d.]+ s", err)
        assert details() == ""
    cli(*command, "-vv")
    assert details() == "chrion: debug: a detail of chrion.profiler.operator_bench\n"


@pytest.mark.usefixtures("model")
def test_a_bug_keeps_its_traceback(cli: Chrion, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error is reported with its traceback and not as invalid input."""

    def broken(*_: Any) -> None:
        raise OSError(5, "not of stdout")

    monkeypatch.setitem(POLICIES, "broken", SchedulePolicy("broken", "Fails.", broken))
    with pytest.raises(OSError, match="not of stdout"):
        cli("partition", "m.onnx", "--profile", PAPER, "--policy", "broken")
