"""The use of cores by other processes, as the system counts it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pytest

from chrion.machine.cpu_use import CpuUse, OtherWork, cpu_use


def counted(others: list[float], *, own: float = 0.0, cpus: int = 2) -> OtherWork:
    """Return a measurement whose results are given, a second apart.

    Args:
        others: Cores that other processes use in each second.
        own: Cores that this process uses.
        cpus: Number of CPUs.
    """

    def uses() -> Iterator[CpuUse]:
        now_s, all_s = 0.0, 100.0
        yield CpuUse(now_s, all_s, 0.0)
        for cores in others:
            now_s, all_s = now_s + 1.0, all_s + cores + own
            yield CpuUse(now_s, all_s, own * now_s)

    results = uses()

    def measure(measured: Collection[int] | None) -> CpuUse:
        assert measured == range(cpus)
        return next(results)

    return OtherWork(measure, range(cpus))


@pytest.mark.parametrize("own", [0.0, 1.0])
def test_work_that_ends_has_eased(own: float) -> None:
    """A process that used a core and ends; what this process uses does not matter."""
    work = counted([1.0, 1.0, 0.0, 1.0], own=own)
    assert [work.has_eased() for _ in range(4)] == [False, False, True, False]


def test_work_that_comes_and_goes_has_not_eased() -> None:
    """One process is busy all the time, another for a while."""
    work = counted([1.0, 2.0, 1.0, 2.0, 1.0])
    assert not any(work.has_eased() for _ in range(5))


def test_small_changes_are_not_noticed() -> None:
    """The system counts in steps, and every machine has some other work."""
    work = counted([0.2, 0.0, 0.1])
    assert not any(work.has_eased() for _ in range(3))


@pytest.mark.parametrize(("cores", "busy"), [(0.0, False), (0.2, False), (0.5, True), (2.0, True)])
def test_work_of_about_a_core_is_busy(cores: float, *, busy: bool) -> None:
    """Less than a third of a core is not."""
    assert counted([cores]).is_busy() is busy


def test_many_cores_hide_little_work() -> None:
    """Half a core of 64 leaves enough for a session."""
    work = counted([0.5, 10.0], cpus=64)
    assert [work.is_busy(), work.is_busy()] == [False, True]


def test_nothing_is_known_right_after_the_creation() -> None:
    """The system counts in steps of a hundredth of a second."""
    work = OtherWork()
    assert not work.has_eased()
    assert work.is_busy() is (None if work.counted else False)


def test_systems_that_do_not_count() -> None:
    """Work is then neither busy nor does it ease."""
    none = 1 << 20  # a CPU that does not exist
    assert cpu_use([none]).all_s == 0.0
    work = OtherWork(cpus=[none])
    assert not work.counted
    assert [work.is_busy(), work.has_eased()] == [False, False]
    assert OtherWork().counted == (cpu_use(None).all_s > 0)


def test_the_system_counts_this_process() -> None:
    """A busy loop of this process uses at least as much CPU time by the system's count, within its steps."""
    before = cpu_use(None)
    if not before.all_s:
        pytest.skip("the system does not count CPU time")
    while (now := cpu_use(None)).own_s < before.own_s + 0.3:
        pass
    assert now.all_s - before.all_s > 0.25
    assert now.now_s - before.now_s >= 0.25
