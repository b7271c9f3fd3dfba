"""The sections of a scenario as records, which :func:`chrion.common.records.read_record` reads."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from chrion.common.records import Count, NonNegative, Positive, Record
from chrion.errors import ScenarioError
from chrion.serving.manager.policy_settings import DEFAULT_POLICIES, PolicySpec
from chrion.serving.manager.records import MAX_DELAY_MS, MAX_QUEUE
from chrion.serving.manager.scaling import AutoscalingSpec
from chrion.serving.simulator.requests import MAX_CLASSES, Floats

#: Kinds of workload that need no trace file.
SYNTHETIC = ("uniform", "poisson", "gamma")
#: Maximum models of a scenario (a choice, not measured).
MAX_MODELS = 100_000


class ServerSpec(Record, frozen=True):
    """``[[servers]]``: a group of equal servers."""

    count: Annotated[int, Meta(ge=1, le=10_000)] = 1
    gpu_memory_gb: NonNegative = 12.0
    #: GPU memory that is not for models: device contexts, scratch space, fragmentation.
    reserved_gb: NonNegative = 0.0
    #: Requests that the GPU executes at the same time.
    gpu_slots: Count = 1
    cpu_cores: Count = 12
    pcie_gb_per_s: Positive = 12.0
    #: Fixed time of a load, in addition to its bytes over the bandwidth.
    load_fixed_ms: NonNegative = 1.0
    #: Price of one server for an hour, in any currency; only reported.
    cost_per_hour: NonNegative = 0.0
    #: GPUs of a server, each with its own memory and slots; they share the cores, the link and the host memory.
    gpus: Annotated[int, Meta(ge=1, le=64)] = 1
    #: Speed of a GPU relative to the one that the times of variants refer to.
    gpu_speed: Positive = 1.0
    #: Memory for the weights of models that are not on a GPU; others are on a disk. 0: it holds all models.
    host_memory_gb: NonNegative = 0.0
    #: Also the most that the server reads from a network store.
    disk_gb_per_s: Positive = 2.0
    #: Fixed time of a load from the disk, in addition to its bytes over the bandwidth.
    disk_fixed_ms: NonNegative = 0.0
    #: Mean time between the end of a repair and the next failure; 0 for no failures.
    mtbf_h: NonNegative = 0.0
    #: Mean time of a repair.
    mttr_s: Positive = 600.0
    #: Parts whose datasheets provide figures of the server that are not given; see :mod:`chrion.hardware`.
    hardware: str = ""
    #: The hardware that the times of variants refer to; if empty, the GPU of the paper.
    times_on: str = ""

    @property
    def budget_bytes(self) -> int:
        """GPU memory that models share."""
        return round((self.gpu_memory_gb - self.reserved_gb) * 1e9)


class StoreSpec(Record, frozen=True):
    """``[store]``: a network store of weights that all servers share, in the place of their disks."""

    gb_per_s: Positive


class DomainSpec(Record, frozen=True):
    """``[[domains]]``: servers that fail together, such as those of a rack or a zone."""

    #: Servers of a domain, which follow each other in the scenario; the last domain may have fewer.
    size: Annotated[int, Meta(ge=1, le=1_000_000)]
    #: Mean time between the end of a repair and the next failure.
    mtbf_h: Positive
    mttr_s: Positive = 600.0


class ArrivalsSpec(Record, frozen=True):
    """Keys of times of arrival, in the sections ``[workload]`` and, of a decoder, ``[requests]``."""

    #: The rate over time relative to ``rate_per_s``, as times in s and factors; not for traces.
    curve: tuple[tuple[NonNegative, NonNegative], ...] = ()
    #: Standard deviation over mean of the gaps between arrivals, for ``gamma``; above 1 is bursty.
    burst_cv: Positive = 4.0
    #: The trace file, relative to the scenario file.
    path: str = ""
    #: Requests for each request of the trace.
    rate_scale: Positive = 1.0
    #: Seconds for each second of the trace; below 1 the trace is replayed faster.
    time_scale: Positive = 1.0
    #: The part of the trace that is replayed, in seconds of the trace; a length of 0 extends to its end.
    start_s: NonNegative = 0.0
    length_s: NonNegative = 0.0

    def part(self, times_s: Floats, section: str) -> npt.NDArray[np.bool_]:
        """Return which times of a trace are in the part that is replayed. Shapes: [n].

        Raises:
            ScenarioError: None is.
        """
        end = self.start_s + self.length_s if self.length_s else np.inf
        part = (times_s >= self.start_s) & (times_s < end)
        if not part.any():
            until = f"to {end:g} s" if self.length_s else "to its end"
            raise ScenarioError(f"{section}: the trace has no requests from {self.start_s:g} s {until}")
        return part


class WorkloadSpec(ArrivalsSpec, frozen=True):
    """``[workload]``: the requests, their models and their times of arrival."""

    kind: Literal["uniform", "poisson", "gamma", "csv", "azure-functions-2019", "azure-llm-2023"] = "poisson"
    #: Requests per second over all models; not for traces.
    rate_per_s: Positive = 5.0
    #: Number of synthetic requests; not for traces.
    requests: Annotated[int, Meta(ge=1, le=10_000_000_000)] = 20000
    #: The model of rank r is requested in proportion to share / r ** zipf_exponent; with 0, to its share.
    zipf_exponent: NonNegative = 0.0
    #: Files with the execution times and the memory of the functions of an azure-functions-2019 trace.
    durations_path: str = ""
    memory_path: str = ""
    #: Mapping from the functions of a trace to models; if empty, ``name`` for csv, ``rank`` for azure-functions-2019,
    #: and ``draw`` for azure-llm-2023.
    mapping: Literal["", "name", "round-robin", "rank", "hash", "draw"] = ""
    #: The model of the requests of a CSV trace that name none; if empty, such requests are refused.
    default_model: str = ""


class ClassSpec(Record, frozen=True):
    """``[[classes]]``: a class of requests, of all models alike."""

    name: str
    #: Its share of the requests, relative to those of the other classes.
    share: Positive = 1.0
    #: The objective of its requests; 0 uses their models'.
    slo_ms: NonNegative = 0.0
    #: Requests of a higher priority start first.
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] = 0


class SloSpec(Record, frozen=True):
    """``[slo]``: the latency objective."""

    #: The objective of every model; 0 uses ``factor``.
    latency_ms: NonNegative = 0.0
    #: The objective of a model as a multiple of the latency of its variant ``of``.
    factor: Positive = 2.0
    #: The variant whose latency ``factor`` multiplies; if empty, the first pattern.
    of: str = ""
    #: The latency that is compared with the objective: from arrival to end, or from start to end.
    measure: Literal["response", "execution"] = "response"


class ModelSpec(Record, frozen=True):
    """``[[models]]``: one model, or several equal ones."""

    name: str
    copies: Annotated[int, Meta(ge=1, le=100_000)] = 1
    #: Its share of the requests, relative to those of the other models.
    share: Positive = 1.0
    #: Its importance for the cost-aware eviction policy.
    weight: Positive = 1.0
    #: Loaded before the first request on every server, and never evicted.
    pinned: bool = False
    #: Its own objective; 0 uses the scenario's.
    slo_ms: NonNegative = 0.0
    #: Dynamic batching: the maximum requests of a batch, and the longest time for which a request waits for others.
    max_batch: Annotated[int, Meta(ge=1, le=1024)] = 1
    max_delay_ms: NonNegative = MAX_DELAY_MS
    #: Requests that may wait on a GPU at the same time; more are dropped.
    max_queue: Annotated[int, Meta(ge=1, le=1_000_000)] = MAX_QUEUE
    #: Its variant in the pattern ``planned``; if empty, the planner chooses one.
    variant: str = ""


class ScenarioFile(Record, frozen=True):
    """The top level of a scenario, whose keys ``catalogue`` and ``use`` have been replaced by models."""

    name: str = ""
    description: str = ""
    seed: Annotated[int, Meta(ge=0)] = 0
    preload: bool = False
    patterns: tuple[str, ...] | None = None
    shrink: tuple[str, ...] = ()
    total_models: Annotated[int, Meta(ge=0, le=MAX_MODELS)] = 0
    servers: Annotated[tuple[ServerSpec, ...], Meta(min_length=1)] = (ServerSpec(),)
    policies: PolicySpec = DEFAULT_POLICIES
    workload: WorkloadSpec = WorkloadSpec()
    classes: Annotated[tuple[ClassSpec, ...], Meta(max_length=MAX_CLASSES)] = ()
    slo: SloSpec = SloSpec()
    autoscaling: AutoscalingSpec | None = None
    domains: tuple[DomainSpec, ...] = ()
    store: StoreSpec | None = None
    models: tuple[dict[str, Any], ...] = ()
    variants: dict[str, dict[str, Any]] = {}  # noqa: RUF012 - each record gets its own


#: Sections in which a bare key of ``--set`` is looked up.
SECTIONS: dict[str, type[Record]] = {
    "servers": ServerSpec,
    "policies": PolicySpec,
    "workload": WorkloadSpec,
    "slo": SloSpec,
    "autoscaling": AutoscalingSpec,
    "models": ModelSpec,
    "classes": ClassSpec,
    "domains": DomainSpec,
    "store": StoreSpec,
}
