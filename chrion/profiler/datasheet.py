"""Times of operators estimated from datasheets, in parts by what bounds them: the roofline model with overheads.

The roofline model bounds the rate of a computation by ``min(peak, bandwidth * intensity)``, so that its time is at
least ``max(flops / peak, bytes / bandwidth)`` (S. Williams, A. Waterman and D. Patterson, "Roofline: An Insightful
Visual Performance Model for Multicore Architectures", Communications of the ACM 52(4), 2009). On a processor the
bandwidth is that of the smallest cache that holds the operator's values, as in the hierarchical roofline model.

Kernels do not reach the peaks. :class:`Kernels` holds what is known of onnxruntime's kernels, which is the same for all
processors of one kind: the share of the peaks that they reach, and overheads in cycles. For accelerators only the
launch overhead is added, so that their times are lower bounds for large operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from chrion.graph.work import NodeWork, Product, Setup
from chrion.hardware.parts import Accelerator, Processor, rate_of


class Bound(Enum):
    """What bounds a part of a time."""

    ARITHMETIC = "arithmetic"
    #: Traffic of values that fit the caches of one core.
    CACHE = "cache"
    #: Traffic of values that fit a cache of several cores.
    SHARED_CACHE = "shared cache"
    #: All other traffic.
    MEMORY = "memory"
    #: Launches, calls and loops, whatever the amount of arithmetic and traffic.
    OVERHEAD = "overhead"


#: Factors by which parts are multiplied; a bound without a factor has 1.
Scales = Mapping[Bound, float]


@dataclass(frozen=True, slots=True)
class Parts:
    """The estimated time of a node: ``max(arithmetic, traffic) + copies + overhead``."""

    arithmetic_ms: float = 0.0
    traffic_ms: float = 0.0
    #: Copies from one layout to another, before and after the arithmetic.
    copy_ms: float = 0.0
    overhead_ms: float = 0.0
    #: What bounds traffic and copies.
    level: Bound = Bound.CACHE

    def by_bound(self, scales: Scales | None = None) -> dict[Bound, float]:
        """Return the time that each bound takes, in ms; of arithmetic and traffic, only the longer one counts."""
        scales = scales or {}
        memory = scales.get(self.level, 1.0)
        arithmetic, traffic = scales.get(Bound.ARITHMETIC, 1.0) * self.arithmetic_ms, memory * self.traffic_ms
        times = dict.fromkeys(Bound, 0.0)
        times[Bound.OVERHEAD] = scales.get(Bound.OVERHEAD, 1.0) * self.overhead_ms
        times[self.level] += memory * self.copy_ms
        if arithmetic >= traffic:
            times[Bound.ARITHMETIC] += arithmetic
        else:
            times[self.level] += traffic
        return times

    def time_ms(self, scales: Scales | None = None) -> float:
        """Return the sum over all bounds."""
        return sum(self.by_bound(scales).values())


@dataclass(frozen=True, slots=True)
class Kernels:
    """Properties of onnxruntime's CPU kernels: shares of peak rates, and overheads in cycles of the core."""

    #: The share of the peak that large matrix products reach.
    product_efficiency: float = 0.88
    #: The rows at which a product reaches half of that, since its weights are loaded once for all rows. This is the
    #: half-performance length of R. Hockney, "Characterizing computers and optimizing the FACR(l) Poisson-solver on
    #: parallel unicomputers", IEEE Transactions on Computers C-32, 1983.
    half_rows: float = 3.4
    #: The share for other arithmetic; few of its operations are multiply-adds, of which the peak counts two.
    vector_efficiency: float = 0.5
    #: The share of a cache's bandwidth, and of main memory's, that loads and stores reach.
    cache_efficiency: float = 0.65
    memory_efficiency: float = 0.8
    #: The maximum number of bytes that element-wise arithmetic loads and stores in a cycle: its kernels use vectors of
    #: 16 bytes.
    stream_bytes_per_cycle: float = 24.0
    #: A step on a vector of 16 bytes, and the call of a function such as tanh of the C library for one element.
    short_vector_cycles: float = 1.0
    call_cycles: float = 25.0
    #: Overhead of a kernel, of each value that it joins, of each output after the first, and of what some prepare.
    node_cycles: float = 700.0
    joined_cycles: float = 230.0
    output_cycles: float = 1000.0
    setup_cycles: Mapping[Setup, float] = field(
        default_factory=lambda: {Setup.NONE: 0.0, Setup.LOOPS: 500.0, Setup.RECURRENT: 8000.0}
    )
    #: Time of a contiguous piece in addition to its bytes, and of an element that is copied in a loop.
    piece_cycles: float = 11.0
    single_cycles: float = 1.0
    #: Time to divide one step of an operator among threads and to join them.
    fork_cycles: float = 13000.0
    #: Time to wake a thread that waits without spinning.
    wake_cycles: float = 280000.0
    #: Handoff and dispatch latency of native lanes, and of Python threads.
    native_handoff_cycles: float = 1100.0
    native_dispatch_cycles: float = 5500.0
    thread_handoff_cycles: float = 80000.0
    thread_dispatch_cycles: float = 65000.0


