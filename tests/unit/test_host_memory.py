"""Host memory before a disk, by the rules of ``docs/simulation.md``."""

from math import inf

import numpy as np
import numpy.typing as npt
import pytest

from chrion.serving.manager.host_memory import HostMemory
from chrion.serving.simulator.settings import ServerSpec
from chrion.serving.variants import Variant
from simulator_support import engine_of

MB = 1_000_000
#: MB of the first and the second variant of six models.
LOAD_MB = [[100.0, 100.0, 100.0, 100.0, 250.0, 400.0], [30.0] * 6]


def memory_of(*models: int, room_mb: int = 300) -> HostMemory:
    """Return a host memory that holds models, before a disk of 2 GB/s."""
    memory = HostMemory(room_mb * MB, disk_fixed_ms=5.0, disk_gb_per_s=2.0, load_mb=LOAD_MB)
    memory.fill(models)
    assert sorted(memory.held) == sorted(models)
    return memory


@pytest.mark.parametrize(
    ("last_use_ms", "fetched", "kept"),
    [
        ((7.0, -1.0, 2.0), 3, {0, 2, 3}),  # never used
        ((7.0, 3.0, 2.0), 3, {0, 1, 3}),  # idle longest
        ((7.0, inf, inf), 3, {1, 2, 3}),  # those in use last
        ((inf, inf, inf), 3, {1, 2, 3}),  # of equals, the one that came first
        ((inf, 7.0, 2.0), 4, {4}),  # 250 MB beside 100 MB do not fit into 300 MB
    ],
)
def test_the_weights_that_have_been_idle_longest_leave(
    last_use_ms: tuple[float, ...], fetched: int, kept: set[int]
) -> None:
    """As many leave as are needed: first those that were never used, then by the last use, then those in use."""
    memory = memory_of(0, 1, 2)
    memory.fetch(fetched, last_use_ms.__getitem__)
    assert memory.held.keys() == kept
    assert sum(memory.held.values()) <= 300 * MB
    assert memory.disk_loads == 1


def test_free_room_is_used_first() -> None:
    """Nothing leaves while there is room, to the byte."""
    memory = memory_of(0, 1)
    memory.fetch(2, lambda _: 0.0)
    assert memory.held == {0: 100 * MB, 1: 100 * MB, 2: 100 * MB}


def test_a_model_that_exceeds_host_memory_is_not_kept() -> None:
    """No other leaves for it, and each of its loads reads the disk."""
    memory = memory_of(0, 1, 2)
    for loads in (1, 2):
        assert memory.disk_ms(5, 0) == 5.0 + 400.0 / 2.0
        memory.fetch(5, lambda _: 0.0)
        assert memory.held.keys() == {0, 1, 2}
        assert memory.disk_loads == loads


def test_the_disk_takes_a_fixed_time_and_bytes_over_bandwidth() -> None:
    """The bytes are those of the variant that is loaded; host memory holds those of the first, and costs no time."""
    memory = memory_of(0)
    assert [memory.disk_ms(4, level) for level in (0, 1)] == [5.0 + 125.0, 5.0 + 15.0]
    assert [memory.disk_ms(0, level) for level in (0, 1)] == [0.0, 0.0]
    memory.fetch(4, {0: 1.0}.__getitem__)
    assert memory.held == {4: 250 * MB}
    assert [memory.disk_ms(model, 0) for model in (0, 4)] == [55.0, 0.0]


def test_without_a_size_it_holds_all_models() -> None:
    """The disk is never read, as on a live server."""
    for memory in (HostMemory(), HostMemory(0, 5.0, 2.0, LOAD_MB)):
        assert not memory.misses(5)
        assert memory.disk_ms(5, 0) == 0.0


def test_it_is_filled_in_order_as_far_as_models_fit() -> None:
    """One that does not fit, or is there, lets later ones follow; those without weights take no room."""
    memory = HostMemory(360 * MB, load_mb=[[*LOAD_MB[0], 0.0]])
    memory.fill([1])
    memory.fill([5, 1, 4, 0, 6, 2])
    assert memory.held == {1: 100 * MB, 4: 250 * MB}


def test_loads_and_their_estimates_include_the_disk() -> None:
    """A load takes 1 + 10 ms over the link, and the first of a model 5 + 50 ms more.

    Model 1 displaces model 0 on the GPU, but not in host memory, so that the second load of model 0 takes 11 ms.
    """
    spec = ServerSpec(
        gpu_memory_gb=0.1,
        pcie_gb_per_s=10.0,
        load_fixed_ms=1.0,
        host_memory_gb=0.2,
        disk_gb_per_s=2.0,
        disk_fixed_ms=5.0,
    )
    variants = [Variant("v", 100.0, 10.0, 10.0, load_mb=100.0)] * 2
    parts: list[npt.NDArray[np.float64]] = []
    engine_of(variants, spec=spec).run([(np.array([0.0, 1000.0, 2000.0]), np.array([0, 1, 0]))], keep=parts.append)
    assert np.concatenate(parts)[:, 4] == pytest.approx([66.0, 1066.0, 2011.0])

    (gpu,) = engine_of(variants, spec=spec).servers
    assert gpu.times_to_memory(0.0, 0) == pytest.approx({0: 66.0})
    gpu.request_load(0.0, 0, 10.0, 0.0)
    assert gpu.times_to_memory(6.0, 0) == pytest.approx({0: 60.0})
    assert gpu.times_to_memory(6.0, 1) == pytest.approx({0: 60.0 + 66.0})  # after the load in progress
    gpu.end_load(66.0)
    gpu.request_load(100.0, 1, 10.0, 0.0)
    gpu.end_load(166.0)
    assert [gpu.times_to_memory(200.0, model) for model in (0, 1)] == [pytest.approx({0: 11.0}), {0: 0.0}]


def test_the_last_use_is_the_latest_over_the_devices() -> None:
    """Infinite while a GPU uses or loads a model, and before all others if none has used it."""
    variants = [Variant("v", 100.0, 10.0, 10.0, load_mb=100.0)] * 3
    engine = engine_of(variants, spec=ServerSpec(gpus=2, pcie_gb_per_s=10.0, load_fixed_ms=1.0))
    (host,) = engine.hosts
    first, second = host.devices
    assert host.last_use_ms(0) == -1.0
    first.request_load(0.0, 0, 10.0, 0.0)
    assert host.last_use_ms(0) == inf
    first.end_load(11.0)
    assert host.last_use_ms(0) == 11.0
    second.request_load(20.0, 0, 10.0, 0.0)
    second.end_load(31.0)
    assert (first.last_use_ms(0), host.last_use_ms(0)) == (11.0, 31.0)
    first.offer(40.0, (0, 0, 40.0, 1.0, False))
    assert (second.last_use_ms(0), host.last_use_ms(0)) == (31.0, inf)
