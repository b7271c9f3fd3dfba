"""The state of a server, as the router of a cluster needs it."""

from __future__ import annotations

from chrion.serving.manager.cluster_view import ReplicaState
from chrion.serving.manager.residency import Place
from chrion.serving.server.core import ServingCore

#: Age from which the state is read again although no model was loaded or unloaded, in ms (a choice, not measured):
#: reading takes longer the more models there are.
_AGE_MS = 5.0


class StateReports:
    """The numbered reports of a replica, which are made again if they are old.

    Making one takes longer the more models there are. The first one after a load or an unload is new in any case,
    as the router sends the next model to the replica with the most free memory.

    Args:
        core: The replica's core.
        node: The node that it runs on.
    """

    def __init__(self, core: ServingCore, node: str) -> None:
        self._core = core
        self._state = ReplicaState(node=node)
        self._read_ms = 0.0
        self._changes = -1

    def latest(self, now: float) -> ReplicaState:
        """Return the report for a time in ms, as the core measures it."""
        if now >= self._read_ms + _AGE_MS or self._core.memory_changes != self._changes:
            self._read_ms, self._changes = now, self._core.memory_changes
            self._state = self._read()
        return self._state

    def _read(self) -> ReplicaState:
        manager = self._core.manager
        homes, unfit = set(), set()
        highest: dict[str, int] = {}
        for (name, version), served in self._core.models.items():
            highest[name] = max(highest.get(name, 0), int(version))
            if manager.place(served.number) is not Place.ABSENT or served.number in manager.cold:
                homes.add(f"{name}/{version}")
            elif not manager.fits(served.number):
                unfit.add(f"{name}/{version}")
        for models in (homes, unfit):
            models |= {f"{name}/" for name, version in highest.items() if f"{name}/{version}" in models}
        return ReplicaState(
            self._state.number + 1,
            frozenset(homes),
            frozenset(unfit),
            manager.free[manager.primary],
            self._state.node,
        )
