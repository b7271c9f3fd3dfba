"""Input files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from chrion import load
from chrion.errors import OptionError
from chrion.report.benchmark.feeds import read_feed
from helpers import branches


def test_inputs_are_read_by_name(tmp_path: Path) -> None:
    """Arrays that are not inputs of the model are ignored."""
    graph = load(branches())
    np.savez(tmp_path / "x.npz", x=np.ones((2, 4), np.float32), other=np.zeros(3))
    feed = read_feed(tmp_path / "x.npz", graph)
    assert list(feed) == ["x"]
    np.testing.assert_array_equal(feed["x"], np.ones((2, 4)))


def test_a_missing_input_is_named(tmp_path: Path) -> None:
    """The message also names the arrays that the file holds."""
    np.savez(tmp_path / "y.npz", y=np.ones(3))
    with pytest.raises(OptionError, match=r"y\.npz: no array named 'x', an input of the model; found 'y' \(.*savez"):
        read_feed(tmp_path / "y.npz", load(branches()))


def write_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (write_array, r"expected an .npz file with one array per input, found a single array \(.npy\) \(.*numpy.savez"),
        (lambda path: path.write_text("1, 2, 3"), r"found a file of another kind \(.*numpy.savez"),
        (lambda path: path.write_bytes(b""), r"found a file of another kind \(.*numpy.savez"),
        (lambda path: path.write_bytes(b"PK\3\4 and no more"), r"damaged .npz file"),
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
        (lambda path: None, "cannot be read: No such file or directory"),  # noqa: ARG005 - nothing is written
        (lambda path: np.savez(path, x=np.array([{}], object)), r"cannot be read: .*astype\(str\)"),
        (lambda path: np.savez(path, x=np.ones((2, 4), np.int64)), "x.npz: .*int64"),
    ],
    ids=["array", "text", "empty", "damaged", "folder", "missing", "objects", "type"],
)
def test_other_files_are_refused(tmp_path: Path, write: Callable[[Path], object], message: str) -> None:
    """The message says what was found and how to write an ``.npz`` file."""
    path = tmp_path / "x.npz"
    write(path)
    with pytest.raises(OptionError, match=message) as error:
        read_feed(path, load(branches()))
    assert str(error.value).count(str(path)) == 1
