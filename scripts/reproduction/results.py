"""Results of reproductions: a file of all tables, and the sections of the page that show some of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from page_markers import fill_sections, markdown_table

from chrion.common.files import write_atomically

ROOT = Path(__file__).parents[2]
PAGE, DATA = ROOT / "docs" / "reproduction.md", ROOT / "docs" / "data" / "reproduction.json"
#: Rows of cells, of which the first is the head, by the name of a table.
Tables = Mapping[str, Sequence[Sequence[str]]]


def read_tables(data: Path = DATA) -> Tables:
    """Return the tables of the file by name; none without a file."""
    found: Tables = json.loads(data.read_text(encoding="utf-8")) if data.exists() else {}
    return found


def record_tables(tables: Tables, page: Path = PAGE, data: Path = DATA) -> None:
    """Replace tables in the file, and those sections of the page that have their names."""
    every = dict(sorted({**read_tables(data), **tables}.items()))
    data.parent.mkdir(exist_ok=True)
    lines = ",\n".join(f"{json.dumps(name)}: [\n{_format_rows(rows)}\n]" for name, rows in every.items())
    write_atomically(data, f"{{\n{lines}\n}}\n")
    text = page.read_text(encoding="utf-8")
    shown = {name: markdown_table(rows) for name, rows in tables.items() if f"<!-- begin: {name} -->" in text}
    if shown:
        write_atomically(page, fill_sections(text, shown))


def _format_rows(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as JSON, a line for each, so that a changed row is a changed line."""
    return ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows)