KERNELS = Kernels()
#: Launches of a recurrent operator on an accelerator beside those of its steps, such as copies of its states.
#: The paper's accelerator takes 51.6 us for an LSTM cell (59.4 ms for 1152 of them), nearly 14 launches of 3.8 us.
RECURRENT_LAUNCHES = 12


def processor_parts(work: NodeWork, processor: Processor, busy: int = 1, width: int = 1) -> Parts:
    """Return the estimated time of a node on CPU cores.

    Args:
        work: The node's work.
        processor: The processor.
        busy: The number of cores that run operators at the same time, one each.
        width: The number of cores that share this operator. Its arithmetic and traffic are divided among them in each
            step; overheads are not.
    """
    used = max(busy, width)
    clock = processor.clock(used) * 1e6  # cycles per ms
    level, bytes_per_ms = _level(processor, work.footprint / width, used)
    if work.operations and not work.relaid:  # kernels of the blocked layout load whole vectors
        bytes_per_ms = min(bytes_per_ms, KERNELS.stream_bytes_per_cycle * clock)
    overhead = KERNELS.node_cycles * work.kernels + KERNELS.output_cycles * (work.outputs - 1)
    overhead += KERNELS.setup_cycles[work.setup] + KERNELS.joined_cycles * work.joined
    overhead += (work.pieces * KERNELS.piece_cycles + work.singles * KERNELS.single_cycles) / width
    if width > 1:
        overhead += KERNELS.fork_cycles * work.steps
    return Parts(
        arithmetic_ms=_arithmetic_cycles(work, processor) / clock / width,
        traffic_ms=work.traffic / bytes_per_ms / width,
        # Caches read and write at the same time; main memory does not.
        copy_ms=work.relaid * (2 if level is Bound.MEMORY else 1) / bytes_per_ms / width,
        overhead_ms=overhead / clock,
        level=level,
    )


def _arithmetic_cycles(work: NodeWork, processor: Processor) -> float:
    per_cycle = rate_of(processor.flops_per_cycle, work.element)
    cycles = sum(_product_cycles(product, per_cycle) for product in work.products)
    if work.short_vectors or work.calls:
        return cycles + work.short_vectors * KERNELS.short_vector_cycles + work.calls * KERNELS.call_cycles
    return cycles + work.operations / (
        rate_of(processor.flops_per_cycle, vector_type(work)) * KERNELS.vector_efficiency
    )


def vector_type(work: NodeWork) -> str:
    """Return the element type of a node's arithmetic outside products: bytes are widened first."""
    return "float32" if work.element == "int8" else work.element


def cached_bytes_per_ms(processor: Processor, footprint: float) -> float:
    """Return the bandwidth of one core in bytes per ms for values of so many bytes.

    It is that of the smallest cache that holds them, or of main memory, while no other core is busy.
    """
    return _level(processor, footprint, busy=1)[1]


def _level(processor: Processor, footprint: float, busy: int) -> tuple[Bound, float]:
    """Return which memory holds so many bytes, and its bandwidth in bytes per ms."""
    for cache in processor.caches:
        if footprint <= cache.bytes / min(busy, cache.cores):
            bound = Bound.CACHE if cache.cores == 1 else Bound.SHARED_CACHE
            return bound, cache.bytes_per_cycle * processor.clock(busy) * 1e6 * KERNELS.cache_efficiency
    shared = processor.bandwidth_gb_per_s * KERNELS.memory_efficiency / busy
    return Bound.MEMORY, min(processor.core_bandwidth_gb_per_s, shared) * 1e6


def _product_cycles(product: Product, per_cycle: float) -> float:
    efficiency = KERNELS.product_efficiency * product.rows / (product.rows + KERNELS.half_rows)
    return product.flops / (per_cycle * (efficiency if product.rows else KERNELS.vector_efficiency))


def accelerator_parts(work: NodeWork, accelerator: Accelerator) -> Parts:
    """Return the estimated time of a node on an accelerator: launch overhead and roofline.

    The steps of a recurrent operator depend on each other, so that each of them is a launch of its own, in addition to
    :data:`RECURRENT_LAUNCHES`.
    """
    matrix = rate_of(accelerator.matrix_tflops, work.element)
    vector = rate_of(accelerator.vector_tflops, vector_type(work))
    computing = sum(product.flops / (matrix if product.rows else vector) for product in work.products)
    computing += work.operations / vector
    launches = work.steps + RECURRENT_LAUNCHES * (len(work.products) > 1)
    return Parts(
        arithmetic_ms=computing / 1e9,
        traffic_ms=work.traffic / accelerator.bandwidth_gb_per_s / 1e6,
        overhead_ms=launches * accelerator.launch_us / 1e3,
        level=Bound.MEMORY,
    )
