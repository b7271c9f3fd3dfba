"""The families of exporters and the environments that they run in.

A family is a module of this folder that assigns its requirements to ``REQUIREMENTS``. Families with the same
requirements share an environment.
"""

from __future__ import annotations

import ast
import hashlib
import shlex
import subprocess
import tempfile
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

FAMILIES = Path(__file__).parent
_REQUIREMENTS = "REQUIREMENTS"


def read_requirements(module: Path) -> list[str] | None:
    """Return a family's requirements without importing it; None for a module that is not a family."""
    for statement in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and [ast.unparse(t) for t in statement.targets] == [_REQUIREMENTS]:
            return [str(item) for item in ast.literal_eval(statement.value)]
    return None


def find_families() -> dict[str, list[str]]:
    """Return the requirements of all families by name."""
    found = {path.stem: read_requirements(path) for path in sorted(FAMILIES.glob("*.py"))}
    return {name: needed for name, needed in found.items() if needed is not None}


@contextmanager
def open_environments(kept: Path | None) -> Iterator[Path]:
    """Provide the folder of the environments: the given one, or a temporary one."""
    if kept is not None:
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def prepare_environment(folder: Path, needed: Sequence[str]) -> Path:
    """Return the interpreter of the environment with the given requirements, and create it if it does not exist.

    Requirements that begin with a dash are options for pip.
    """
    key = hashlib.sha256("\n".join(sorted(needed)).encode()).hexdigest()[:12]
    python, complete = folder / key / "bin" / "python", folder / key / "complete"
    if not complete.exists():
        print(f"installing {', '.join(needed)}", flush=True)
        venv.create(folder / key, with_pip=True, clear=True)
        arguments = [part for item in needed for part in (shlex.split(item) if item.startswith("-") else [item])]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *arguments], check=True)  # noqa: S603 - requirements from the repository
        complete.touch()
    return python
