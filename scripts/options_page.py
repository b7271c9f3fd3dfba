"""Write the tables of ``docs/options.md`` from the table of options that sessions use.

    python scripts/options_page.py

Takes a second. A test fails if the page differs from the table.
"""

from __future__ import annotations

import argparse
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
    Treatment,
)

PAGE = Path(__file__).parent.parent / "docs" / "options.md"
TABLES: Mapping[str, Mapping[str, Option]] = {
    "session options": SESSION_OPTIONS,
    "session keys": SESSION_KEYS,
    "run options": RUN_OPTIONS,
    "run keys": RUN_KEYS,
    "arguments": ARGUMENTS,
}


def format_harmless_values(option: Option) -> str:
    """Describe the values of a configuration key that do not make the model run plain, although others do."""
    shown = [f"`{value}`" for value in option.harmless or () if value and option.treatment is Treatment.PLAIN]
    return f" (except {', '.join(shown)})" if shown else ""


def format_table(options: Mapping[str, Option]) -> str:
    """Return one table, sorted by treatment and name."""
    order = list(Treatment)
    rows = sorted(options.values(), key=lambda o: (order.index(o.treatment), o.name))
    cells = [(f"`{o.name}`", o.treatment.value, o.why + format_harmless_values(o)) for o in rows]
    return markdown_table([("option", "treatment", "explanation"), *cells]).replace("---:", "---")


def format_page() -> str:
    """Return the page with current tables."""
    tables = {name: format_table(options) for name, options in TABLES.items()}
    return fill_sections(PAGE.read_text(encoding="utf-8"), tables)


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    write_atomically(PAGE, format_page().encode())


if __name__ == "__main__":
    main()
