"""The sections of a scenario as records, with the range of every value beside its default.

:func:`read_section` is the one reader of them all: it refuses unknown keys, wrong types and values out of range, and
says where.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from chrion.errors import ScenarioError
from chrion.simulator.policies import ADMISSION, EVICTION, LOAD_ORDER, ROUTING

Section = TypeVar("Section")

#: Kinds of workload: made up, and read from a trace file.
SYNTHETIC = ("uniform", "poisson", "gamma")
TRACES = ("csv", "azure-functions-2019", "azure-llm-2023")
#: How the functions of a trace become models.
MAPPINGS = ("name", "round-robin", "rank", "hash", "draw")
#: No number of a scenario is greater, and none that must be above zero is less: sums and products stay finite.
LARGEST, SMALLEST = 1e12, 1e-9
_TYPES = {"float": (float, int), "int": (int,), "str": (str,), "bool": (bool,)}


def above_zero(default: float) -> Any:
    """A number above zero."""
    return field(default=default, metadata={"above_zero": True})


def at_least(default: float, low: float = 0, most: float = LARGEST) -> Any:
    """A number from ``low`` to ``most``."""
    return field(default=default, metadata={"at_least": low, "most": most})


def one_of(default: str, names: Sequence[str]) -> Any:
    """One of some words."""
    return field(default=default, metadata={"one_of": tuple(names)})


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """``[[servers]]``: a group of equal servers."""

    count: int = at_least(1, 1, 10_000)
    gpu_memory_gb: float = at_least(12.0)
    #: GPU memory that no model can have: device contexts, scratch space, fragmentation.
    reserved_gb: float = at_least(0.0)
    #: Requests that the GPU executes at once.
    gpu_slots: int = at_least(1)
    cpu_cores: int = at_least(12)
    pcie_gb_per_s: float = above_zero(12.0)
    #: What a load costs apart from its bytes.
    load_fixed_ms: float = at_least(1.0)

    @property
    def budget_bytes(self) -> int:
        """GPU memory that models share."""
        return round((self.gpu_memory_gb - self.reserved_gb) * 1e9)


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """``[policies]``: names of :mod:`chrion.simulator.policies`."""

    eviction: str = one_of("lru", tuple(EVICTION))
    routing: str = one_of("resident-first", tuple(ROUTING))
    load_order: str = one_of("fifo", tuple(LOAD_ORDER))
    admission: str = one_of("none", tuple(ADMISSION))


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """``[workload]``: who asks for what, and when."""

    kind: str = one_of("poisson", (*SYNTHETIC, *TRACES))
    #: Requests a second, all models together; not for traces.
    rate_per_s: float = above_zero(5.0)
    #: How many requests are made up; not for traces.
    requests: int = at_least(20000, 1)
    #: Standard deviation over mean of the gaps between arrivals, for ``gamma``; above 1 is bursty.
    burst_cv: float = above_zero(4.0)
    #: Model of rank r is asked for in proportion to share / r ** zipf_exponent; 0 leaves the shares alone.
    zipf_exponent: float = at_least(0.0)
    #: The trace file, relative to the scenario file.
    path: str = ""
    #: How functions become models; empty takes ``name`` for csv, ``rank`` for functions, ``draw`` for requests without.
    mapping: str = one_of("", ("", *MAPPINGS))
    #: Requests for one request of the trace.
    rate_scale: float = above_zero(1.0)
    #: Seconds for one second of the trace; below 1 the trace runs faster.
    time_scale: float = above_zero(1.0)
    #: The part of the trace that is replayed, in its own seconds; a length of 0 goes to its end.
    start_s: float = at_least(0.0)
    length_s: float = at_least(0.0)


@dataclass(frozen=True, slots=True)
class SloSpec:
    """``[slo]``: how long a request may take."""

    #: One objective for every model; 0 takes ``factor``.
    latency_ms: float = at_least(0.0)
    #: Objective of a model: this many times the latency of its variant ``of``.
    factor: float = above_zero(2.0)
    #: Empty takes the first pattern.
    of: str = ""
    #: What must not exceed it: the time since arrival, or the execution alone.
    measure: str = one_of("response", ("response", "execution"))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """``[[models]]``: one model, or several alike."""

    name: str
    copies: int = at_least(1, 1, 100_000)
    #: Its part of the requests, against the other models' shares.
    share: float = above_zero(1.0)
    #: How much the cost-aware eviction values it.
    weight: float = above_zero(1.0)
    #: Loaded before the first request on every server, and never evicted.
    pinned: bool = False
    #: Its own objective; 0 takes the scenario's.
    slo_ms: float = at_least(0.0)


#: Sections in which a bare key of ``--set`` is looked up.
SECTIONS: dict[str, type] = {
    "servers": ServerSpec,
    "policies": PolicySpec,
    "workload": WorkloadSpec,
    "slo": SloSpec,
    "models": ModelSpec,
}


def read_section(kind: type[Section], table: Any, where: str) -> Section:
    """Make a record from a table of a scenario.

    Args:
        kind: The record's class.
        table: What stands in the scenario.
        where: The section's name, for messages.

    Raises:
        ScenarioError: It is not a table, or a key is unknown or missing, or a value of a wrong type or out of range.
    """
    if not isinstance(table, Mapping):
        raise ScenarioError(f"{where}: expected a table, found {table!r}")
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type] # every section is a dataclass
    refuse_unknown(table, known, where)
    if "name" in known and "name" not in table:
        raise ScenarioError(f"{where}: name is missing")
    return kind(**{key: _value(known[key], value, where) for key, value in table.items()})


def refuse_unknown(table: Mapping[str, Any], known: Mapping[str, Any] | Sequence[str], where: str) -> None:
    """Refuse a key that is not known, and guess what was meant.

    Raises:
        ScenarioError: There is one.
    """
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, list(known), 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
            raise ScenarioError(f"{where}: no key {key!r}", hint=hint)


def _value(spec: Field[Any], value: Any, where: str) -> Any:
    types = _TYPES[str(spec.type)]
    what = f"{where}.{spec.name} = {value!r}"
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ScenarioError(f"{what}: expected a value of type {spec.type}")
    limits = spec.metadata
    if "one_of" in limits and value not in limits["one_of"]:
        names = ", ".join(name for name in limits["one_of"] if name)
        raise ScenarioError(f"{what}: not one of {names}")
    if isinstance(value, float | int):
        _check_range(value, limits, what)
    return float(value) if spec.type == "float" else value


def _check_range(value: float, limits: Mapping[str, Any], what: str) -> None:
    """Refuse a number out of its range; NaN is out of every one."""
    most = limits.get("most", LARGEST)
    if not abs(value) <= most:
        raise ScenarioError(f"{what}: not a number up to {most:g}")
    if "above_zero" in limits and value < SMALLEST:
        raise ScenarioError(f"{what}: not above 0, {SMALLEST:g} at least")
    if "at_least" in limits and value < limits["at_least"]:
        raise ScenarioError(f"{what}: not at or above {limits['at_least']:g}")
