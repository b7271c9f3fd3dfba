"""Tests of texts without the folders of the machine."""

from __future__ import annotations

from pathlib import Path

from chrion.serving.server.failures import without_folders


def test_existing_folders_are_removed(tmp_path: Path) -> None:
    """Paths lose their folders, with spaces or in quotes, whether the file exists or not."""
    folder = tmp_path / "all models" / "m" / "1"
    folder.mkdir(parents=True)
    for text, expected in (
        (f"Load model from {folder}/model.onnx failed: bad", "Load model from model.onnx failed: bad"),
        (f"[Errno 2] No such file: '{folder}/w.bin'", "[Errno 2] No such file: 'w.bin'"),
        (f"({folder}/a, {tmp_path}/b): {folder}", "(a, b): 1"),
        (f"{folder}/{'n' * 5000}", "n" * 5000),
        (f"{folder}/a\0b", "a\0b"),
    ):
        assert without_folders(text) == expected


def test_other_slashes_stay(tmp_path: Path) -> None:
    """Names of nodes, relative paths, addresses and quotients have slashes, too."""
    for text in ("node '/model/layers.0/MatMul'", f"http://a{tmp_path}", f"..{tmp_path}", "1/2", "/", "", "a / b"):
        assert without_folders(text) == text
