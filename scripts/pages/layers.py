"""The table of the package's layers, from the list that the tests check (``tests`` has to be on the path)."""

from __future__ import annotations

import ast
from pathlib import Path

import chrion
from layers import LAYERS


def layer_table() -> str:
    """Return a row for each package and module, the highest layer first."""
    rows = ["| layer | package or module | purpose |", "| --- | --- | --- |"]
    for layer, names in reversed(list(enumerate(LAYERS, 1))):
        rows += [f"| {layer} | `{name}` | {purpose(name)} |" for name in reversed(names)]
    return "\n".join(rows)


def purpose(name: str) -> str:
    """Return the first sentence of the docstring of a package or a module."""
    path = Path(chrion.__file__).parent / name.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ").replace("``", "`").removesuffix(".")
