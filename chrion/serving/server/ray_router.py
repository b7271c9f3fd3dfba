"""The routing of requests to replicas of Ray Serve.

Ray Serve makes a router in the process that sends requests, and asks it for a replica for each request. This one asks a
:class:`chrion.serving.manager.cluster_view.ClusterView`, whose policy is the simulation's. Serve copies this module by
value: what the process shares is in :mod:`chrion.serving.server.shared_view`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import RequestRouter

from chrion.serving.manager.cluster_view import ReplicaState
from chrion.serving.manager.policy_settings import PolicySpec
from chrion.serving.server import shared_view
from chrion.serving.server.ray_replica import Call


class ModelRouter(RequestRouter):  # type: ignore[misc]
    """Ray Serve's router for :class:`chrion.serving.server.ray_replica.ModelReplica`."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Take the view of this process; without one, the process makes no requests."""
        self._view = shared_view.views.setdefault(kwargs["application"], shared_view.SharedView(PolicySpec()))

    def update_replicas(self, replicas: Sequence[Any]) -> None:
        """Note which replicas there are, and their reports."""
        super().update_replicas(replicas)
        with self._view as view:
            view.set_replicas([replica.replica_id.unique_id for replica in replicas])
            for replica in replicas:
                state = replica.routing_stats.get("state")
                if isinstance(state, ReplicaState):
                    view.report(replica.replica_id.unique_id, state)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Suspend a replica whose process has ended; Serve's controller lists it until it has noticed, too.

        Serve itself sends requests to another replica if theirs ends before it has accepted them.
        """
        super().on_replica_actor_died(replica_id)
        with self._view as view:
            view.suspend(replica_id.unique_id, time.monotonic() + shared_view.SUSPENDED_S)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return the replica for a request, or nothing if it is not there any more."""
        call: Call = pending_request.args[0]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if call.replica:
            return [[by_name[call.replica]]] if call.replica in by_name else []
        names = sorted(by_name.keys() - call.tried) or sorted(by_name)
        if not names:
            return []
        with self._view as view:
            chosen = view.choose(time.monotonic(), call.number, call.model, names, random.random())  # noqa: S311
        return [[by_name[chosen]]]
