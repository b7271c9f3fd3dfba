"""The state of a server, as the router of a cluster needs it."""

from __future__ import annotations

from chrion.manager.cluster_view import ReplicaState
from chrion.manager.residency import Place
from chrion.server.core import ServingCore


def read_state(core: ServingCore, now: float, number: int, node: str) -> ReplicaState:
    """Return the report of a replica.

    Args:
        core: The replica's core.
        now: The time in ms, as the core measures it.
        number: The number of the report.
        node: The node that it runs on.
    """
    memory = core.manager.memory
    homes, unfit = set(), set()
    highest: dict[str, int] = {}
    for (name, version), served in core.models.items():
        highest[name] = max(highest.get(name, 0), int(version))
        if memory.entries[served.number].place is not Place.ABSENT or served.number in memory.cold:
            homes.add(f"{name}/{version}")
        elif not memory.fits(served.number):
            unfit.add(f"{name}/{version}")
    for found in (homes, unfit):
        found |= {f"{name}/" for name, version in highest.items() if f"{name}/{version}" in found}
    expected = {key: memory.load_ms(entry, entry.variant) for key, entry in memory.entries.items()}
    wait = max(0.0, memory.loading_until_ms - now) if memory.loading is not None else 0.0
    wait += sum(expected[key] for key in memory.cold)
    mean = sum(expected.values()) / len(expected) if expected else 0.0
    return ReplicaState(number, frozenset(homes), frozenset(unfit), wait, mean, memory.free[memory.primary], node)
