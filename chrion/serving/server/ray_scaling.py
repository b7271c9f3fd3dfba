"""The number of replicas on a Ray cluster that follows the number of its nodes or GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray


def one_per_node(_: Any) -> tuple[int, dict[str, Any]]:
    """Return the number of nodes that have a CPU for a replica; Serve's controller asks for it."""
    return max(1, count_places(ray.nodes(), gpus=False)), {}


def one_per_gpu(_: Any) -> tuple[int, dict[str, Any]]:
    """Return the number of GPUs of the cluster; Serve's controller asks for it."""
    return max(1, count_places(ray.nodes(), gpus=True)), {}


def count_places(nodes: Sequence[dict[str, Any]], *, gpus: bool) -> int:
    """Return how many replicas a cluster has room for: one for each GPU, or for each node with a CPU.

    Args:
        nodes: As ``ray.nodes()`` returns them.
        gpus: Whether replicas use GPUs.
    """
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    if gpus:
        return sum(int(own.get("GPU", 0)) for own in resources)
    return sum(own.get("CPU", 0) >= 1 for own in resources)
