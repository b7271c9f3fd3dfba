"""Write the sections of pages that come from the code and from results of measurements.

    python scripts/fill_pages.py

Takes a second. Each section stands between markers (``<!-- begin: NAME -->``): results in ``docs/results.md`` (from the
file ``docs/data/NAME.json``), bfloat16 in ``docs/when-it-helps.md``, commands and policies in
``docs/reference/cli.md``, and layers in ``docs/design.md``. Run it after the code or the data has changed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from page_markers import fill_sections
from pages.commands import command_reference, policy_table
from pages.layers import layer_table
from pages.results import precision_table, result_sections

from chrion.cli.app import app
from chrion.common.files import write_atomically

DOCS = Path(__file__).parents[1] / "docs"


def page_sections() -> Mapping[str, Mapping[str, str]]:
    """Return the sections of each page by name."""
    return {
        "results.md": result_sections(DOCS / "data"),
        "when-it-helps.md": {"precision": precision_table(DOCS / "data")},
        "reference/cli.md": {"commands": command_reference(app, "chrion"), "policies": policy_table()},
        "design.md": {"layers": layer_table()},
    }


def filled_pages() -> dict[Path, str]:
    """Return the text that each page should have."""
    return {
        DOCS / page: fill_sections((DOCS / page).read_text(encoding="utf-8"), sections)
        for page, sections in page_sections().items()
    }


def main() -> None:
    """Write all pages."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for page, text in filled_pages().items():
        write_atomically(page, text)


if __name__ == "__main__":
    main()
