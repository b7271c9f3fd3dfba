"""``chrion cache``: measurements and decisions kept between runs."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from chrion.cli.commands import Command, Group
from chrion.cli.console import note, show, show_json
from chrion.cli.exit_codes import FAILED
from chrion.cli.options import JsonOption
from chrion.common.files import cache_folder
from chrion.common.units import format_mb
from chrion.common.wrong_values import wrong_value
from chrion.errors import OptionError
from chrion.report.figure_table import FigureTable, key, text

#: Kinds of cached files: folders of the cache.
KINDS = {
    "measurements": "costs of operators and transfers, for profiles",
    "decisions": "decisions of sessions between plans and plain onnxruntime",
}
_ENTRY = re.compile(r"[0-9a-f]{32}\.json")

app = typer.Typer(help="List, measure or clear cached measurements and decisions.", rich_markup_mode="rich", cls=Group)

KindArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="KIND", help=f"{' or '.join(KINDS)}.", show_default="all", autocompletion=lambda: list(KINDS)
    ),
]


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Cached files of one kind, or of one machine within a kind."""

    kind: str
    #: The machine's fingerprint with its settings; empty for all.
    machine: str
    entries: int
    size_bytes: int


@app.callback(invoke_without_command=True)
def _options(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_entries()


@app.command("list", cls=Command, epilog="[bold]Example[/bold]\n  chrion cache list --json")
def list_entries(as_json: JsonOption = False) -> None:
    """List the number and the size of cached files by kind and machine."""
    folder = cache_folder()
    usages = [usage for kind in KINDS for usage in _usages(folder, kind)]
    if as_json:
        entries = [{"kind": u.kind, "machine": u.machine, "entries": u.entries, "bytes": u.size_bytes} for u in usages]
        show_json({"folder": str(folder), "entries": entries})
        return
    table = FigureTable("", [key("kind"), text("machine"), "entries", "size"])
    for usage in usages:
        table.add_row(usage.kind, usage.machine, str(usage.entries), format_mb(usage.size_bytes / 1e6))
    show(f"cache folder: {folder}", table, *(f"{kind}: {meaning}" for kind, meaning in KINDS.items()))


@app.command(cls=Command, epilog="[bold]Example[/bold]\n  chrion cache size measurements")
def size(kind: KindArgument = None, as_json: JsonOption = False) -> None:
    """Print the total size of the cache."""
    files = [path for name in _kinds(kind) for path in _entries(cache_folder() / name)]
    total = sum(map(_size_bytes, files))
    if as_json:
        show_json({"entries": len(files), "bytes": total})
    else:
        show(f"{format_mb(total / 1e6)} in {len(files)} files")


@app.command(cls=Command, epilog="[bold]Examples[/bold]\n  chrion cache clear\n  chrion cache clear decisions --yes")
def clear(
    kind: KindArgument = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete cached files. Profiles are measured and sessions decide again when they are needed next.

    Only files that Chrion wrote to its cache are deleted.
    """
    kinds, folder = _kinds(kind), cache_folder()
    files = [path for name in kinds for path in _entries(folder / name)]
    if not files:
        note(f"nothing to delete in {folder}")
        return
    description = (
        f"{len(files)} files ({format_mb(sum(map(_size_bytes, files)) / 1e6)}) of {' and '.join(kinds)} in {folder}"
    )
    if not (yes or _confirm(f"Delete {description}?")):
        note("nothing deleted")
        raise typer.Exit(FAILED)
    failed = [path for path in files if not _delete(path)]
    for name in kinds:
        _remove_empty_folders(folder / name)
    if failed:
        raise OptionError(f"cache: {len(failed)} of {len(files)} files cannot be deleted, for example {failed[0]}")
    note(f"deleted {description}")


def _confirm(question: str) -> bool:
    if not sys.stdin.isatty():
        raise OptionError("cache: a confirmation is needed, and there is no terminal to ask on", hint="add --yes")
    return typer.confirm(question, err=True)


def _kinds(kind: str | None) -> list[str]:
    if kind is not None and kind not in KINDS:
        raise wrong_value("KIND", " or ".join(KINDS), kind)
    return [kind] if kind else list(KINDS)


def _usages(folder: Path, kind: str) -> Iterator[CacheUsage]:
    by_machine: dict[str, list[Path]] = {}
    for path in _entries(folder / kind):
        machine = path.parent.name if path.parent != folder / kind else ""
        by_machine.setdefault(machine, []).append(path)
    if not by_machine:
        yield CacheUsage(kind, "", 0, 0)
    for machine, files in sorted(by_machine.items()):
        yield CacheUsage(kind, machine, len(files), sum(map(_size_bytes, files)))


def _entries(folder: Path) -> list[Path]:
    """Return the files of a kind that Chrion named; others in the folder are left alone."""
    return sorted(path for path in folder.rglob("*.json") if _ENTRY.fullmatch(path.name) and path.is_file())


def _size_bytes(path: Path) -> int:
    with contextlib.suppress(OSError):  # another process has just deleted it
        return path.stat().st_size
    return 0


def _delete(path: Path) -> bool:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _remove_empty_folders(folder: Path) -> None:
    for path in sorted([*folder.rglob("*"), folder], reverse=True):
        with contextlib.suppress(OSError):  # it is a file, or not empty
            path.rmdir()
