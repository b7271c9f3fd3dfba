"""The machine and the version of the code that measured something, and the refusal to pool several versions."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path

import onnxruntime as ort

import chrion
from chrion.errors import OptionError
from chrion.profiler import this_machine

_ROOT = Path(__file__).parents[2]
#: What, if it is changed, changes what is measured.
_MEASURED = ("chrion", "scripts", ":(exclude)scripts/decoding/measured")


@functools.cache
def code_version(root: Path = _ROOT) -> str:
    """Return the commit of a checkout, or the version of Chrion without git.

    It is that of the first call, since a process keeps the code that it has loaded. Changes that are not committed are
    marked.
    """
    if (root / ".git").exists():
        commit = _git(root, "rev-parse", "--short", "HEAD")
        if commit:
            return f"{commit}, changed" if _git(root, "status", "--porcelain", "--", *_MEASURED) else commit
    return chrion.__version__


def check_version(*paths: Path) -> str:
    """Return the version of the code that wrote the lines of files, empty if they do not state it.

    Raises:
        OptionError: There are several.
    """
    rows = [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    found = sorted({row.get("code", "") for row in rows})
    if len(found) > 1:
        names = " and ".join(map(str, paths))
        versions = ", ".join(version or "unknown" for version in found)
        raise OptionError(
            f"{names}: measured with several versions of the code: {versions}", hint="keep the lines of one of them"
        )
    return found[0] if found else ""


def here() -> str:
    """Return the machine and the version of onnxruntime."""
    return f"{this_machine()}, onnxruntime {ort.get_version_string()}"


def _git(root: Path, *words: str) -> str:
    try:
        found = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)  # noqa: S603, S607 - fixed words; git is where the user has it
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()
