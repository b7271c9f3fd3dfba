"""Output of commands: results go to stdout; progress, warnings and errors to stderr.

With ``--json`` a command prints one JSON object on stdout and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

#: Columns of tables that go to a file or a pipe; COLUMNS in the environment changes them.
_FILE_WIDTH = 100
#: Seconds between two lines about a step where stderr is no terminal (a choice, not measured).
_LINE_S = 10.0

#: Called with the number of items done, the number of all (0 if it is not known), and the name of the last one.
Update = Callable[[int, int, str], None]

log = logging.getLogger(__name__)
stderr = Console(stderr=True, soft_wrap=True)


def show(*renderables: Any) -> None:
    """Print tables and lines of plain text on stdout; only a terminal gets lines that are wrapped."""
    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = Console(width=_FILE_WIDTH if wide else None)
    for renderable in renderables:
        whole = isinstance(renderable, str) and not console.is_terminal
        console.print(renderable, highlight=False, markup=False, soft_wrap=whole)


def show_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    print(json.dumps(content), flush=True)  # noqa: T201 - this is what stdout is for


def note(message: str) -> None:
    """Print a line on stderr."""
    stderr.print(f"chrion: {message}", highlight=False, markup=False)


@contextlib.contextmanager
def step(text: str, *, animated: bool = True) -> Iterator[Update]:
    """Show on stderr that a step of the work is in progress, from its first moment on.

    On a terminal it is a line with a bar and the elapsed time, which disappears at the end; elsewhere it is a line of
    text, and after an item one more if the last one is 10 s old.

    Args:
        text: What is done: ``profiling lstm.onnx``.
        animated: Redraw the line ten times a second. Steps that measure redraw it only after updates, since a thread
            that wakes up would disturb what is measured.

    Yields:
        The function to call after each item of the step.
    """
    before = time.perf_counter()
    if stderr.is_terminal:
        with _bar(text, animated=animated) as update:
            yield update
    else:
        yield _lines(text)
    log.info("%s took %.1f s", text, time.perf_counter() - before)


def _lines(text: str) -> Update:
    note(f"{text} ...")
    due = time.monotonic() + _LINE_S

    def update(done: int, total: int, name: str) -> None:
        nonlocal due
        if (now := time.monotonic()) >= due:
            note(f"{_progress(text, done, total, name)} ...")
            due = now + _LINE_S

    return update


def _progress(text: str, done: int, total: int, name: str) -> str:
    number = f"{done} of {total}" if total else f"{done} done"
    return f"{text}, {number}{f': {name}' if name else ''}"


@contextlib.contextmanager
def _bar(text: str, *, animated: bool) -> Iterator[Update]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True, auto_refresh=animated) as progress:
        task = progress.add_task(text, total=None)
        progress.refresh()

        def update(done: int, total: int, name: str) -> None:
            progress.update(task, completed=done, total=total or None, description=_progress(text, done, total, name))
            if not animated:
                progress.refresh()

        yield update
