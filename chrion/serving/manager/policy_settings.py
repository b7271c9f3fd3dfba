"""``[policies]`` of a scenario, which a server can be started with, too."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from chrion.serving.manager.policies import (
    ADMISSION,
    EVICTION,
    LOAD_ORDER,
    ROUTING,
    SPILL,
    Route,
    route_resident_first,
)
from chrion.serving.toml_sections import at_least, one_of


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """``[policies]``: names of :mod:`chrion.serving.manager.policies`."""

    eviction: str = one_of("lru", tuple(EVICTION))
    routing: str = one_of("resident-first", tuple(ROUTING))
    #: ``resident-first``: a server with the weights is preferred while it has fewer than this many requests more than
    #: the least loaded server.
    spill: int = at_least(SPILL, 1)
    load_order: str = one_of("fifo", tuple(LOAD_ORDER))
    admission: str = one_of("none", tuple(ADMISSION))
    #: Time after which an idle model leaves the memory; 0 if only others displace it.
    keep_alive_s: float = at_least(0.0)


def route_of(policies: PolicySpec) -> Route:
    """Return the routing function of a scenario's policies."""
    if policies.routing == "resident-first" and policies.spill != SPILL:
        return partial(route_resident_first, spill=policies.spill)
    return ROUTING[policies.routing]
