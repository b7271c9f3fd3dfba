"""The GPU benchmark without a run: its cases, its figures, and the sections of pages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import bench_gpu
import gpu_page
import page_markers
import pytest
from reproduction.table6 import PAPER, TABLE_6, reduction_percent

from chrion.errors import OptionError
from chrion.report.lane_chart import LaneChart, LaneSpan

ROOT = Path(__file__).parents[2]


def test_failed_and_omitted_cases_are_recorded(tmp_path: Path) -> None:
    """A part starts no case after its share of the time, continues after a failure, and writes each result."""
    bench = bench_gpu.Bench("P", tmp_path / "r.json", toy=True, minutes=1.0, cores=None)
    bench.results = {"parts": {}}

    def fails() -> None:
        raise ValueError("broken")

    def ends_the_time() -> str:
        bench.minutes = 0.0
        assert json.loads((tmp_path / "r.json").read_text())["parts"]["user"]["failed"] == {"a": "ValueError: broken"}
        return "done"

    bench.run_part("user", {"a": fails, "b": ends_the_time, "c": ends_the_time})
    part = bench.results["parts"]["user"]
    assert (part["cases"], part["left_out"]) == ({"b": "done"}, ["c"])


def test_overlap_is_time_in_which_accelerator_and_cores_compute() -> None:
    """The time of a core and the accelerator in parallel counts, and that of two cores does not."""
    bars = [(0, 0.0, 4.0), (1, 3.0, 6.0), (2, 3.5, 5.0), (0, 5.5, 5.75)]
    lanes = LaneChart("measured", tuple(LaneSpan(lane, start, end, "") for lane, start, end in bars))
    assert bench_gpu.both_sides_ms(lanes) == pytest.approx(1.25)


@pytest.mark.parametrize(("hybrid", "expected"), [(8.0, "20.0 % less"), (9.0, "missed")])
def test_the_latency_aim_refers_to_the_best_plain_session(hybrid: float, expected: str) -> None:
    """The reduction is relative to the fastest session that ran."""
    timings = {
        "hybrid": {"median_ms": hybrid},
        "a": {"median_ms": 10.0},
        "b": {"median_ms": 12.0},
        "c": {"error": "no"},
    }
    lines = gpu_page.format_aims({"user": {"cases": {"64 wide": {"timings": timings}}}})
    assert expected in lines[0]
    assert "not measured" in lines[1]


def test_sections_are_replaced_between_their_markers() -> None:
    """The rest of the page is kept, and a page without exactly one of each marker is refused."""
    begin, end = "<!-- begin: t -->", "<!-- end: t -->"
    page = page_markers.replace_section(f"a\n{begin}\nold\n{end}\nb", "t", "| new |")
    assert page == f"a\n{begin}\n\n| new |\n\n{end}\nb"
    assert page_markers.replace_section(page, "t", "| new |") == page
    for bad in ("a", begin, f"{begin}{begin}{end}"):
        with pytest.raises(OptionError, match="once each"):
            page_markers.replace_section(bad, "t", "")


def test_pages_have_valid_markers() -> None:
    """Each section has one begin and one end marker."""
    for page in ("reproduction", "results"):
        text = (ROOT / "docs" / f"{page}.md").read_text()
        names = re.findall(r"<!-- begin: (.*) -->", text)
        assert names
        for name in names:
            page_markers.replace_section(text, name, "")


def test_printed_reductions_follow_from_printed_figures() -> None:
    """The transcription of Table 6 agrees with the reductions that the table prints, to their rounding."""
    printed = {"lstm-baseline": (12.3, 42.3), "lstm-batch-2": (19.4, 43.1), "lstm-io-128": (-22.9, 64.4)}
    for name, (latency, memory) in printed.items():
        row, (ms, mb) = TABLE_6[name], PAPER[name].fastest
        assert reduction_percent(ms, row.gpu_ms) == pytest.approx(latency, abs=0.11)
        assert reduction_percent(mb, row.gpu_mb) == pytest.approx(memory, abs=0.11)
