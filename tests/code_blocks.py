"""Code blocks of the documentation: found in pages, parsed, and run.

A fenced block after the comment ``<!-- run -->`` is executed; after ``<!-- file: NAME -->`` it is written to a file;
after ``<!-- output -->`` it is what the Python block before it prints. All blocks of a page share one folder and one
Python namespace. In the expected output ``...`` stands for any text.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
import typer
from typer.testing import CliRunner

from chrion.cli.app import app
from chrion.zoo import build
from command_line import Chrion

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
#: Models that pages assume: names and parameters of builders.
_MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "small.onnx": ("lstm", {"layers": 4, "seq": 8}),
    "lstm.onnx": ("lstm-baseline", {}),
}
#: Lines that announce a step of the work on stderr; a terminal shows a progress bar instead.
_STEP = re.compile(r"^chrion: .* \.\.\.\n", re.MULTILINE)

_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>run|output|file: \S+) -->\n)?^```(?P<language>[^\n`]*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_EXIT_CODE = re.compile(r"#\s*exit code (\d+)")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    body: str
    #: ``run``, ``output``, ``file: NAME``, or empty.
    mark: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """A command line with the output that a page shows for it."""

    text: str
    expected: str

    @property
    def words(self) -> list[str]:
        """Return the words of the command, without comments."""
        return shlex.split(self.text, comments=True)

    @property
    def exit_code(self) -> int:
        """Return the exit code that a comment announces, or 0."""
        found = _EXIT_CODE.search(self.text)
        return int(found[1]) if found else 0


def blocks(page: Path) -> list[Block]:
    """Return all fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, m.start()) + 1, m["language"].strip(), m["body"], m["mark"] or "")
        for m in _FENCE.finditer(text)
    ]


def commands(block: Block) -> list[Command]:
    """Return the commands of a console or shell block; in a console block they begin with ``$``."""
    body = block.body.replace("\\\n", "")
    if block.language == "sh":
        lines = [line for line in body.splitlines() if line.strip() and not line.startswith("#")]
        return [Command(part.strip(), "") for line in lines for part in line.split("&&")]
    found = re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]
    return [Command(*part.split("\n", 1)) for part in found]


def matches(expected: str, printed: str) -> bool:
    """Return whether output is as a page shows it; runs of white space are alike."""
    parts = [r"\s+".join(map(re.escape, part.split())) for part in re.split(r"\.\.\.", expected)]
    return re.fullmatch(r"\s*" + r"\s*.*?\s*".join(parts) + r"\s*", printed, re.DOTALL) is not None


def run_page(page: Path, cli: Chrion, capfd: pytest.CaptureFixture[str]) -> None:
    """Run the marked blocks of a page in order in the current folder, and assert that their output is as documented."""
    content = page.read_text(encoding="utf-8")
    for name, (builder, parameters) in _MODELS.items():
        if name in content:
            onnx.save(build(builder, parameters), name)
    Path("profiles").symlink_to(ROOT / "profiles")
    names: dict[str, object] = {}
    for block in blocks(page):
        if block.mark.startswith("file: "):
            Path(block.mark.removeprefix("file: ")).write_text(block.body, encoding="utf-8")
        elif block.mark == "run" and block.language == "python":
            capfd.readouterr()
            exec(compile(block.body, str(block), "exec"), names)  # noqa: S102 - the page's own code
        elif block.mark == "output":
            printed = capfd.readouterr().out
            assert matches(block.body, printed), f"{block}: {printed}"
        elif block.mark == "run":
            for command in commands(block):
                _run_command(str(block), command, cli)


def _run_command(where: str, command: Command, cli: Chrion) -> None:
    program, *arguments = command.words
    assert program == "chrion"
    if arguments[0] == "model":  # the page writes a model that others assume
        for argument in arguments:
            if argument.endswith(".onnx"):
                Path(argument).unlink(missing_ok=True)
    code, out, err = cli(*arguments)
    printed = _STEP.sub("", out + err)
    assert code == command.exit_code, printed
    assert matches(command.expected, printed), f"{where}: {command.text}\n{printed}"


@functools.cache
def _chrion() -> Any:
    return typer.main.get_command(app)


def check_chrion(words: list[str]) -> None:
    """Parse a ``chrion`` command line with the real command, without running it.

    Raises:
        Exception: Typer's own, if a command, an option or a value does not exist.
    """
    group = _chrion()
    if words and words[0] in group.commands:
        context = typer.Context(group, info_name="chrion")
        group.commands[words[0]].make_context(words[0], words[1:], parent=context)
        return
    result = CliRunner().invoke(app, words)  # --help, --version
    assert result.exit_code == 0, result.output


def check_python(source: str) -> None:
    """Compile code, and check that the names it takes from chrion exist and take such arguments.

    Raises:
        Exception: It does not compile, or a name or an argument does not exist.
    """
    for part in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(part, ast.ImportFrom) and (part.module or "").split(".")[0] == "chrion":
            module = importlib.import_module(str(part.module))
            for alias in part.names:
                assert hasattr(module, alias.name), f"{part.module} has no {alias.name}"
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "chrion":
            assert hasattr(importlib.import_module("chrion"), part.attr), f"chrion has no {part.attr}"
        elif isinstance(part, ast.Call) and (called := _called(part.func)) is not None:
            inspect.signature(called).bind_partial(*part.args, **{k.arg: None for k in part.keywords if k.arg})


def _called(function: ast.expr) -> Any:
    """Return ``chrion.NAME`` or ``chrion.NAME.ATTRIBUTE``, or None for any other expression."""
    names: list[str] = []
    while isinstance(function, ast.Attribute):
        names.insert(0, function.attr)
        function = function.value
    if not names or not isinstance(function, ast.Name) or function.id != "chrion":
        return None
    found: Any = importlib.import_module("chrion")
    for name in names:
        found = getattr(found, name)
    return found
