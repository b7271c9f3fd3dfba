"""Try an installation of Chrion beside every distribution that provides onnxruntime, and write the table of results.

    python scripts/build_wheels.py --only x86_64 -o dist
    python scripts/try_flavours.py dist/chrion-*.whl -o docs/data

Each row is a new virtual environment. Distributions without a wheel for this system are left out.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from command_arguments import add_output
from page_markers import markdown_table
from result_files import write_results

from chrion.common.installation import FLAVOURS

#: Prints a digest of onnxruntime's files.
_FILES = """
import hashlib, importlib.util, pathlib
folder, text = pathlib.Path(importlib.util.find_spec("onnxruntime").origin).parent, hashlib.sha256()
for path in sorted(folder.rglob("*")):
    if path.is_file() and "__pycache__" not in path.parts:
        text.update(str(path).encode() + path.read_bytes())
print(text.hexdigest())
"""
#: Opens a session of a model that is cut, and compares its output with that of onnxruntime.
_USE = """
import numpy as np, onnx, chrion, onnxruntime as ort
from chrion.zoo import build
model = build("lstm", {"layers": 2, "seq": 2, "batch": 1, "io": 4}).SerializeToString()
with chrion.HybridSession(model, tune="never") as session:
    x = {i.name: np.ones(i.shape, np.float32) for i in session.get_inputs()}
    plain = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    assert all(map(np.array_equal, session.run(None, x), plain.run(None, x)))
"""


#: Uses a public name, which is an error if onnxruntime is missing or damaged.
_ASK = "import warnings; warnings.simplefilter('ignore'); import chrion; chrion.HybridSession"


class Environment:
    """A new virtual environment."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self._python = folder / "bin" / "python"

    def pip(self, *words: str) -> bool:
        """Run pip; return whether it succeeded."""
        command = [str(self._python), "-I", "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603

    def run(self, code: str) -> tuple[bool, str]:
        """Run Python code; return whether it succeeded, and the last line of what it printed."""
        done = subprocess.run([str(self._python), "-I", "-c", code], capture_output=True, text=True, check=False)  # noqa: S603
        text = done.stdout if done.returncode == 0 else done.stderr
        return done.returncode == 0, (text.strip().splitlines() or [""])[-1]

    def shell(self, command: str) -> bool:
        """Run commands of pip that a message gives."""
        return all(self.pip(*words.split()[1:]) for words in command.split(" && "))


def beside(wheel: Path, flavour: str, folder: Path) -> list[str] | None:
    """Return the row for a flavour that is installed before Chrion; None if there is no wheel of it."""
    environment = Environment(folder)
    if not environment.pip("install", "--only-binary=:all:", flavour):
        return None
    before = environment.run(_FILES)
    installed = environment.pip("install", str(wheel))
    unchanged = environment.run(_FILES) == before
    works, reason = environment.run(_USE)
    return [
        f"`pip install {flavour}`, then `chrion`",
        "yes" if installed and unchanged else "no",
        "yes" if works else reason,
        "",
    ]


def alone(wheel: Path, extra: str, folder: Path) -> list[str]:
    """Return the row for an extra on a new system."""
    environment = Environment(folder)
    environment.pip("install", f"{wheel}[{extra}]" if extra else str(wheel))
    works, reason = environment.run(_USE)[0], environment.run(_ASK)[1]
    words = f"`pip install 'chrion[{extra}]'`" if extra else "`pip install chrion` alone"
    return [words, "yes" if works else "", "yes" if works else "no", "" if works else message(reason)]


def clash(wheel: Path, removed: str, folder: Path) -> list[str]:
    """Return the row for two flavours of which one is removed again, and repaired as the message says."""
    environment = Environment(folder)
    environment.pip("install", "onnxruntime==1.31.1")
    environment.pip("install", f"{wheel}[gpu]")
    both = environment.run("import warnings; warnings.simplefilter('error'); import chrion")[1]
    environment.pip("uninstall", "-y", removed)
    broken = environment.run(_ASK)[1]
    command = re.search(r"repair it with: (.*)", broken)
    repaired = bool(command and environment.shell(command[1])) and environment.run(_USE)[0]
    words = f"`pip install onnxruntime 'chrion[gpu]'`, then `pip uninstall {removed}`"
    return [words, "no", "after the repair" if repaired else "no", f"{message(both)}; {message(broken)}"]


def message(text: str) -> str:
    """Return an error message in a cell of a table."""
    text = re.sub(r"/\S*/(site-packages/onnxruntime)", r".../\1", text.partition(": ")[2])
    return f"*{text}*"


def rows(wheel: Path, scratch: Path) -> list[list[str]]:
    """Return all rows of the table."""
    found = [["installed", "onnxruntime is unchanged", "Chrion works", "message"]]
    found += [alone(wheel, extra, scratch / f"extra-{extra}") for extra in ("", "cpu", "gpu")]
    for flavour in FLAVOURS:
        row = beside(wheel, flavour, scratch / flavour)
        if row:
            found.append(row)
            print(*row, sep=" | ")
    pair = ("onnxruntime", "onnxruntime-gpu")
    return found + [clash(wheel, removed, scratch / f"without-{removed}") for removed in pair]


def main(arguments: Sequence[str] | None = None) -> None:
    """Try all combinations, print the table and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path)
    add_output(parser)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        table = markdown_table(rows(given.wheel.resolve(), Path(scratch)))
    print(table)
    write_results(given.output, {"flavours": table})


if __name__ == "__main__":
    main()
