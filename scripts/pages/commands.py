"""Reference of the command line as Markdown, from Typer's own definitions of commands and options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import typer

from chrion.scheduler import POLICIES

#: A heading in the text below a command's options, in rich's markup.
_HEADING = re.compile(r"\[bold\](.+?)\[/bold\]")


def command_reference(app: typer.Typer, name: str) -> str:
    """Return the reference of an application and its subcommands.

    Args:
        app: The application.
        name: The name of its command.
    """
    command: Any = typer.main.get_command(app)
    text = "\n".join(_describe(command, typer.Context(command, info_name=name), name, 2))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def policy_table() -> str:
    """Return the table of the built-in policies from their registry."""
    rows = [f"| `{policy.name}` | {policy.description} |" for policy in POLICIES.values()]
    return "\n".join(["| policy | description |", "| --- | --- |", *rows])


def _describe(command: Any, context: typer.Context, name: str, level: int) -> Iterator[str]:
    """Yield lines of Markdown for a command; those of its subcommands follow."""
    if level > 2:
        yield from ("", f"{'#' * level} `{name}`")
    yield from ("", command.help or "", "", "```text")
    yield from (" ".join([name, *command.collect_usage_pieces(context)]), "```", "")
    records = [(p.param_type_name, p.get_help_record(context)) for p in command.get_params(context)]
    for kind in ("argument", "option"):
        yield from _table(kind, (record for of, record in records if of == kind and record))
    subcommands = getattr(command, "commands", {})
    rows = [(f"[`{name} {key}`](#{name.replace(' ', '-')}-{key})", _summary(sub)) for key, sub in subcommands.items()]
    yield from _table("command", rows, quote=False)
    yield from _epilog(command.epilog or "")
    for key, sub in subcommands.items():
        inner = typer.Context(sub, info_name=key, parent=context)
        yield from _describe(sub, inner, f"{name} {key}", level + 1)


def _table(head: str, rows: Iterable[tuple[str, str]], *, quote: bool = True) -> Iterator[str]:
    """Yield a table of two columns; nothing without rows."""
    found = [(f"`{left}`" if quote else left, right.replace("|", "\\|")) for left, right in rows]
    if found:
        yield from (f"| {head} | |", "| --- | --- |", *(f"| {left} | {right} |" for left, right in found), "")


def _summary(command: Any) -> str:
    """Return the first paragraph of a command's description on one line."""
    return " ".join((command.help or "").split("\n\n")[0].split())


def _epilog(text: str) -> Iterator[str]:
    """Yield the text below a command's options: examples as code; lists of policies have a section of their own."""
    parts = _HEADING.split(text)
    if parts[0].strip():
        yield from (parts[0].strip(), "")
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        lines = [line.strip() for line in body.splitlines() if line.strip()]
        if title.startswith("Example"):
            yield from ("```console", *(f"$ {line}" for line in lines), "```", "")
        elif title != "Schedulers":
            yield from (f"**{title}**", "", *(f"- {line}" for line in lines), "")
