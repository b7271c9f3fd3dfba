"""Files that belong to a model: its configuration and its tokenizer."""

from __future__ import annotations

from pathlib import Path

#: The name of a folder that has models only; the other files are in the one above it.
_MODELS = "onnx"


def find_beside(model: Path, name: str) -> Path | None:
    """Return a file that belongs to a model, or None if there is none.

    Args:
        model: The file of the model.
        name: The name of the file.
    """
    return next((path for folder in model_folders(model) if (path := folder / name).is_file()), None)


def model_folders(model: Path) -> list[Path]:
    """Return the folders that may have files that belong to a model, in the order in which they are searched.

    The first one is the folder of the model. If that is named ``onnx``, as in the repositories of transformers.js, the
    folder above is the next one. If the model is a link, those of the file that it leads to follow.

    Args:
        model: The file of the model, or a link to it.
    """
    folders = []
    for file in (model, model.resolve()):
        folders += [file.parent, *([file.parent.parent] if file.parent.name == _MODELS else [])]
    return folders
