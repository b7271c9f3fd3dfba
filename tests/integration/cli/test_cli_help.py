"""Help of all commands, and the names of options in errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from chrion.cli.app import app
from chrion.scheduler import POLICIES
from command_line import Chrion, assert_each_refused


def _commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command."""
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, (*words, name))


def test_help_has_no_types_of_the_implementation(cli: Chrion, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns: no <bool> or <path>, no braces, no x of a range; and the lines of schedulers are not wrapped."""
    monkeypatch.setenv("COLUMNS", "80")
    for words in _commands(typer.main.get_command(app)):
        code, out, _ = cli(*words, "--help")
        assert code == 0
        assert not re.search(r"<\w[\w ]*>|[{}]|\[x[<>]", out), words
        assert max(map(len, out.splitlines())) <= 80, words
        if "Schedulers" in out:
            lines = [line.strip() for line in out.splitlines()]
            assert all(f"{name}: {policy.description}" in lines for name, policy in POLICIES.items()), words


@pytest.mark.usefixtures("model")
def test_errors_name_the_option_where_the_library_names_the_parameter(cli: Chrion) -> None:
    """Of the parameter that has another name, or is for several models, too."""
    multi = ("multi", "m.onnx", "--rates", "5")
    assert_each_refused(
        cli,
        [
            (("partition", "m.onnx", "--alpha", "-1"), "error: --alpha: expected a number of ms per MB"),
            (("partition", "m.onnx", "--policy", "exact", "--alpha", "1"), "error: --alpha: policy exact minimises"),
            (("partition", "m.onnx", "--streams", "0"), "error: --streams: expected 1 or more"),
            (("sweep", "m.onnx", "--memory", "all"), "error: --memory: expected one of"),
            (("run", "m.onnx", "--gpu-budget", "x"), "error: --gpu-budget: expected a size"),
            (("bench", "m.onnx", "--cores", "99"), "error: --cores: expected a whole number"),
            (("tune", "m.onnx", "--slo", "soon"), "error: --slo: expected a duration"),
            (("partition", "m.onnx", "--shape", "q=4"), "error: --shape: the model has no input"),
            ((*multi, "--deadline", "soon"), "error: --deadline: expected a duration"),
            ((*multi, "--block", "1ns"), "error: --block: expected at least 0.1 ms"),
            ((*multi, "--drop", "all"), "error: --drop: expected newest or oldest"),
            (("model", "lstm", "--layers", "0"), "error: --layers: expected 1 or more"),
            (("model", "lstm", "--kv-heads", "2"), "error: --kv-heads: model lstm has no such parameter"),
        ],
    )
