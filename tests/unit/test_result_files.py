"""Results of measurements as files."""

from __future__ import annotations

from pathlib import Path

from page_markers import markdown_table
from result_files import read_parts, read_rows, write_results


def test_results_are_read_back(tmp_path: Path) -> None:
    """Paragraphs and tables keep their order, and empty cells at the end of a row are cells."""
    rows = [["a", "b", ""], ["1", "", ""], ["**2**", "`x|y`", ""]]
    write_results(tmp_path, {"some": f"First\nparagraph.\n\n- a list\n\n{markdown_table(rows)}\n\nLast."})
    first, second, table, last = read_parts(tmp_path, "some")
    assert first == {"text": "First\nparagraph."}
    assert second == {"text": "- a list"}
    assert table == {"columns": rows[0], "rows": rows[1:]}
    assert last == {"text": "Last."}
    assert read_rows(tmp_path, "some") == rows[1:]


def test_compact_cells_are_split(tmp_path: Path) -> None:
    """Empty cells without two spaces are cells as well."""
    write_results(tmp_path, {"some": "| a | b | c |\n|---|---|---|\n| 1 | | 3 |"})
    assert read_rows(tmp_path, "some") == [["1", "", "3"]]


def test_code_is_one_paragraph(tmp_path: Path) -> None:
    """A blank line in a block of code does not end the paragraph."""
    write_results(tmp_path, {"some": "```\na\n\n| b |\n```"})
    assert read_parts(tmp_path, "some") == [{"text": "```\na\n\n| b |\n```"}]


def test_results_may_be_missing(tmp_path: Path) -> None:
    """Without a folder or a file there are no rows, and without a folder nothing is written."""
    write_results(None, {"some": "text"})
    assert (read_parts(None, "some"), read_rows(tmp_path, "some")) == ([], [])
