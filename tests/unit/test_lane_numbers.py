"""Numbers and names of lanes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chrion.common.lane_numbers import all_lanes, display_order, is_accelerator_lane, lane_name
from property_tests import examples


def test_names_of_lanes() -> None:
    """Lanes of the accelerator count down from 0, and cores up from 1."""
    assert [lane_name(lane) for lane in (0, -1, -2, 1, 2)] == ["gpu0", "gpu1", "gpu2", "cpu1", "cpu2"]
    assert [is_accelerator_lane(lane) for lane in (0, -1, 1)] == [True, True, False]


@examples(100)
@given(cores=st.integers(0, 5), streams=st.integers(1, 5))
def test_lane_numbers_index_a_list(cores: int, streams: int) -> None:
    """Every lane has its own entry; lane 0 and the cores have the entries at their numbers."""
    lanes = all_lanes(cores, streams)
    entries = [""] * (cores + streams)
    for lane in lanes:
        entries[lane] = lane_name(lane)
    assert sorted(entries) == sorted(map(lane_name, lanes))
    assert entries[: cores + 1] == ["gpu0", *(f"cpu{core}" for core in range(1, cores + 1))]
    assert display_order([*reversed(lanes), *lanes]) == lanes
