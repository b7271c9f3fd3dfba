"""Input arrays: read from ``.npz`` files, and run by plain onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException

from chrion.devices.providers import CPU_PROVIDER
from chrion.errors import ModelError, OptionError
from chrion.graph.model import Graph
from chrion.graph.ort_sessions import first_line
from chrion.runtime.requests import check_feed

_HINT = "write one with numpy.savez('inputs.npz', NAME=array)"


def run_plain(
    path: Path, feed: Mapping[str, np.ndarray[Any, Any]], source: str = "synthetic inputs", hint: str = ""
) -> list[Any]:
    """Return the outputs of a plain session on the CPU.

    Args:
        path: The model.
        feed: Arrays by input name.
        source: Where they are from, for the error message.
        hint: What to do if the model does not run on them.

    Raises:
        ModelError: It does not.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(str(path), options, providers=[CPU_PROVIDER])
    try:
        return session.run(None, feed)  # type: ignore[no-any-return]
    except (Fail, InvalidArgument, RuntimeException) as error:
        raise ModelError(f"{path}: does not run on {source}: {first_line(error)}", hint=hint) from error


def read_feed(path: Path, graph: Graph) -> dict[str, np.ndarray[Any, Any]]:
    """Read the inputs of a graph from an ``.npz`` file that holds one array for each.

    Args:
        path: The file. Arrays that are not inputs of the graph are ignored.
        graph: The graph, with known input shapes.

    Returns:
        Arrays by input name, in the graph's order.

    Raises:
        OptionError: The file cannot be read, lacks an input, or holds an array of another type or shape.
    """
    arrays = read_arrays(path)
    missing = [info.name for info in graph.inputs if info.name not in arrays]
    if missing:
        names = ", ".join(map(repr, arrays)) or "no arrays"
        raise OptionError(f"{path}: no array named {missing[0]!r}, an input of the model; found {names}", hint=_HINT)
    feed = {info.name: arrays[info.name] for info in graph.inputs}
    try:
        check_feed(graph.inputs, feed)
    except InvalidArgument as error:
        raise OptionError(f"{path}: {error}") from error
    return feed


def read_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read all arrays of an ``.npz`` file by name.

    Raises:
        OptionError: The file cannot be read, or is of another kind.
    """
    try:
        with path.open("rb") as file:
            other_format = _other_format(file.read(6))
            if not other_format:
                file.seek(0)
                with np.load(file, allow_pickle=False) as arrays:
                    return dict(arrays)
    except OSError as error:
        raise OptionError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        hint = "arrays of Python objects are refused; write texts as array.astype(str)"
        raise OptionError(f"{path}: cannot be read: {error}", hint=hint) from error
    except (EOFError, KeyError, TypeError, BadZipFile) as error:
        raise OptionError(f"{path}: damaged .npz file: {error}", hint=_HINT) from error
    raise OptionError(f"{path}: expected an .npz file with one array per input, found {other_format}", hint=_HINT)


def _other_format(head: bytes) -> str:
    """Describe a file by its first bytes; empty if it may be an ``.npz`` file, which is a ZIP archive."""
    if head.startswith(b"PK"):
        return ""
    return "a single array (.npy)" if head.startswith(b"\x93NUMPY") else "a file of another kind"
