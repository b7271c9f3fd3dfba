"""Mechanisms of sessions that a benchmark can switch off, each at the one point where it is consulted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chrion.machine import core_leases
from chrion.machine.core_leases import CoreLease
from chrion.machine.cores import physical_cores
from chrion.runtime.arena_contention import ArenaContention
from chrion.runtime.diversion import Crowding, Diversion
from chrion.runtime.one_thread import OneThreadSession
from chrion.runtime.selection import decision_source, footprint
from chrion.runtime.selection.plain_sessions import PlainSessions


class FirstCores:
    """A registry of leases that gives the same cores to all."""

    def lease(self, count: int, *, further: bool) -> CoreLease:
        """Return the first cores."""
        return CoreLease(self, physical_cores()[:count], further=further)  # type: ignore[arg-type] # in its place

    def release(self, cores: Sequence[int], *, further: bool) -> None:
        """Do nothing."""


def start_no_process(*_: object) -> None:
    """Take the place of the tuning process, so that a session decides in its own."""
    raise OSError("switched off")


#: Owner, name and replacement of what is consulted, by mechanism.
MECHANISMS: Mapping[str, Sequence[tuple[Any, str, object]]] = {
    "diversion": [(Diversion, "divert", lambda *_, **__: (None, None))],
    "crowding": [(Crowding, "engine", lambda *_: None)],
    "one-thread": [(OneThreadSession, "get", lambda _: None)],
    "live-comparison": [(PlainSessions, "compare_live", staticmethod(lambda engine, _: engine))],
    "arena-contention": [(ArenaContention, "sample", lambda _: None)],
    "leases": [(core_leases, "_registry", FirstCores())],
    # Footprints are measured where decisions are made, so that these are made here.
    "footprint": [
        (footprint, "_STATISTICS", Path("/nonexistent")),
        (decision_source, "TuningProcess", start_no_process),
    ],
}
#: Mechanisms that change decisions, so that a session without one needs decisions of its own.
DECIDING = ("footprint",)


def switch_off(mechanism: str) -> None:
    """Switch a mechanism off in this process; do nothing for an empty name."""
    for owner, name, replacement in MECHANISMS.get(mechanism, ()):
        setattr(owner, name, replacement)
