"""Variants of a model: the GPU memory, the GPU time and the CPU time of a way to serve it.

A variant corresponds to a column of the paper's Table 6: the whole model on the GPU, or one of Chrion's hybrid plans.
Its figures come from a table of a scenario, or from a plan file that ``chrion partition`` wrote.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from chrion.common.records import LARGEST, NonNegative, Positive, Record
from chrion.errors import PlanError


class VariantTable(Record, frozen=True):
    """``[models.variants.NAME]``: figures of a variant, or the plan file that provides them."""

    memory_mb: NonNegative | None = None
    latency_ms: Positive | None = None
    #: By default the latency if the variant has GPU memory.
    gpu_busy_ms: NonNegative | None = None
    #: The sum over the cores.
    cpu_busy_ms: NonNegative | None = None
    cores: Annotated[int, Meta(ge=0, le=10_000)] | None = None
    #: By default the memory.
    load_mb: NonNegative | None = None
    #: The distribution of the factor, of mean 1, that multiplies the latency of a request.
    distribution: Literal["constant", "lognormal", "exponential"] = "lognormal"
    jitter_cv: NonNegative = 0.0
    batch_cost: NonNegative = 1.0
    #: A file that ``chrion partition -o`` wrote.
    plan: str = ""
    #: The part of the plan file that is served: the plan, or the whole model on the accelerator.
    part: Literal["plan", "accelerator_only"] | None = None
    #: The figure that counts as memory: all tensors summed (Equation 4), or what one request in flight holds.
    memory: Literal["summed", "resident"] | None = None


#: Keys of a variant's table whose values a plan file provides, and keys that require a plan file.
MEASURED_KEYS = ("memory_mb", "latency_ms", "gpu_busy_ms", "cpu_busy_ms", "cores")
PLAN_KEYS = ("part", "memory")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to serve a model.

    A request takes one GPU slot and ``len(core_busy_ms)`` cores when it starts, releases the slot after
    ``gpu_busy_ms`` and each core after its own busy time, and ends after ``latency_ms``. A random factor for each
    request multiplies all of these times.
    """

    name: str
    #: GPU memory of the resident model; zero for a variant without GPU memory.
    memory_mb: float
    #: Mean time from the start to the end of a request; the weights are in memory.
    latency_ms: float
    #: Time for which a request keeps its GPU slot; zero for no slot.
    gpu_busy_ms: float
    #: Time for which a request keeps each of its CPU cores, longest first; empty for no cores.
    core_busy_ms: tuple[float, ...] = ()
    #: Data that a load transfers over PCIe.
    load_mb: float = 0.0
    #: As in :class:`VariantTable`.
    distribution: str = "lognormal"
    #: Standard deviation over mean; the exponential distribution has 1 and ignores this value.
    jitter_cv: float = 0.0
    #: Latency of each further request of a batch over the latency of the first; 1 if batches save nothing.
    batch_cost: float = 1.0

    def __post_init__(self) -> None:
        _check(self)

    @property
    def memory_bytes(self) -> int:
        """GPU memory in whole bytes, so that sums are exact."""
        return round(self.memory_mb * 1e6)

    @property
    def cores(self) -> int:
        """Number of CPU cores of a request."""
        return len(self.core_busy_ms)

    def load_ms(self, bandwidth_gb_per_s: float, fixed_ms: float) -> float:
        """Return the time of a load: a fixed cost plus bytes over bandwidth."""
        return fixed_ms + self.load_mb / bandwidth_gb_per_s


def from_table(name: str, table: VariantTable) -> Variant:
    """Return the variant of a scenario's table with figures.

    Raises:
        ValueError: A figure is missing, or figures contradict each other.
    """
    memory_mb, latency_ms, cpu_busy_ms = table.memory_mb, table.latency_ms, table.cpu_busy_ms or 0.0
    if memory_mb is None or latency_ms is None:
        raise ValueError(f"variant {name}: {'memory_mb' if memory_mb is None else 'latency_ms'} is missing")
    cores = (1 if cpu_busy_ms else 0) if table.cores is None else table.cores
    if bool(cpu_busy_ms) != (cores > 0):
        expected = "1 or more" if cpu_busy_ms else "0 without cpu_busy_ms"
        raise ValueError(f"variant {name}: cores: expected {expected}, found {cores}")
    gpu_busy_ms = table.gpu_busy_ms
    if gpu_busy_ms is None:
        gpu_busy_ms = latency_ms if memory_mb else 0.0
    return _make_variant(name, table, memory_mb, latency_ms, gpu_busy_ms, (cpu_busy_ms / max(cores, 1),) * cores)


