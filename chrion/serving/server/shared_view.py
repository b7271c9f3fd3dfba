"""The views of clusters that the router and the event loop of this process share."""

from __future__ import annotations

import threading

from chrion.serving.manager.cluster_view import ClusterView
from chrion.serving.manager.policy_settings import PolicySpec, route_of

#: Time for which a replica gets no further requests after one was lost, in seconds (a choice, not measured).
SUSPENDED_S = 10.0


class SharedView:
    """A view of the cluster that Serve's thread and the event loop use.

    Args:
        policies: The routing policy.
    """

    def __init__(self, policies: PolicySpec) -> None:
        self._view = ClusterView(route_of(policies))
        self._lock = threading.Lock()

    def __enter__(self) -> ClusterView:
        self._lock.acquire()
        return self._view

    def __exit__(self, *_: object) -> None:
        self._lock.release()


#: The views of this process by the name of the application. Serve makes the routers; they find their view here.
views: dict[str, SharedView] = {}
