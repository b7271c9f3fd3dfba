"""Results of measurements as data: ``FOLDER/NAME.json``, of which ``docs/results.md`` draws those in ``docs/data``.

A file has the parts of a section in order. A part is a paragraph (``text``) or a table (``columns`` and ``rows``, all
cells as text).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from chrion.common.files import write_atomically

#: Between two cells of a row; a bar inside a cell has no spaces around it.
_SEPARATOR = re.compile(r"(?<=\s)\|(?=\s)")


def write_results(folder: Path | None, contents: Mapping[str, str]) -> None:
    """Write results into a folder; do nothing without one.

    Args:
        folder: The folder.
        contents: By the name of the file without its suffix, paragraphs and tables in Markdown.
    """
    if folder is not None:
        for name, content in contents.items():
            write_atomically(folder / f"{name}.json", format_parts(split_parts(content)).encode())


def read_parts(folder: Path | None, name: str) -> list[dict[str, Any]]:
    """Return the parts of stored results; none without the folder, the file, or parts in it."""
    path = folder / f"{name}.json" if folder else None
    return json.loads(path.read_text(encoding="utf-8")).get("parts", []) if path and path.exists() else []


def read_rows(folder: Path | None, name: str) -> list[list[str]]:
    """Return the rows of all tables of stored results, without heads."""
    return [row for part in read_parts(folder, name) for row in part.get("rows", [])]


def split_parts(content: str) -> list[dict[str, Any]]:
    """Return the paragraphs and tables of a text in Markdown."""
    parts: list[dict[str, Any]] = []
    for block in split_blocks(content.splitlines()):
        if block[0].startswith("| "):
            columns, _, *rows = map(split_cells, block)
            parts.append({"columns": columns, "rows": rows})
        else:
            parts.append({"text": "\n".join(block)})
    return parts


def split_blocks(lines: Iterable[str]) -> Iterable[list[str]]:
    """Yield runs of lines between blank lines; a block of code is one run, blank lines included."""
    block: list[str] = []
    in_code = False
    for line in [*lines, ""]:
        in_code ^= line.startswith("```")
        if line or in_code:
            block.append(line)
        elif block:
            yield block
            block = []


def split_cells(line: str) -> list[str]:
    """Return the cells of a line of a table."""
    return [cell.strip() for cell in _SEPARATOR.split(line.strip().removeprefix("|").removesuffix("|"))]


def format_parts(parts: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of a file, with one line for each paragraph and each row."""
    shown = []
    for part in parts:
        rows = ",\n    ".join(json.dumps(row, ensure_ascii=False) for row in part.get("rows", ()))
        if rows or "columns" in part:
            columns = json.dumps(part["columns"], ensure_ascii=False)
            shown.append(f'  {{"columns": {columns},\n   "rows": [\n    {rows}]}}')
        else:
            shown.append(f"  {json.dumps(part, ensure_ascii=False)}")
    return '{"parts": [\n' + ",\n".join(shown) + "\n]}\n"
