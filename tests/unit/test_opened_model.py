"""A model that is opened again is the one that was opened first, or an error."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest

from chrion import load
from chrion.errors import ModelError
from chrion.graph.opened_model import OpenedModel
from helpers import FLOAT, make_model, node, value


def product(factor: float) -> onnx.ModelProto:
    """Build ``y = x * w`` with 4 kB of weights of one value."""
    infos = [value(name, FLOAT, [1024]) for name in "xy"]
    weights = {"w": np.full(1024, factor, np.float32)}
    return make_model([node("Mul", ["x", "w"], ["y"])], infos[:1], infos[1:], weights)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a model file, whose weights are 1."""
    onnx.save(product(1), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def factor(source: str | bytes) -> float:
    """Return the weight of a model."""
    model = onnx.load_from_string(source) if isinstance(source, bytes) else onnx.load(source)
    return float(onnx.numpy_helper.to_array(model.graph.initializer[0])[0])


def rename_over(path: Path) -> None:
    """Replace a file as deployments do."""
    onnx.save(product(2), path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize("change", [rename_over, Path.unlink])
def test_the_old_content_is_read_after_the_file_is_gone(path: Path, change: object) -> None:
    """A rename over the file and its deletion leave what was opened; the change is noted."""
    opened = OpenedModel(path)
    assert opened.use(lambda source: (source, factor(source))) == (str(path), 1)
    assert not opened.note
    change(path)  # type: ignore[operator]
    assert opened.use(factor) == 1
    assert "changed since the model was opened: the model that was opened is used" in opened.note


def test_a_file_that_is_changed_in_place_is_not_opened_again(path: Path) -> None:
    """Its old content is lost; the error says what to do."""
    opened = OpenedModel(path)
    times = path.stat()
    path.write_bytes(product(2).SerializeToString())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # of the same size, too
    with pytest.raises(ModelError, match=r"changed since .* cannot be opened again \(create the session again\)"):
        opened.use(factor)


def test_a_new_time_of_a_small_file_does_not_matter(path: Path) -> None:
    """Its content is compared, so that it may be written again as it was."""
    opened = OpenedModel(path)
    content = path.read_bytes()
    os.utime(path, ns=(1, 1))
    assert opened.use(factor) == 1
    path.unlink()
    path.write_bytes(content)
    assert opened.use(lambda source: source) == str(path)
    assert not opened.note


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.timeout(30)
def test_a_pipe_is_not_waited_for(path: Path, tmp_path: Path) -> None:
    """Neither one that takes the place of the model nor one that a model names as its weights is opened to look at."""
    opened = OpenedModel(path)
    path.unlink()
    os.mkfifo(path)
    assert opened.use(factor) == 1
    os.mkfifo(tmp_path / "elsewhere")
    (tmp_path / "folder").mkdir()
    hostile = tmp_path / "folder" / "m.onnx"
    onnx.save(product(1), hostile, save_as_external_data=True, location="weights", size_threshold=0)
    for name in (b"weight2", b"../else"):  # of the same length as the name
        (tmp_path / "folder" / "weight2").unlink(missing_ok=True)
        os.mkfifo(tmp_path / "folder" / "weight2")
        hostile.write_bytes(hostile.read_bytes().replace(b"weights", name))
        with pytest.raises(ModelError):
            load(hostile)
        hostile.write_bytes(hostile.read_bytes().replace(name, b"weights"))


def test_a_model_outlives_the_folder_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is resolved once."""
    onnx.save(product(1), tmp_path / "m.onnx")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    opened = OpenedModel("../m.onnx")
    (tmp_path / "work").rmdir()
    assert opened.use(factor) == 1


def test_a_change_of_folder_does_not_matter(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path stays that of the folder in which it was given, although another one has such a file."""
    (tmp_path / "other").mkdir()
    onnx.save(product(2), tmp_path / "other" / "m.onnx")
    monkeypatch.chdir(tmp_path)
    opened = OpenedModel("m.onnx")
    assert opened.use(lambda source: source) == "m.onnx"
    monkeypatch.chdir("other")
    assert opened.use(lambda source: (source, factor(source))) == (str(path), 1)
    assert not opened.note


def test_a_file_that_is_replaced_while_it_is_opened(path: Path) -> None:
    """What was opened meanwhile is not used, and neither is an error of the function that opens it."""
    opened = OpenedModel(path)

    def open_late(source: str | bytes) -> float:
        if isinstance(source, str):
            rename_over(path)
        return factor(source)

    assert opened.use(open_late) == 1
    path.unlink()
    onnx.save(product(1), path)
    opened = OpenedModel(path)

    def fail(source: str | bytes) -> float:
        if isinstance(source, str):
            path.write_bytes(b"half a model")
            path.unlink()
            raise OSError("half a model")
        return factor(source)

    with pytest.raises(ModelError, match="cannot be opened again"):
        opened.use(fail)


def test_weights_in_other_files_are_compared_too(tmp_path: Path) -> None:
    """If one of them is replaced, the model is not opened with the weights of another one."""
    path = tmp_path / "m.onnx"
    onnx.save(product(1), path, save_as_external_data=True, location="weights", size_threshold=0)
    opened = OpenedModel(path)
    assert opened.use(factor) == 1
    assert opened.size == path.stat().st_size + 4096
    (tmp_path / "new").write_bytes(np.full(1024, 2, np.float32).tobytes())
    (tmp_path / "new").replace(tmp_path / "weights")
    with pytest.raises(ModelError, match="cannot be opened again"):
        opened.use(factor)
    with pytest.raises(ModelError, match="cannot be opened again"):
        load(opened)


def test_another_process_opens_only_the_same_file(path: Path) -> None:
    """Identities of the files can be given, as the tuning process receives them."""
    files = OpenedModel(path).files
    assert OpenedModel(path, files).use(factor) == 1
    rename_over(path)
    with pytest.raises(ModelError, match="cannot be opened again"):
        OpenedModel(path, files).use(factor)


def test_files_that_cannot_be_read_are_reported_by_what_opens_them(tmp_path: Path) -> None:
    """There is nothing to compare; models in memory are passed as they are."""
    for missing in (tmp_path / "none.onnx", tmp_path):
        with pytest.raises(OSError, match=r"No such file|Is a directory"):
            OpenedModel(missing).use(lambda source: open(source, "rb"))  # noqa: SIM115, PTH123 - it fails
    assert OpenedModel(b"content").use(lambda source: source) == b"content"
    (tmp_path / "text").write_text("the word location occurs, but this is no model")
    assert OpenedModel(tmp_path / "text").use(lambda source: source) == str(tmp_path / "text")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux does")
def test_an_opened_model_holds_one_file_until_it_is_collected(path: Path) -> None:
    """Sessions that share it hold no more."""

    def count() -> int:
        return sum(link.resolve() == path for link in Path("/proc/self/fd").iterdir())

    opened = OpenedModel(path)
    assert count() == 1
    opened.use(factor)
    assert count() == 1
    del opened
    assert count() == 0
