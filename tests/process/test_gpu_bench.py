"""Tests of the GPU benchmark in small sizes, with the CPU provider as the accelerator, and of its page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chrion import Profile
from chrion.errors import OptionError
from chrion.report.lane_chart import LaneChart, LaneSpan

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_gpu  # noqa: E402 - a script, found by the line above
import gpu_page  # noqa: E402
import page_markers  # noqa: E402
import reproduce_table6  # noqa: E402

PARTS = {"overlap": 1, "table6": 2, "user": 1, "figure10": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the benchmark once in small sizes, and return the folder of its files."""
    folder = tmp_path_factory.mktemp("bench")
    command = [sys.executable, str(SCRIPTS / "bench_gpu.py"), "--toy", "--accelerator", "cpu", "-o", "gpu.json"]
    subprocess.run([*command, "--png", "o.png", "--profile", "p.json"], cwd=folder, check=True)  # noqa: S603 - a script of the repository
    return folder


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    """Return the results of the run."""
    found: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    return found


def test_every_case_runs(result: dict[str, Any]) -> None:
    """No case of any part fails or is left out."""
    for name, count in PARTS.items():
        part = result["parts"][name]
        assert (part["failed"], part["left_out"], len(part["cases"])) == ({}, [], count), name


def test_patterns_are_predicted_and_measured(result: dict[str, Any]) -> None:
    """Each of the four patterns has a predicted and a measured latency, and the CPU pattern uses no GPU memory."""
    for case in result["parts"]["table6"]["cases"].values():
        assert set(case) == set(gpu_page.PATTERNS)
        assert all(row["predicted"]["latency_ms"] > 0 and row["measured"]["median_ms"] > 0 for row in case.values())
        assert case["gpu"]["on_accelerator"] == case["gpu"]["operators"]
        assert (case["cpu"]["on_accelerator"], case["cpu"]["measured_mb"]) == (0, 0.0)


def test_the_traced_plan_uses_both_devices(result: dict[str, Any], folder: Path) -> None:
    """The plan places operators on the accelerator and on cores, and the trace is drawn."""
    row = result["parts"]["overlap"]["cases"]["lstm-baseline"]
    assert 0 < row["on_accelerator"] < row["operators"]
    assert 0 <= row["both_sides_ms"] <= row["latency_ms"]
    assert (folder / "o.png").read_bytes().startswith(b"\x89PNG")


def test_the_measurements_are_written_as_a_profile(folder: Path) -> None:
    """The file is a profile with costs of the accelerator."""
    stored = Profile.load(folder / "p.json")
    assert stored.accelerator == "CPUExecutionProvider"
    assert any(o.op_type == "LSTM" and o.accelerator_ms is not None for o in stored.operators.values())


def test_the_page_shows_every_case(result: dict[str, Any]) -> None:
    """The page has a row for every case, the warning about small sizes, and the aims."""
    page = gpu_page.format_page(result)
    assert "Toy sizes" in page
    assert all(f"| {name} |" in page for part in ("table6", "user") for name in result["parts"][part]["cases"])
    assert page.count("aim") >= 2
    assert "## Overlap" in page
    assert "Not measured" not in page


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


@pytest.mark.parametrize("page", ["cpu", "reproduction", "schedulers"])
def test_pages_have_valid_markers(page: str) -> None:
    """Each section has one begin and one end marker."""
    text = (SCRIPTS.parent / "docs" / f"{page}.md").read_text()
    names = re.findall(r"<!-- begin: (.*) -->", text)
    assert names
    for name in names:
        page_markers.replace_section(text, name, "")


def test_printed_reductions_follow_from_printed_figures() -> None:
    """The transcription of Table 6 agrees with the reductions that the table prints, to their rounding."""
    printed = {"lstm-baseline": (12.3, 42.3), "lstm-batch-2": (19.4, 43.1), "lstm-io-128": (-22.9, 64.4)}
    for name, (latency, memory) in printed.items():
        row, (ms, mb) = reproduce_table6.TABLE_6[name], reproduce_table6.PAPER[name].fastest
        assert reproduce_table6.reduction_percent(ms, row.gpu_ms) == pytest.approx(latency, abs=0.11)
        assert reproduce_table6.reduction_percent(mb, row.gpu_mb) == pytest.approx(memory, abs=0.11)
