"""Host memory before a disk, by the rules of ``docs/simulation.md``."""

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
    ("uses", "used", "fetched", "kept"),
    [
        ((2, 0), (), 3, {0, 2, 3}),  # never used
        ((2, 1, 0), (), 3, {0, 1, 3}),  # idle longest
        ((2, 1, 2, 0), (), 3, {0, 2, 3}),  # the last use counts
        ((0,), (1, 2), 3, {1, 2, 3}),  # those in use last
        ((), (0, 1, 2), 3, {1, 2, 3}),  # of equals, the one that came first
        ((2, 1), (0,), 4, {4}),  # 250 MB beside 100 MB do not fit into 300 MB
    ],
)
def test_the_weights_that_have_been_idle_longest_leave(
    uses: tuple[int, ...], used: tuple[int, ...], fetched: int, kept: set[int]
) -> None:
    """As many leave as are needed: first those that were never used, then by the last use, then those in use."""
    memory = memory_of(0, 1, 2)
    for model in uses:
        memory.note_use(model)
    memory.fetch(fetched, used.__contains__)
    assert memory.held.keys() == kept
    assert sum(memory.held.values()) <= 300 * MB
    assert memory.disk_loads == 1


def test_free_room_is_used_first() -> None:
    """Nothing leaves while there is room, to the byte."""
    memory = memory_of(0, 1)
    memory.fetch(2, ().__contains__)
    assert memory.held == {0: 100 * MB, 1: 100 * MB, 2: 100 * MB}


def test_models_that_no_device_has_used_leave_before_those_that_were_preloaded() -> None:
    """Whichever came first into host memory."""
    memory = memory_of(0)
    memory.note_use(0)
    memory.fill([1, 2])
    memory.fetch(3, ().__contains__)
    assert memory.held.keys() == {0, 2, 3}


def test_a_model_that_exceeds_host_memory_is_not_kept() -> None:
    """No other leaves for it, and each of its loads reads the disk; to note its use changes nothing."""
    memory = memory_of(0, 1, 2)
    for loads in (1, 2):
        assert memory.disk_ms(5, 0) == 5.0 + 400.0 / 2.0
        memory.fetch(5, ().__contains__)
        memory.note_use(5)
        assert memory.held.keys() == {0, 1, 2}
        assert memory.disk_loads == loads


def test_the_disk_takes_a_fixed_time_and_bytes_over_bandwidth() -> None:
    """The bytes are those of the variant that is loaded; host memory holds those of the first, and costs no time."""
    memory = memory_of(0)
    assert [memory.disk_ms(4, level) for level in (0, 1)] == [5.0 + 125.0, 5.0 + 15.0]
    assert [memory.disk_ms(0, level) for level in (0, 1)] == [0.0, 0.0]
    memory.fetch(4, ().__contains__)
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


def test_a_model_is_used_while_any_device_uses_it() -> None:
    """A GPU uses a model while it loads it, and while a request is ready or runs; another one may meanwhile be idle."""
    variants = [Variant("v", 100.0, 10.0, 10.0, load_mb=100.0)] * 3
    engine = engine_of(variants, spec=ServerSpec(gpus=2, pcie_gb_per_s=10.0, load_fixed_ms=1.0))
    (host,) = engine.hosts
    first, second = host.devices
    assert not host.uses(0)
    first.request_load(0.0, 0, 10.0, 0.0)
    assert host.uses(0)
    first.end_load(11.0)
    assert not host.uses(0)
    second.request_load(20.0, 0, 10.0, 0.0)
    second.end_load(31.0)
    first.offer(40.0, (0, 0, 40.0, 1.0, False))
    assert (first.uses(0), second.uses(0), host.uses(0)) == (True, False, True)


def test_the_last_use_on_any_device_counts() -> None:
    """Two GPUs take turns; the third model displaces the one whose last use on either of them was first.

    Host memory holds two models. Model 0 is used on the first GPU, model 1 on the second one, and model 0 again.
    """
    spec = ServerSpec(gpus=2, gpu_memory_gb=0.3, pcie_gb_per_s=10.0, host_memory_gb=0.2, disk_gb_per_s=2.0)
    engine = engine_of([Variant("v", 100.0, 10.0, 10.0, load_mb=100.0)] * 3, spec=spec)
    (host,) = engine.hosts
    first, second = host.devices
    for at, device, model in ((0.0, first, 0), (100.0, second, 1), (200.0, second, 0), (300.0, first, 2)):
        device.request_load(at, model, 10.0, 0.0)
        device.end_load(at + 60.0)
    assert host.memory.held.keys() == {0, 2}
