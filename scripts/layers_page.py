"""Write the layers of the package into ``docs/design.md`` from the list that the tests check.

    python scripts/layers_page.py

Takes a moment. A test fails if the page differs from the list.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

from page_markers import fill_sections

import chrion
from chrion.files import write_atomically

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "design.md"
sys.path.insert(0, str(ROOT / "tests"))

from layers import PACKAGES  # noqa: E402 - of the tests


def purpose(name: str) -> str:
    """Return the first sentence of the docstring of a package or a module."""
    path = Path(chrion.__file__).parent / name.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ").replace("``", "`").removesuffix(".")


def format_page() -> str:
    """Return the page with the current layers, the highest first."""
    rows = ["| layer | package or module | purpose |", "|---|---|---|"]
    for layer, names in reversed(list(enumerate(PACKAGES, 1))):
        rows += [f"| {layer} | `{name}` | {purpose(name)} |" for name in names]
    return fill_sections(PAGE.read_text(encoding="utf-8"), {"layers": "\n".join(rows)})


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    write_atomically(PAGE, format_page().encode())


if __name__ == "__main__":
    main()
