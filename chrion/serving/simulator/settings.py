"""The sections of a scenario as records, with the range of every value beside its default.

:func:`read_section` reads each of them; it refuses unknown keys, wrong types and values out of range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from chrion.common.suggestions import did_you_mean
from chrion.errors import ScenarioError
from chrion.serving.manager.policies import ADMISSION, EVICTION, LOAD_ORDER, ROUTING, SPILL

Section = TypeVar("Section")

#: Kinds of workload: synthetic ones, and those read from a trace file.
SYNTHETIC = ("uniform", "poisson", "gamma")
TRACES = ("csv", "azure-functions-2019", "azure-llm-2023")
#: Mappings from the functions of a trace to models.
MAPPINGS = ("name", "round-robin", "rank", "hash", "draw")
#: The largest number in a scenario, and the smallest that must be above zero: sums and products stay finite.
LARGEST, SMALLEST = 1e12, 1e-9
_TYPE_NAMES = {"float": "a number", "int": "a whole number", "str": "text", "bool": "true or false"}
_TYPES = {"float": (float, int), "int": (int,), "str": (str,), "bool": (bool,)}


def above_zero(default: float) -> Any:
    """Return a dataclass field for a number above zero."""
    return field(default=default, metadata={"above_zero": True})


def at_least(default: float, low: float = 0, most: float = LARGEST) -> Any:
    """Return a dataclass field for a number from ``low`` to ``most``."""
    return field(default=default, metadata={"at_least": low, "most": most})


def one_of(default: str, names: Sequence[str]) -> Any:
    """Return a dataclass field for one of the given words."""
    return field(default=default, metadata={"one_of": tuple(names)})


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """``[[servers]]``: a group of equal servers."""

    count: int = at_least(1, 1, 10_000)
    gpu_memory_gb: float = at_least(12.0)
    #: GPU memory that is not for models: device contexts, scratch space, fragmentation.
    reserved_gb: float = at_least(0.0)
    #: Requests that the GPU executes at the same time.
    gpu_slots: int = at_least(1)
    cpu_cores: int = at_least(12)
    pcie_gb_per_s: float = above_zero(12.0)
    #: Fixed time of a load, in addition to its bytes over the bandwidth.
    load_fixed_ms: float = at_least(1.0)
    #: Price of one server for an hour, in any currency; only reported.
    cost_per_hour: float = at_least(0.0)
    #: GPUs of a server, each with its own memory and slots; they share the cores, the link and the host memory.
    gpus: int = at_least(1, 1, 64)
    #: Speed of a GPU relative to the one that the times of variants refer to.
    gpu_speed: float = above_zero(1.0)
    #: Memory for the weights of models that are not on a GPU; others are on a disk. 0: it holds all models.
    host_memory_gb: float = at_least(0.0)
    disk_gb_per_s: float = above_zero(2.0)
    #: Fixed time of a load from the disk, in addition to its bytes over the bandwidth.
    disk_fixed_ms: float = at_least(0.0)
    #: Mean time between the end of a repair and the next failure; 0 for no failures.
    mtbf_h: float = at_least(0.0)
    #: Mean time of a repair.
    mttr_s: float = above_zero(600.0)
    #: Parts whose datasheets provide figures of the server that are not given; see :mod:`chrion.hardware`.
    hardware: str = ""
    #: The hardware that the times of variants refer to; if empty, the GPU of the paper.
    times_on: str = ""

    @property
    def budget_bytes(self) -> int:
        """GPU memory that models share."""
        return round((self.gpu_memory_gb - self.reserved_gb) * 1e9)


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


@dataclass(frozen=True, slots=True)
class AutoscalingSpec:
    """``[autoscaling]``: servers are switched on and off with the number of requests."""

    #: Servers that are always on; 0 for no autoscaling: all are on.
    min_servers: int = at_least(0, 0, 10_000)
    #: Requests, waiting or running, for each server that is on.
    target: float = above_zero(2.0)
    #: Time between two decisions.
    period_s: float = at_least(10.0, 0.001)
    #: Time from switching a server on until it receives requests.
    cold_start_s: float = at_least(60.0)
    #: Time for which fewer servers must be enough before one is switched off.
    stop_after_s: float = at_least(300.0)


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """``[workload]``: the requests, their models and their times of arrival."""

    kind: str = one_of("poisson", (*SYNTHETIC, *TRACES))
    #: Requests per second over all models; not for traces.
    rate_per_s: float = above_zero(5.0)
    #: Number of synthetic requests; not for traces.
    requests: int = at_least(20000, 1, 100_000_000)
    #: Standard deviation over mean of the gaps between arrivals, for ``gamma``; above 1 is bursty.
    burst_cv: float = above_zero(4.0)
    #: The model of rank r is requested in proportion to share / r ** zipf_exponent; with 0, to its share.
    zipf_exponent: float = at_least(0.0)
    #: The trace file, relative to the scenario file.
    path: str = ""
    #: Mapping from functions to models; if empty, ``name`` for csv, ``rank`` for azure-functions-2019, and ``draw``
    #: for azure-llm-2023.
    mapping: str = one_of("", ("", *MAPPINGS))
    #: The model of the requests of a CSV trace that name none; if empty, such requests are refused.
    default_model: str = ""
    #: Requests for each request of the trace.
    rate_scale: float = above_zero(1.0)
    #: Seconds for each second of the trace; below 1 the trace is replayed faster.
    time_scale: float = above_zero(1.0)
    #: The part of the trace that is replayed, in seconds of the trace; a length of 0 extends to its end.
    start_s: float = at_least(0.0)
    length_s: float = at_least(0.0)


@dataclass(frozen=True, slots=True)
class SloSpec:
    """``[slo]``: the latency objective."""

    #: The objective of every model; 0 uses ``factor``.
    latency_ms: float = at_least(0.0)
    #: The objective of a model as a multiple of the latency of its variant ``of``.
    factor: float = above_zero(2.0)
    #: The variant whose latency ``factor`` multiplies; if empty, the first pattern.
    of: str = ""
    #: The latency that is compared with the objective: from arrival to end, or from start to end.
    measure: str = one_of("response", ("response", "execution"))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """``[[models]]``: one model, or several equal ones."""

    name: str
    copies: int = at_least(1, 1, 100_000)
    #: Its share of the requests, relative to those of the other models.
    share: float = above_zero(1.0)
    #: Its importance for the cost-aware eviction policy.
    weight: float = above_zero(1.0)
    #: Loaded before the first request on every server, and never evicted.
    pinned: bool = False
    #: Its own objective; 0 uses the scenario's.
    slo_ms: float = at_least(0.0)
    #: Dynamic batching: the most requests of a batch, and the longest time for which a request waits for others.
    max_batch: int = at_least(1, 1, 1024)
    max_delay_ms: float = at_least(0.0)
    #: Its variant in the pattern ``planned``; if empty, the planner chooses one.
    variant: str = ""


#: Sections in which a bare key of ``--set`` is looked up.
SECTIONS: dict[str, type] = {
    "servers": ServerSpec,
    "policies": PolicySpec,
    "workload": WorkloadSpec,
    "slo": SloSpec,
    "autoscaling": AutoscalingSpec,
    "models": ModelSpec,
}


def read_section(kind: type[Section], table: Any, where: str) -> Section:
    """Return the record of a table of a scenario.

    Args:
        kind: The record's class.
        table: The table.
        where: The section's name, for messages.

    Raises:
        ScenarioError: The section is not a table, a key is unknown or missing, or a value has a wrong type or is out of
            range.
    """
    if not isinstance(table, Mapping):
        raise ScenarioError(f"{where}: expected a table, found {table!r}")
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type] # every section is a dataclass
    refuse_unknown(table, known, where)
    if "name" in known and "name" not in table:
        raise ScenarioError(f"{where}: name is missing")
    return kind(**{key: _value(known[key], value, where) for key, value in table.items()})


def refuse_unknown(table: Mapping[str, Any], known: Mapping[str, Any] | Sequence[str], where: str) -> None:
    """Refuse unknown keys; the hint names the closest known key.

    Raises:
        ScenarioError: A key is unknown.
    """
    for key in table:
        if key not in known:
            raise ScenarioError(f"{where}: unknown key {key!r}", hint=did_you_mean(key, known))


def _value(spec: Field[Any], value: Any, where: str) -> Any:
    types = _TYPES[str(spec.type)]
    where = f"{where}.{spec.name} = {value!r}"
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ScenarioError(f"{where}: expected {_TYPE_NAMES[str(spec.type)]}")
    limits = spec.metadata
    if "one_of" in limits and value not in limits["one_of"]:
        names = ", ".join(name for name in limits["one_of"] if name)
        raise ScenarioError(f"{where}: expected one of {names}")
    if isinstance(value, float | int):
        _check_range(value, limits, where)
    return float(value) if spec.type == "float" else value


def _check_range(value: float, limits: Mapping[str, Any], where: str) -> None:
    """Refuse a number out of its range; NaN is out of every range."""
    most = limits.get("most", LARGEST)
    if not abs(value) <= most:
        raise ScenarioError(f"{where}: expected a number of at most {most:g}")
    if "above_zero" in limits and value < SMALLEST:
        raise ScenarioError(f"{where}: expected a number above 0, at least {SMALLEST:g}")
    if "at_least" in limits and value < limits["at_least"]:
        raise ScenarioError(f"{where}: expected a number of at least {limits['at_least']:g}")
