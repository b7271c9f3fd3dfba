"""The nine real architectures in the onnx package, with small weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from onnx.backend.test.data import __path__ as data_path

from chrion import Graph

#: Files of the models by name.
LIGHT_MODELS = {path.stem: str(path) for path in sorted((Path(next(iter(data_path))) / "light").glob("*.onnx"))}


def random_feed(graph: Graph) -> dict[str, np.ndarray[Any, Any]]:
    """Return random values of all inputs."""
    pick = np.random.default_rng(0)
    return {i.name: pick.random([d for d in i.shape or () if isinstance(d, int)], np.float32) for i in graph.inputs}
