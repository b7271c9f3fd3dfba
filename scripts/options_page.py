"""Write the tables of ``docs/options.md``: ``python scripts/options_page.py``.

The page is made from the table that sessions use; a test fails while it says anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from page_markers import fill_sections, markdown_table

from chrion.files import write_atomically
from chrion.runtime.options.table import (
    ARGUMENTS,
    RUN_KEYS,
    RUN_OPTIONS,
    SESSION_KEYS,
    SESSION_OPTIONS,
    Option,
)

PAGE = Path(__file__).parent.parent / "docs" / "options.md"
TABLES: Mapping[str, Mapping[str, Option]] = {
    "session options": SESSION_OPTIONS,
    "session keys": SESSION_KEYS,
    "run options": RUN_OPTIONS,
    "run keys": RUN_KEYS,
    "arguments": ARGUMENTS,
}


def values(option: Option) -> str:
    """Describe the values of a configuration key that leave a session cut."""
    shown = [f"`{value}`" for value in option.harmless or () if value]
    return f" (but not at {', '.join(shown)})" if shown else ""


def table(options: Mapping[str, Option]) -> str:
    """Return one table, sorted by treatment and name."""
    order = ["honoured", "runs plain", "no effect"]
    rows = sorted(options.values(), key=lambda o: (order.index(o.treatment.value), o.name))
    cells = [(f"`{o.name}`", o.treatment.value, o.why + values(o)) for o in rows]
    return markdown_table([("option", "in a cut session", "how, or why"), *cells]).replace("---:", "---")


def page() -> str:
    """Return the page as it should be."""
    return fill_sections(PAGE.read_text(encoding="utf-8"), {name: table(options) for name, options in TABLES.items()})


if __name__ == "__main__":
    write_atomically(PAGE, page().encode())
