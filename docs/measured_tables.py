"""The directive ``measured``, which draws the results of a measurement from ``docs/data``.

A file has paragraphs and tables in order; ``scripts/result_files.py`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

DATA = Path(__file__).parent / "data"


class MeasuredTables(SphinxDirective):
    """Draw the results of which the argument is the name."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes of all parts."""
        path = DATA / f"{self.arguments[0]}.json"
        self.env.note_dependency(str(path))
        parts = json.loads(path.read_text(encoding="utf-8"))["parts"]
        lines = "\n\n".join(format_part(part) for part in parts).splitlines()
        drawn = nodes.container()
        self.state.nested_parse(StringList(lines, str(path)), 0, drawn)
        return drawn.children


def format_part(part: Mapping[str, Any]) -> str:
    """Return a paragraph or a table in Markdown; all columns of a table but the first are aligned to the right."""
    if "text" in part:
        return str(part["text"])
    columns: Sequence[str] = part["columns"]
    rows = [columns, ["---", *["---:"] * (len(columns) - 1)], *part["rows"]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
