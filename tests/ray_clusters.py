"""Ray clusters of several nodes on this machine."""

from __future__ import annotations

from typing import Any


def start_cluster(*nodes: dict[str, Any]) -> Any:
    """Start a cluster of nodes with the given arguments; try again if Ray, which waits for 30 s, gives up.

    That happens on a busy machine.
    """
    from ray.cluster_utils import Cluster  # noqa: PLC0415 # an optional dependency

    for last in (False, False, True):
        running = Cluster(initialize_head=False)
        try:
            for node in nodes:
                running.add_node(**node)
        except Exception:
            running.shutdown()
            if last:
                raise
        else:
            return running
    raise AssertionError
