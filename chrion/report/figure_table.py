"""Tables whose figures are never cut, however narrow the console is.

rich shortens the cells of a table that does not fit to ``46.…``. A :class:`FigureTable` that does not fit is printed as
several tables instead, one below the other: each repeats the columns that identify the rows and has as many of the
other columns as fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

#: An empty cell, or a zero with or without a unit; a change of zero has a sign.
_NOTHING = re.compile(r"(0(\.0+)?( \S+)?)?")
#: The minimum width of a column of longer text, about two words.
_TEXT_WIDTH = 12


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    name: str
    #: Text is left-aligned and may be wrapped; figures are right-aligned and never wrapped.
    is_text: bool = False
    #: The column identifies the rows and is repeated in every part of a table that is printed in several parts.
    is_key: bool = False


def text(name: str) -> Column:
    """Return a column of text."""
    return Column(name, is_text=True)


def key(name: str, *, is_text: bool = True) -> Column:
    """Return a column that identifies the rows."""
    return Column(name, is_text=is_text, is_key=True)


class FigureTable:
    """A table of plain text that chooses its form when it is printed; markup in cells is printed as it is."""

    def __init__(self, title: str, columns: Sequence[Column | str], *, sparse: bool = False) -> None:
        """Make an empty table.

        Args:
            title: Its title; may be empty.
            columns: Its columns; one given by its name alone holds figures.
            sparse: Leave out columns that are empty or hold zeros only.
        """
        self.title = title
        self.sparse = sparse
        self.columns = [Column(column) if isinstance(column, str) else column for column in columns]
        self.rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        """Add a row with one cell for each column.

        Raises:
            ValueError: The number of cells is not the number of columns.
        """
        if len(cells) != len(self.columns):
            raise ValueError(f"expected a row of {len(self.columns)} cells, found {len(cells)}")
        self.rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        for renderable in self._renderables(console, options):
            yield from map(_trimmed, console.render_lines(renderable, options, pad=False))

    def _renderables(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if self.title:
            yield Text(self.title, style="bold")
        for at, part in enumerate(self._parts(console, options)):
            if at:
                yield Text()
            table = self._table(part)
            if _min_width(console, options, table) <= options.max_width:
                yield table
            else:
                yield from self._lines(part)
        yield Text()

    def _parts(self, console: Console, options: ConsoleOptions) -> list[list[int]]:
        """Return the columns of each table to print: the key columns, and as many others as fit, in their order."""
        keys = [at for at, column in enumerate(self.columns) if column.is_key]
        others = [at for at, column in enumerate(self.columns) if not column.is_key]
        if self.sparse:
            others = [at for at in others if not all(_NOTHING.fullmatch(row[at]) for row in self.rows)]
        parts: list[list[int]] = []
        for at in others:
            wider = [*parts[-1], at] if parts else [*keys, at]
            if parts and _min_width(console, options, self._table(wider)) > options.max_width:
                parts.append([*keys, at])
            elif parts:
                parts[-1] = wider
            else:
                parts.append(wider)
        return parts or [keys]

    def _table(self, columns: Sequence[int]) -> Table:
        named = any(self.columns[at].name for at in columns)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False, show_header=named)
        for at in columns:
            column, cells = self.columns[at], [row[at] for row in self.rows]
            widest = max((cell_len(cell) for cell in cells), default=0)
            if column.is_text:
                min_width = min(_TEXT_WIDTH, max(widest, cell_len(column.name)))
                table.add_column(Text(column.name), overflow="fold", min_width=min_width)
            else:
                heading = _wrapped(column.name, widest)
                min_width = max([widest, *map(cell_len, heading.split("\n"))])
                table.add_column(Text(heading), justify="right", no_wrap=True, min_width=min_width)
        for row in self.rows:
            table.add_row(*(Text(row[at]) for at in columns))
        return table

    def _lines(self, columns: Sequence[int]) -> Iterator[RenderableType]:
        """Yield one line for each cell, for a console that is too narrow for a table."""
        for row in self.rows:
            for at in columns:
                if row[at]:
                    yield Text(f"{self.columns[at].name}: {row[at]}", overflow="fold")


def _trimmed(line: Sequence[Segment]) -> Text:
    """Return a printed line without the blanks at its end."""
    joined = Text.assemble(*((segment.text, segment.style or "") for segment in line))
    joined.rstrip()
    return joined


def _min_width(console: Console, options: ConsoleOptions, table: Table) -> int:
    return Measurement.get(console, options.update(width=10_000), table).minimum


def _wrapped(name: str, width: int) -> str:
    """Return a heading, wrapped between words to the width of its column."""
    words = name.split()
    width = max([width, *map(len, words)])
    lines = [""]
    for word in words:
        longer = f"{lines[-1]} {word}".strip()
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return "\n".join(lines)
