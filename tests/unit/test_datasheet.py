"""Times estimated from datasheets, beside rooflines calculated by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from chrion.graph.work import NodeWork, Product, Setup
from chrion.hardware import Accelerator, Cache, Processor, Rates, known_parts
from chrion.profiler import datasheet
from chrion.profiler.datasheet import Bound, Kernels, accelerator_parts, cached_bytes_per_ms, processor_parts

#: Kernels that reach all peaks, without overheads: what remains is the roofline model.
IDEAL = Kernels(
    product_efficiency=1.0,
    half_rows=0.0,
    vector_efficiency=1.0,
    cache_efficiency=1.0,
    memory_efficiency=1.0,
    stream_bytes_per_cycle=1e9,
    node_cycles=0.0,
    fork_cycles=0.0,
)
#: 10 operations a cycle at 1 to 2 GHz: 20 GFLOPS; 16 bytes a cycle from 1 MB, 4 bytes a cycle from 8 MB.
CPU = Processor(
    name="cpu",
    title="CPU",
    link="pcie-4",
    cores=4,
    memory_gb=8,
    bandwidth_gb_per_s=12,
    core_bandwidth_gb_per_s=5,
    clock_ghz=2,
    all_core_ghz=1,
    flops_per_cycle=Rates(10, int8=40),
    caches=(Cache(1e6 / 1024, 1, 16), Cache(8e6 / 1024, 4, 4)),
)
#: 10 TFLOPS of products, 2 of other arithmetic, 100 GB/s: the ridge point is at 100 operations per byte.
GPU = Accelerator("gpu", "GPU", "CUDA", "pcie-4", 8, 100, 5, Rates(10, float16=40), Rates(2))


@pytest.fixture
def ideal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasheet, "KERNELS", IDEAL)


def accelerator_ms(work: NodeWork, accelerator: Accelerator) -> float:
    """Return the time of a node on an accelerator in ms."""
    return accelerator_parts(work, accelerator).time_ms()


def processor_ms(work: NodeWork, processor: Processor, busy: int = 1, width: int = 1) -> float:
    """Return the time of a node on CPU cores in ms."""
    return processor_parts(work, processor, busy, width).time_ms()


def product(flops: float, size: float, rows: float = 1e9, element: str = "float32") -> NodeWork:
    return NodeWork(element, (Product(flops, rows),), traffic=size, footprint=size)


@pytest.mark.parametrize(
    ("intensity", "tflops"),
    [(1, 0.1), (10, 1.0), (99, 9.9), (100, 10.0), (1000, 10.0)],
)
def test_an_accelerator_reaches_its_roofline(intensity: float, tflops: float) -> None:
    """min(peak, bandwidth * intensity) on both sides of the ridge point, and the launch overhead of 5 us."""
    size = 1e8
    found = accelerator_ms(product(intensity * size, size), GPU)
    assert found == pytest.approx(0.005 + intensity * size / (tflops * 1e12) * 1e3)


def test_element_types_and_kinds_of_arithmetic_have_rates_of_their_own() -> None:
    """Products of float16 at 40 TFLOPS, of int8 as float32, depthwise ones and functions at the rate of vectors."""
    assert accelerator_ms(product(4e12, 1, element="float16"), GPU) == pytest.approx(100.005)
    assert accelerator_ms(product(4e12, 1, element="int8"), GPU) == pytest.approx(400.005)
    assert accelerator_ms(product(4e12, 1, rows=0), GPU) == pytest.approx(2000.005)
    assert accelerator_ms(NodeWork(operations=4e12), GPU) == pytest.approx(2000.005)


def test_the_steps_of_a_recurrent_operator_are_launches() -> None:
    """96 steps that depend on each other cost 96 launches, and those of the operator itself."""
    cell = NodeWork(products=(Product(0, 1), Product(0, 1)), steps=96)
    assert accelerator_ms(cell, GPU) == pytest.approx(0.005 * (96 + datasheet.RECURRENT_LAUNCHES))


def test_the_cell_of_the_paper_takes_about_as_long_as_published() -> None:
    """Table 6: 1152 LSTM cells of batch 8 and width 64 take 59.4 ms on a GTX 1080 Ti."""
    part = known_parts()["gtx-1080-ti"]
    assert isinstance(part, Accelerator)
    weights = 2 * 4 * 64 * 64
    flops = 2.0 * weights * 8
    cell = NodeWork(products=(Product(flops / 2, 8), Product(flops / 2, 8)), traffic=4.0 * weights)
    assert 1152 * accelerator_ms(cell, part) == pytest.approx(59.4, rel=0.1)


@pytest.mark.parametrize(
    ("size", "gb_per_s"),
    [(1e6, 32), (2e6, 8), (8e6, 8), (9e6, 5)],
)
@pytest.mark.usefixtures("ideal")
def test_the_bandwidth_is_that_of_the_smallest_cache_that_holds_the_values(size: float, gb_per_s: float) -> None:
    """16 and 4 bytes a cycle at 2 GHz, and 5 GB/s of main memory for one core."""
    assert cached_bytes_per_ms(CPU, size) == pytest.approx(gb_per_s * 1e6)
    assert processor_ms(product(1, size), CPU) == pytest.approx(size / gb_per_s / 1e6)


@pytest.mark.usefixtures("ideal")
def test_a_processor_reaches_its_roofline() -> None:
    """At 5 GB/s and 20 GFLOPS the ridge point is at 4 operations per byte."""
    size = 1e8
    for intensity, gflops in ((1, 5), (3.9, 19.5), (4, 20), (40, 20)):
        assert processor_ms(product(intensity * size, size), CPU) == pytest.approx(intensity * size / gflops / 1e6)
    assert processor_ms(product(80e6, 1, element="int8"), CPU) == pytest.approx(1)


@pytest.mark.usefixtures("ideal")
def test_busy_cores_share_caches_memory_and_clock() -> None:
    """Four busy cores: 1 GHz instead of 2, 2 MB of the shared cache each, 3 GB/s of main memory each."""
    assert processor_ms(product(1e9, 1), CPU, 4) == pytest.approx(100)
    for size, bytes_per_ms in ((2e6, 4e6), (2.1e6, 3e6), (1e6, 16e6)):
        assert processor_ms(product(1, size), CPU, 4) == pytest.approx(size / bytes_per_ms)


@pytest.mark.usefixtures("ideal")
def test_several_cores_divide_arithmetic() -> None:
    """Two cores at 1.67 GHz take 1 / (2 * 10 * 1.67e9) s per operation."""
    assert processor_ms(product(1e9, 1), CPU, width=2) == pytest.approx(1e3 / (2 * 10 * (2 - 1 / 3)))


def test_overheads_are_added() -> None:
    """A node without work takes the cycles of a node; outputs, pieces and threads add theirs."""
    cycles = datasheet.KERNELS
    assert processor_ms(NodeWork(), CPU) == pytest.approx(cycles.node_cycles / 2e6)
    three = processor_ms(NodeWork(outputs=3), CPU)
    assert three == pytest.approx((cycles.node_cycles + 2 * cycles.output_cycles) / 2e6)
    pieces = processor_ms(NodeWork(pieces=10), CPU)
    assert pieces == pytest.approx((cycles.node_cycles + 10 * cycles.piece_cycles) / 2e6)
    single = processor_ms(NodeWork(singles=10), CPU)
    assert single == pytest.approx((cycles.node_cycles + 10) / 2e6)
    chain = processor_ms(NodeWork(kernels=9), CPU)
    assert chain == pytest.approx(9 * cycles.node_cycles / 2e6)
    for setup in Setup:
        prepared = processor_ms(NodeWork(setup=setup), CPU)
        assert prepared == pytest.approx((cycles.node_cycles + cycles.setup_cycles[setup]) / 2e6)
    wide = processor_ms(NodeWork(steps=3), structs.replace(CPU, all_core_ghz=2), width=2)
    assert wide == pytest.approx((cycles.node_cycles + 3 * cycles.fork_cycles) / 2e6)


def test_few_rows_reach_half_of_the_peak() -> None:
    """At the half-performance length a product takes twice as long as with many rows."""
    kernels = datasheet.KERNELS
    many = processor_ms(product(1e9, 1, rows=1e9), CPU) - kernels.node_cycles / 2e6
    half = processor_ms(product(1e9, 1, rows=kernels.half_rows), CPU) - kernels.node_cycles / 2e6
    assert half / many == pytest.approx(2, rel=1e-6)
    assert many == pytest.approx(1e9 / (20e6 * kernels.product_efficiency), rel=1e-6)


def test_published_ridge_points() -> None:
    """A100: 19.5 TFLOPS at 1555 GB/s is 12.5 operations per byte in float32 without TF32, 200 in float16."""
    part = known_parts()["a100-40"]
    assert isinstance(part, Accelerator)
    assert part.vector_tflops.float32 / part.bandwidth_gb_per_s * 1e3 == pytest.approx(12.5, rel=0.01)
    assert part.matrix_tflops.float16 / part.bandwidth_gb_per_s * 1e3 == pytest.approx(200.6, rel=0.01)


@pytest.mark.usefixtures("ideal")
def test_kernels_without_long_vectors_take_their_steps_in_place_of_operations() -> None:
    """A million steps of a cycle, or calls, at 2 GHz; the operations would take 0.05 ms."""
    assert processor_ms(NodeWork(operations=1e6), CPU) == pytest.approx(0.05)
    assert processor_ms(NodeWork(operations=1e6, short_vectors=1e6), CPU) == pytest.approx(0.5)
    calls = datasheet.KERNELS.call_cycles
    assert processor_ms(NodeWork(operations=1e6, calls=1e6), CPU) == pytest.approx(calls * 0.5)


@pytest.mark.usefixtures("ideal")
def test_the_parts_of_a_time_name_what_bounds_it() -> None:
    """At 5 GB/s, 10 operations a byte are bound by arithmetic, one by memory; small values by a cache."""
    times = processor_parts(product(1e9, 1e8), CPU).by_bound()
    assert times[Bound.ARITHMETIC] == pytest.approx(50)
    assert sum(times.values()) == times[Bound.ARITHMETIC]
    times = processor_parts(product(1e8, 1e8), CPU).by_bound()
    assert times[Bound.MEMORY] == pytest.approx(20)
    assert times[Bound.ARITHMETIC] == 0
    relaid = NodeWork(products=(Product(1, 1e9),), traffic=1e6, footprint=1e6, relaid=1e6)
    assert processor_parts(relaid, CPU).by_bound()[Bound.CACHE] == pytest.approx(2e6 / 32e6)
    shared = replace(relaid, footprint=8e6)
    assert processor_parts(shared, CPU).by_bound()[Bound.SHARED_CACHE] == pytest.approx(2e6 / 8e6)
    large = replace(relaid, footprint=9e6)
    assert processor_parts(large, CPU).by_bound()[Bound.MEMORY] == pytest.approx(3e6 / 5e6)


@pytest.mark.usefixtures("ideal")
def test_a_factor_may_change_what_bounds_a_time() -> None:
    """With memory three times as slow, an operator that took 50 ms of arithmetic and 20 of traffic takes 60 ms."""
    parts = processor_parts(product(1e9, 1e8), CPU)
    assert parts.time_ms({Bound.MEMORY: 2}) == pytest.approx(50)
    assert parts.time_ms({Bound.MEMORY: 3}) == pytest.approx(60)
    assert parts.time_ms({Bound.ARITHMETIC: 2, Bound.MEMORY: 3}) == pytest.approx(100)
