"""Tables of results, from the files in ``docs/data``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from page_markers import markdown_table
from result_files import read_parts

#: Longer tables are folded.
ROWS_IN_SIGHT = 40


def result_sections(folder: Path) -> dict[str, str]:
    """Return the Markdown of every file of results in a folder, by the file's name without its suffix."""
    found = {path.stem: read_parts(path.parent, path.stem) for path in sorted(folder.glob("*.json"))}
    return {name: format_parts(parts) for name, parts in found.items() if parts}


def precision_table(folder: Path) -> str:
    """Return the share of the fastest plain session's time that each model takes in bfloat16 and in float32.

    A session that runs plain has no share: what differs from 1 is noise. An error against float32 tells that the timed
    one had a plan, although another chose none.
    """
    part = next(part for part in read_parts(folder, "peers") if "rows" in part)
    at = part["columns"].index

    def share(row: Sequence[str], chosen: str, ratio: str, error: float) -> str:
        number, is_plain = row[at(ratio)].partition(" ")[0], row[at(chosen)] == "plain"
        return f"{number} or plain" if is_plain and error else "plain" if is_plain else number

    rows = [
        [
            row[at("model")],
            share(row, "chosen in bf16", "bf16 / onnxruntime", float(row[at("error of bf16")])),
            share(row, "chosen", "hybrid / onnxruntime", 0.0),
        ]
        for row in part["rows"]
    ]
    return markdown_table([["12 layers unless stated", "bfloat16", "float32"], *rows])


def format_parts(parts: Iterable[Mapping[str, Any]]) -> str:
    """Return paragraphs and tables in Markdown."""
    return "\n\n".join(part["text"] if "text" in part else format_table(part) for part in parts)


def format_table(part: Mapping[str, Any]) -> str:
    """Return a table in Markdown; a long one is folded."""
    table = markdown_table([part["columns"], *part["rows"]])
    count = len(part["rows"])
    if count <= ROWS_IN_SIGHT:
        return table
    return f"<details>\n<summary>{count} rows</summary>\n\n{table}\n\n</details>"
