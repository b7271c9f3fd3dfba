"""Exported models as folders, which families of exporters write and the checks read.

A family is a module of this folder. It declares ``REQUIREMENTS`` (the packages of its environment) and functions marked
with :func:`case`, each of which exports one model with random weights. The folder of a case contains::

    model.onnx          and files of external data
    feeds-0.npz ...     a request each; later ones may have other shapes
    case.json           name, exporter, its version, tolerances

This module needs numpy alone, so that it runs in every family's environment.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

#: A request: an array by input name, or a list of arrays for an input that is a sequence of tensors.
Feed = Mapping[str, "np.ndarray[Any, Any] | list[np.ndarray[Any, Any]]"]
#: A function that exports a model to a path and returns requests for it.
Maker = Callable[[Path], Sequence[Feed]]


@dataclass(frozen=True)
class Case:
    """The description of an exported model.

    Attributes:
        name: ``family/model``.
        exporter: The program that wrote the model, as its users call it.
        version: Version of that program.
        rtol: Relative tolerance for the outputs.
        atol: Absolute tolerance for the outputs.
    """

    name: str
    exporter: str
    version: str
    rtol: float = 1e-3
    atol: float = 1e-4


@dataclass(frozen=True)
class _Entry:
    make: Maker
    exporter: str
    package: str
    rtol: float
    atol: float


_ENTRIES: dict[str, _Entry] = {}


def case(name: str, *, exporter: str, package: str, rtol: float = 1e-3, atol: float = 1e-4) -> Callable[[Maker], Maker]:
    """Mark a function that exports a model.

    Args:
        name: Name of the model, unique in its family.
        exporter: The program, as users call it: ``torch.onnx (dynamo)``.
        package: The distribution whose version is recorded.
        rtol: Relative tolerance for outputs.
        atol: Absolute tolerance for outputs.
    """

    def register(make: Maker) -> Maker:
        if name in _ENTRIES:
            raise ValueError(f"duplicate case {name!r}")
        _ENTRIES[name] = _Entry(make, exporter, package, rtol, atol)
        return make

    return register


def main(family: str, arguments: Sequence[str] | None = None) -> int:
    """Export the cases of the family that has been imported: ``python FAMILY.py FOLDER [--only NAME ...]``.

    Returns:
        The exit code: 1 if a model could not be exported; the others are exported all the same.
    """
    parser = argparse.ArgumentParser(description=f"Export the models of {family}.")
    parser.add_argument("folder", type=Path, help="where to create a folder for each model, in a folder of the family")
    parser.add_argument("--only", nargs="*", default=[], help="names of models (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names of models and exit")
    options = parser.parse_args(arguments)
    chosen = {name: entry for name, entry in _ENTRIES.items() if not options.only or name in options.only}
    if options.list:
        print(*chosen, sep="\n")
        return 0
    failed = 0
    for name, entry in chosen.items():
        folder = options.folder / family / name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            feeds = entry.make(folder / "model.onnx")
            write_feeds(folder, feeds)
            version = metadata.version(entry.package)
            exported = Case(f"{family}/{name}", entry.exporter, version, entry.rtol, entry.atol)
            (folder / "case.json").write_text(json.dumps(asdict(exported), indent=1) + "\n")
            print(f"{family}/{name}: exported", flush=True)
        except Exception:
            failed += 1
            print(f"{family}/{name}: failed", flush=True)
            traceback.print_exc()
    return 1 if failed else 0


def write_feeds(folder: Path, feeds: Sequence[Feed]) -> None:
    """Write requests to the folder of a model.

    Text is written as fixed-width characters, since pickled objects are not read.
    """
    if not feeds:
        raise ValueError("a case needs at least one request")
    for at, feed in enumerate(feeds):
        flat: dict[str, np.ndarray[Any, Any]] = {}
        for name, value in feed.items():
            if isinstance(value, list):
                flat |= {f"{name}\t{i}\t{len(value)}": _plain(item) for i, item in enumerate(value)}
            else:
                flat[name] = _plain(value)
        with (folder / f"feeds-{at}.npz").open("wb") as file:
            np.savez(file, **flat)


def read_feeds(folder: Path) -> list[dict[str, Any]]:
    """Read the requests in the folder of a model, in order."""
    return [_read_feed(path) for path in sorted(folder.glob("feeds-*.npz"), key=lambda p: int(p.stem.split("-")[1]))]


def read_case(folder: Path) -> Case:
    """Read the description in the folder of a model."""
    return Case(**json.loads((folder / "case.json").read_text()))


def find_cases(folder: Path) -> list[Path]:
    """Return the folders of all cases below a folder, sorted."""
    return sorted(path.parent for path in folder.rglob("case.json"))


def feed_shapes(feed: Feed) -> tuple[Any, ...]:
    """Return the shapes of a request's arrays, and the lengths of its sequences."""
    return tuple(len(value) if isinstance(value, list) else np.shape(value) for value in feed.values())


def _read_feed(path: Path) -> dict[str, Any]:
    feed: dict[str, Any] = {}
    with np.load(path) as content:
        for key in content.files:
            value = content[key]
            value = value.astype(object) if value.dtype.kind == "U" else value
            name, *position = key.split("\t")
            if position:
                feed.setdefault(name, [None] * int(position[1]))[int(position[0])] = value
            else:
                feed[name] = value
    return feed


def _plain(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array = np.asarray(value)
    return array.astype(str) if array.dtype.kind == "O" else array


if __name__ == "__main__":
    sys.exit("this module is not a family; usage: python FAMILY.py FOLDER")
