"""Files that belong to a model: its configuration and its tokenizer."""

from __future__ import annotations

from pathlib import Path

#: The name of a folder that has models only; the other files are in the one above it.
_MODELS = "onnx"


def find_beside(model: Path, name: str) -> Path | None:
    """Return a file that belongs to a model, or None if there is none.

    It is in the folder of the model. If that is named ``onnx``, as in the repositories of transformers.js, it may be in
    the folder above.

    Args:
        model: The file of the model.
        name: The name of the file.
    """
    folders = [model.parent, *([model.parent.parent] if model.parent.name == _MODELS else [])]
    return next((path for folder in folders if (path := folder / name).is_file()), None)
