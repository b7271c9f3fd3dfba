"""The use of cores by other processes, as the system counts it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chrion import cpu_use
from chrion.cpu_use import CpuUse, OtherWork


def counted(monkeypatch: pytest.MonkeyPatch, others: list[float], *, own: float = 0.0) -> OtherWork:
    """Return a measurement on two CPUs whose results are given, a second apart.

    Args:
        monkeypatch: The fixture.
        others: Cores that other processes use in each second.
        own: Cores that this process uses.
    """

    def uses() -> Iterator[CpuUse]:
        now_s, all_s = 0.0, 100.0
        yield CpuUse(now_s, all_s, 0.0)
        for cores in others:
            now_s, all_s = now_s + 1.0, all_s + cores + own
            yield CpuUse(now_s, all_s, own * now_s)

    results = uses()
    monkeypatch.setattr(cpu_use, "cpu_use", lambda _: next(results))
    monkeypatch.setattr(cpu_use, "affinity", lambda: {0, 1})
    return OtherWork()


@pytest.mark.parametrize("own", [0.0, 1.0])
def test_work_that_ends_has_eased(monkeypatch: pytest.MonkeyPatch, own: float) -> None:
    """A process that used a core and ends; what this process uses does not matter."""
    work = counted(monkeypatch, [1.0, 1.0, 0.0, 1.0], own=own)
    assert [work.has_eased() for _ in range(4)] == [False, False, True, False]


def test_work_that_comes_and_goes_has_not_eased(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process is busy all the time, another for a while."""
    work = counted(monkeypatch, [1.0, 2.0, 1.0, 2.0, 1.0])
    assert not any(work.has_eased() for _ in range(5))


def test_small_changes_are_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system counts in steps, and every machine has some other work."""
    work = counted(monkeypatch, [0.2, 0.0, 0.1])
    assert not any(work.has_eased() for _ in range(3))


@pytest.mark.parametrize(("cores", "busy"), [(0.0, False), (0.2, False), (0.5, True), (2.0, True)])
def test_work_of_about_a_core_is_busy(monkeypatch: pytest.MonkeyPatch, cores: float, *, busy: bool) -> None:
    """Less than a third of a core is not."""
    assert counted(monkeypatch, [cores]).is_busy() is busy


def test_many_cores_hide_little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a core of 64 leaves enough for a session."""
    work = counted(monkeypatch, [0.5, 10.0])
    work._cpus = set(range(64))
    assert [work.is_busy(), work.is_busy()] == [False, True]


def test_nothing_is_known_right_after_the_creation() -> None:
    """The system counts in steps of a hundredth of a second."""
    work = OtherWork()
    assert not work.has_eased()
    assert work.is_busy() is (None if work._before.all_s else False)


def test_systems_that_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is then neither busy nor does it ease."""

    def refuse(**_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr("psutil.cpu_times", refuse)
    monkeypatch.setattr(cpu_use, "_LEAST_S", 0.0)
    work = OtherWork()
    assert [work.is_busy(), work.has_eased()] == [False, False]


def test_the_system_counts_this_process() -> None:
    """A busy loop of this process uses at least as much CPU time by the system's count, within its steps."""
    before = cpu_use.cpu_use(None)
    if not before.all_s:
        pytest.skip("the system does not count CPU time")
    while (now := cpu_use.cpu_use(None)).own_s < before.own_s + 0.3:
        pass
    assert now.all_s - before.all_s > 0.25
    assert now.now_s - before.now_s >= 0.25
