"""Random models with inputs, and the outputs of plain onnxruntime for them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import onnx

from chrion import Graph, load
from helpers import run_plain
from random_operators import random_model


@dataclass(frozen=True)
class RandomCase:
    """A random model, loaded for the shapes of its inputs."""

    model: onnx.ModelProto
    graph: Graph
    feed: dict[str, np.ndarray[Any, Any]]
    #: The outputs of plain onnxruntime.
    expected: list[Any]


def random_case(pick: Random, size: int, *, least_operators: int = 1) -> RandomCase | None:
    """Return a random model of ``size`` steps.

    Returns:
        None if onnxruntime refuses the model, since the generator does not know all its rules, or if the model has
        fewer operators than ``least_operators`` after onnxruntime's optimisation.
    """
    draft = random_model(pick, size)
    model, feed = draft.model(), draft.feed()
    try:
        expected = run_plain(model, feed)
    except Exception:  # noqa: BLE001 - onnxruntime raises exceptions of several types
        return None
    graph = load(model, {name: array.shape for name, array in feed.items()})
    return RandomCase(model, graph, feed, expected) if len(graph.dag) >= least_operators else None
