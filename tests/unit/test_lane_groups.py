"""Groups of lanes that stand in for threads: which group a request gets, and on which cores it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from chrion.common.lane_numbers import UPLOAD_LANE
from chrion.machine.core_leases import lease_cores
from chrion.runtime.execution.lane_groups import LaneGroups, assign_cores
from seams.execution import use_cores

EIGHT = tuple(range(8))


class StandInLanes:
    """The lanes of one group, on their cores."""

    def __init__(self, cores: Mapping[int, int | None]) -> None:
        self.cores = set(cores.values())
        self.moved = False
        self.until: list[float | None] = []

    def close(self, until: float | None = None) -> None:
        """Record the limit."""
        self.until.append(until)


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use eight cores."""
    use_cores(monkeypatch, EIGHT)


def test_each_request_in_flight_has_a_group_of_its_own() -> None:
    """Four requests of two lanes use all eight cores, once each; a request that ends leaves its group to the next."""
    groups = LaneGroups([1, 2], StandInLanes)
    assert groups.capacity == 4
    leased = [groups.lease(token) for token in range(4)]
    assert [group.lanes.cores for group in leased] == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]
    groups.release(2)
    groups.release(2)
    assert groups.lease(4) is leased[2]


def test_more_requests_than_groups_share_them_evenly() -> None:
    """Twelve requests are spread over four groups."""
    groups = LaneGroups([1, 2], StandInLanes)
    counts = Counter(id(groups.lease(token)) for token in range(12))
    assert list(counts.values()) == [3, 3, 3, 3]


def test_a_single_caller_has_one_group() -> None:
    """Requests one after another open no further group, and neither does a limit of one."""
    groups, limited = LaneGroups([1, 2], StandInLanes), LaneGroups([1, 2], StandInLanes, 1)
    used = set()
    for token in range(5):
        used.add(id(groups.lease(token)))
        groups.release(token)
    assert len(used) == 1
    assert len({id(limited.lease(token)) for token in range(5)}) == limited.capacity == 1


def test_sessions_have_cores_of_their_own() -> None:
    """Two sessions use different cores, and the cores of a closed one are used again."""
    first, second = LaneGroups([1, 2], StandInLanes), LaneGroups([1, 2], StandInLanes)
    lanes = first.lease(0).lanes
    assert (lanes.cores, second.lease(0).lanes.cores) == ({0, 1}, {2, 3})
    first.close(7.0)
    assert lanes.until == [7.0]
    assert LaneGroups([1, 2], StandInLanes).lease(0).lanes.cores == {0, 1}


def test_further_groups_leave_cores_to_other_sessions() -> None:
    """A session does not share the first group's cores while cores of further groups can be shared."""
    groups = LaneGroups([1, 2], StandInLanes)
    for token in range(4):
        groups.lease(token)
    assert not LaneGroups([1, 2], StandInLanes).lease(0).lanes.cores & {0, 1}


def test_groups_that_are_used_rarely_leave_their_cores_to_other_sessions() -> None:
    """Lanes of other sessions use those cores last, but before they share cores with each other."""
    rare = LaneGroups([1, 2], StandInLanes, further=True)
    assert rare.lease(0).lanes.cores == {0, 1}
    held = lease_cores(6)
    assert held.cores == EIGHT[2:]
    assert LaneGroups([1, 2], StandInLanes).lease(0).lanes.cores == {0, 1}


def test_a_given_lease_is_used() -> None:
    """The first group is on cores that are leased already."""
    lease = lease_cores(5)
    group = LaneGroups([1, 2], StandInLanes, 1, lease=lease).lease(0)
    assert group.lease is lease
    assert group.lanes.cores == {0, 1}


def test_a_system_without_further_threads() -> None:
    """If no further group can be opened, the open ones serve all requests; the first one has to be."""
    left = 2

    def open_lanes(cores: Mapping[int, int | None]) -> StandInLanes:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("no threads")
        return StandInLanes(cores)

    groups = LaneGroups([1, 2], open_lanes)
    assert len({id(groups.lease(token)) for token in range(6)}) == groups.capacity == 2
    with pytest.raises(RuntimeError, match="no threads"):
        LaneGroups([1, 2], open_lanes)


def test_a_group_that_may_no_longer_use_its_cores_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lanes move to cores that are left, of which there may be fewer; without threads, they stay."""
    groups = LaneGroups([1, 2], StandInLanes)
    old = groups.lease(0).lanes
    groups.release(0)
    use_cores(monkeypatch, (5, 6))
    old.moved = True
    new = groups.lease(1)
    assert new.lanes.cores == {5, 6}
    assert groups.capacity == 1
    groups.release(1)
    assert groups.lease(2) is new


def test_lanes_of_cores_are_pinned_before_those_of_the_accelerator() -> None:
    """Lanes for which no core is left are not pinned."""
    assert assign_cores([UPLOAD_LANE, 0, 2, -1, 1], [4, 3, 9]) == {1: 4, 2: 3, UPLOAD_LANE: None, -1: 9, 0: None}
