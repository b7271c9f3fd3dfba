"""Tables whose figures are never cut."""

from __future__ import annotations

import io
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from chrion.report.figure_table import FigureTable, key, text

WIDTHS = (30, 60, 80, 100, 200)


def rendered(content: RenderableType, width: int) -> str:
    """Return the text that a console of a width prints, without colours."""
    output = io.StringIO()
    Console(width=width, file=output, color_system=None).print(content)
    return output.getvalue()


def figures(printed: str) -> Counter[str]:
    """Count the numbers in a text."""
    return Counter(re.findall(r"[-+]?\d+(?:\.\d+)?", printed))


def sample() -> FigureTable:
    """Return a table of two rows and twelve columns of figures."""
    table = FigureTable("A title", [key("pattern"), *(f"figure number {i}" for i in range(12)), text("remark")])
    for row in ("gpu", "latency-optimal"):
        table.add_row(
            row, *(f"{1000.5 + i:.2f} ms" for i in range(12)), "a remark of several words that may be wrapped"
        )
    return table


@pytest.mark.parametrize("width", WIDTHS)
def test_no_figure_is_cut_and_no_line_too_long(width: int) -> None:
    """Every cell is printed whole, beside its unit, within the console's width."""
    printed = rendered(sample(), width)
    assert "…" not in printed
    assert all(len(line.rstrip()) <= width for line in printed.splitlines())
    for i in range(12):
        assert printed.count(f"{1000.5 + i:.2f} ms") == 2


def test_a_wide_console_gets_one_table() -> None:
    """Each row is one line if the console is wide enough for all columns."""
    lines = rendered(sample(), 300).splitlines()
    assert sum(line.startswith("gpu ") for line in lines) == 1


def test_a_sparse_table_leaves_out_columns_without_figures() -> None:
    """Columns of empty cells and zeros are left out; a change of zero is a figure."""
    table = FigureTable("", [key("a"), "zero", "empty", "some", "change"], sparse=True)
    table.add_row("x", "0.0 MB", "", "0", "+0.0 %")
    table.add_row("y", "0", "", "3", "+0.0 %")
    assert rendered(table, 80).split("\n")[0].split() == ["a", "some", "change"]


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_ends_with_a_blank(width: int) -> None:
    """Neither wrapped titles and texts nor the last column leave blanks at the end of a line."""
    table = FigureTable("A title of several words that is wrapped in a narrow console", [key("a"), text("remark")])
    table.add_row("x", "a remark of several words that may be wrapped")
    table.add_row("y", "short")
    lines = rendered(table, width).splitlines()
    assert lines == [line.rstrip() for line in lines]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_parts_repeat_the_key_column(width: int) -> None:
    """If a table is split, every part has the key of each row, and the title is printed once."""
    printed = rendered(sample(), width)
    parts = len(re.findall(r"^gpu ", printed, re.MULTILINE))
    assert parts > 1
    assert len(re.findall(r"^latency-opt", printed, re.MULTILINE)) == parts
    assert printed.count("A title") == 1


def test_names_are_no_markup() -> None:
    """Square brackets in names and titles are printed as they are."""
    table = FigureTable("[bold]x[/bold]", [key("[red]"), "n"])
    table.add_row("[/]", "1")
    printed = rendered(table, 60)
    assert all(name in printed for name in ("[bold]x[/bold]", "[red]", "[/]"))


def test_rows_have_a_cell_for_each_column() -> None:
    """A row of another length is refused."""
    with pytest.raises(ValueError, match="expected a row of 2 cells, found 1"):
        FigureTable("", [key("a"), "b"]).add_row("x")


@given(
    rows=st.lists(st.lists(st.floats(0, 1e9).map(lambda x: f"{x:.3f}"), min_size=5, max_size=5), max_size=4),
    name=st.text(st.characters(codec="ascii", categories=["L", "Zs"]), max_size=30),
    width=st.integers(24, 120),
)
def test_all_numbers_read_back(rows: list[list[str]], name: str, width: int) -> None:
    """The numbers in the text are those of the table, for any figures, names and widths."""
    table = FigureTable("", [key("name"), *("alpha", "beta", "gamma", "delta", "epsilon")])
    for row in rows:
        table.add_row(name, *row)
    assert figures(rendered(table, width)) == Counter(cell for row in rows for cell in row)
