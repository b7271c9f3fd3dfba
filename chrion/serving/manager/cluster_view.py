"""What a router knows of the replicas of a cluster, and its choice of a replica for each request.

The choice is made by a :data:`chrion.serving.manager.policies.Route`, the function that the simulation routes with, on
the same inputs: the requests that each replica has, and the replicas that have the model's weights or are about to load
them. The replicas report what is in their memory; between two reports the view counts what it has sent itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from chrion.serving.manager.policies import Route


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """The report of a replica. Models are named ``NAME/VERSION``, and ``NAME/`` for the highest version."""

    #: Reports of one replica are numbered; a late one is ignored.
    number: int = -1
    #: Models in memory, or that requests wait for.
    homes: frozenset[str] = frozenset()
    #: Models that do not fit into its memory.
    unfit: frozenset[str] = frozenset()
    #: Free memory for models.
    free_bytes: int = 0
    #: The node that it runs on.
    node: str = ""


@dataclass(slots=True)
class _Replica:
    """A replica as the router sees it."""

    state: ReplicaState = field(default_factory=ReplicaState)
    #: Models of the requests that it has, by the numbers of the requests.
    outstanding: dict[int, str] = field(default_factory=dict)
    #: Time until which it receives no requests, because one failed.
    suspended_until_s: float = 0.0

    @property
    def free_bytes(self) -> float:
        """Free memory for models; a replica that has not reported yet has just started and is empty."""
        return math.inf if self.state.number < 0 else self.state.free_bytes


class ClusterView:
    """The replicas of a cluster; not thread-safe.

    Args:
        route: The routing policy.

    Attributes:
        repeated: Number of requests that were sent again after a replica was lost.
        homes: Replicas with each model, or that will load it, in the order in which they received it.
    """

    def __init__(self, route: Route) -> None:
        self.repeated = 0
        self.homes: dict[str, list[str]] = {}
        self._route = route
        self._replicas: dict[str, _Replica] = {}
        self._replica_of: dict[int, str] = {}

    @property
    def replicas(self) -> list[str]:
        """The replicas that requests are sent to, in ascending order."""
        return sorted(self._replicas)

    def available(self, now_s: float) -> list[str]:
        """Return the replicas that are not suspended, in ascending order; if all are, all of them."""
        return [r for r in self.replicas if self._replicas[r].suspended_until_s <= now_s] or self.replicas

    def outstanding(self, replica: str) -> int:
        """Return the number of requests that a replica has."""
        entry = self._replicas.get(replica)
        return len(entry.outstanding) if entry else 0

    def node(self, replica: str) -> str:
        """Return the node of a replica; empty before its first report."""
        entry = self._replicas.get(replica)
        return entry.state.node if entry else ""

    def set_replicas(self, replicas: Collection[str]) -> None:
        """Note which replicas there are."""
        for gone in self._replicas.keys() - set(replicas):
            self.forget(gone)
        for new in sorted(set(replicas) - self._replicas.keys()):
            self._replicas[new] = _Replica()

    def forget(self, replica: str) -> None:
        """Note that a replica is lost; its requests stay counted as sent until :meth:`end`."""
        self._replicas.pop(replica, None)
        self._keep_homes(replica, frozenset())

    def suspend(self, replica: str, until_s: float) -> None:
        """Send no requests to a replica for some time, if there are others."""
        if replica in self._replicas:
            self._replicas[replica].suspended_until_s = until_s

    def report(self, replica: str, state: ReplicaState) -> None:
        """Note a report of a replica."""
        entry = self._replicas.get(replica)
        if entry is None or state.number <= entry.state.number:
            return
        entry.state = state
        homes = state.homes | set(entry.outstanding.values())
        self._keep_homes(replica, homes)
        for model in sorted(homes):
            self._add_home(model, replica)

    def choose(self, now_s: float, request: int, model: str, replicas: Sequence[str], draw: float) -> str:
        """Choose a replica for a request, and count the request there.

        Args:
            now_s: The time.
            request: Its number; a request that was counted elsewhere before is moved. If that replica has been lost
                since, the request is repeated.
            model: Its model; empty if it needs none.
            replicas: The replicas to choose from, at least one.
            draw: A random number in [0, 1).

        Returns:
            The replica that the policy chooses; the order of replicas is that of their names.
        """
        former = self.end(request)
        self.repeated += bool(former) and self._is_lost(former, now_s)
        entries = {replica: self._replicas.setdefault(replica, _Replica()) for replica in replicas}
        replicas = sorted(r for r in replicas if entries[r].suspended_until_s <= now_s) or sorted(replicas)
        known = [entries[replica] for replica in replicas]
        fitting = [i for i, replica in enumerate(known) if model not in replica.state.unfit] or list(range(len(known)))
        index = {replica: i for i, replica in enumerate(replicas)}
        homes = [index[r] for r in self.homes.get(model, ()) if r in index and index[r] in fitting]
        outstanding = [len(replica.outstanding) for replica in known]
        chosen = replicas[self._route(outstanding, fitting, homes, draw, [replica.free_bytes for replica in known])]
        self._replica_of[request] = chosen
        self._replicas[chosen].outstanding[request] = model
        self._add_home(model, chosen)
        return chosen

    def _is_lost(self, replica: str, now_s: float) -> bool:
        return replica not in self._replicas or self._replicas[replica].suspended_until_s > now_s

    def end(self, request: int) -> str:
        """Note that a request has ended; return its replica, empty if it had none."""
        replica = self._replica_of.pop(request, "")
        if replica in self._replicas:
            self._replicas[replica].outstanding.pop(request, None)
        return replica

    def _add_home(self, model: str, replica: str) -> None:
        if model and replica not in (homes := self.homes.setdefault(model, [])):
            homes.append(replica)

    def _keep_homes(self, replica: str, models: Collection[str]) -> None:
        """Remove a replica from the homes of all models but some.

        Names of models are the clients'. Those without a home are deleted, so that unknown ones do not accumulate.
        """
        for model, homes in [*self.homes.items()]:
            if replica in homes and model not in models:
                homes.remove(replica)
                if not homes:
                    del self.homes[model]
