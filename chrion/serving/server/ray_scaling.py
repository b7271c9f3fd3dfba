"""The number of replicas on a Ray cluster, which follows the number of its nodes or GPUs, or that of requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from chrion.serving.manager.scaling import Autoscaler, AutoscalingSpec


class ByLoad:
    """The number of replicas that the simulation's rule wants; Serve's controller asks for it many times a second.

    Args:
        maximum: Maximum replicas.
        clock: Returns the time in seconds.
        rules: Keys of the rule.
    """

    def __init__(self, maximum: int, clock: Callable[[], float] = time.monotonic, **rules: Any) -> None:
        self._clock = clock
        self._autoscaler = Autoscaler(AutoscalingSpec(**rules), maximum, clock() * 1000)
        self._due_s = clock() + self._autoscaler.spec.period_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number at a decision, and between two decisions what was decided."""
        now_s, number = self._clock(), context.target_num_replicas
        if now_s >= self._due_s:
            self._due_s = now_s + self._autoscaler.spec.period_s
            number = self._autoscaler.decide(now_s * 1000, context.total_num_requests, number)
        return number, {}


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