def from_plan(name: str, path: Path, table: VariantTable) -> Variant:
    """Return the variant of a plan file, with its predicted latency and memory and the busy time of each lane.

    Args:
        name: The variant's name.
        path: A file that ``chrion partition -o`` wrote.
        table: What is not in a plan.

    Raises:
        PlanError: The file cannot be read, is damaged, or lacks the figures of that part.
    """
    from chrion.scheduler.plan import Plan  # noqa: PLC0415 # onnx is not needed without plan files

    plan = Plan.load(path)
    # The busy times of the accelerator's lanes after the first are at the end of the list.
    further = plan.schedule.streams - 1
    predicted, busy_ms = plan.predicted, plan.busy_ms[: len(plan.busy_ms) - further]
    shared_ms = sum(plan.busy_ms[len(busy_ms) :])
    if table.part == "accelerator_only":
        if plan.accelerator_only is None:
            raise PlanError(f"{path}: no figures for accelerator_only: the plan was made without an accelerator")
        predicted = plan.accelerator_only
        busy_ms, shared_ms = (predicted.latency_ms,), 0.0
    resident = table.memory == "resident"
    memory_mb = predicted.resident_mb if resident else predicted.memory_mb
    # Rounding may make the sum over many operators exceed the latency.
    gpu_busy_ms, *lanes = (min(busy, predicted.latency_ms) for busy in busy_ms or (0.0,))
    gpu_busy_ms = min(gpu_busy_ms + shared_ms, predicted.latency_ms)
    cores_ms = tuple(sorted((busy for busy in lanes if busy), reverse=True))
    try:
        return _make_variant(name, table, memory_mb, predicted.latency_ms, gpu_busy_ms, cores_ms)
    except ValueError as error:
        raise PlanError(f"{path}: {error}") from error


def _make_variant(  # noqa: PLR0913, PLR0917 - the figures of a variant
    name: str,
    table: VariantTable,
    memory_mb: float,
    latency_ms: float,
    gpu_busy_ms: float,
    core_busy_ms: tuple[float, ...],
) -> Variant:
    load_mb = memory_mb if table.load_mb is None else table.load_mb
    given = table.distribution, table.jitter_cv, table.batch_cost
    return Variant(name, memory_mb, latency_ms, gpu_busy_ms, core_busy_ms, load_mb, *given)


class Jitter:
    """Random factors of requests, drawn from one stream of numbers for all variants.

    Args:
        variants: The variants by level and model; see :mod:`chrion.serving.simulator.service`.
        seed: The seed of the stream.
    """

    def __init__(self, variants: Sequence[Sequence[Variant]], seed: np.random.SeedSequence) -> None:
        self._rng = np.random.default_rng(seed)
        self._sigma = np.array([[_sigma(v) for v in row] for row in variants])
        self._exponential = np.array([[v.distribution == "exponential" for v in row] for row in variants])

    def draw(self, models: npt.NDArray[np.int64]) -> list[npt.NDArray[np.float64]]:
        """Return factors of mean 1 by level. Shapes: [n].

        Args:
            models: The models of the requests. Shape [n].
        """
        normal = self._rng.standard_normal(len(models))
        exponential = self._rng.standard_exponential(len(models)) if self._exponential.any() else normal
        levels = []
        for sigmas, is_exponential in zip(self._sigma, self._exponential, strict=True):
            sigma = sigmas[models]
            factors = np.exp(sigma * normal - sigma * sigma / 2)
            levels.append(np.where(is_exponential[models], exponential, factors))
        return levels


def _sigma(variant: Variant) -> float:
    return math.sqrt(math.log1p(variant.jitter_cv**2)) if variant.distribution == "lognormal" else 0.0


def _check(variant: Variant) -> None:
    where = f"variant {variant.name}"
    figures = {field: getattr(variant, field) for field in ("memory_mb", "gpu_busy_ms", "load_mb")}
    figures |= {f"busy time of core {i + 1}": busy for i, busy in enumerate(variant.core_busy_ms)}
    for name, value in figures.items():
        if not 0 <= value <= LARGEST:
            raise ValueError(f"{where}: {name}: expected 0 to {LARGEST:g}, found {value:g}")
    if not 0 < variant.latency_ms <= LARGEST:
        raise ValueError(f"{where}: latency_ms: expected above 0 and at most {LARGEST:g}, found {variant.latency_ms:g}")
    longest = max((variant.gpu_busy_ms, *variant.core_busy_ms))
    if longest > variant.latency_ms * (1 + 1e-9):
        raise ValueError(f"{where}: a lane is busy for {longest:g} ms, longer than the latency")
    if longest <= 0:
        raise ValueError(f"{where}: no busy time on the GPU or on a core")
