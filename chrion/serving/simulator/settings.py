"""The sections of a scenario as records, which :func:`chrion.serving.toml_sections.read_section` reads."""

from __future__ import annotations

from dataclasses import dataclass

from chrion.serving.manager.policy_settings import PolicySpec
from chrion.serving.toml_sections import above_zero, at_least, one_of

#: Kinds of workload: synthetic ones, and those read from a trace file.
SYNTHETIC = ("uniform", "poisson", "gamma")
TRACES = ("csv", "azure-functions-2019", "azure-llm-2023")
#: Mappings from the functions of a trace to models.
MAPPINGS = ("name", "round-robin", "rank", "hash", "draw")


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
