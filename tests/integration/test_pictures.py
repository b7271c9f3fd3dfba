"""Pictures: their formats, and legends that are complete, beside the axes, and distinct."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chrion import Plan, Profile, load
from chrion.errors import OptionError
from chrion.report import alpha_sweep, comparison, simulation_plots
from chrion.report.benchmark.comparison import PolicyComparison, PolicyResult
from chrion.report.benchmark.latency import Timing
from chrion.report.figures import PICTURE_FORMATS, check_picture
from chrion.report.lane_chart import measured_chart, predicted_chart
from chrion.report.timeline_picture import plot_timelines
from chrion.runtime import Event
from chrion.scheduler import Prediction, fixed_plan
from chrion.serving.simulator import find_scenario, run_sweep, simulate
from chrion.serving.simulator.find import GROWS, SERVERS, Condition, find_limits
from chrion.serving.simulator.overrides import parameter_grid
from chrion.serving.simulator.results import PatternResult
from helpers import MACHINE, alternating_lanes, branches
from seams.commands import catch_figures

pytest.importorskip("matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

MAGIC = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.fixture
def plan() -> Plan:
    graph = load(branches())
    made = fixed_plan(graph, alternating_lanes(graph))
    return replace(made, slo_ms=4.5, accelerator_only=Prediction(5.0, 9.0, 8.0), cpu_only=Prediction(6.0, 0.0, 0.0))


@pytest.fixture(scope="module")
def results() -> Sequence[PatternResult]:
    """Return the results of a simulation."""
    return simulate(find_scenario("table7").changed({"requests": 200}).build())


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return the figures that are drawn in a test; their files are empty."""
    return catch_figures(monkeypatch)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """Return the path of a picture file."""
    return tmp_path / "picture.png"


def check_legend(figure: Figure) -> None:
    """Check that the legend is within the picture and covers no axes."""
    FigureCanvasAgg(figure).draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= figure.bbox.x0 - 1
    assert box.x1 <= figure.bbox.x1 + 1
    assert box.y0 >= figure.bbox.y0 - 1
    assert box.y1 <= figure.bbox.y1 + 1
    assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)


def test_the_suffix_decides_the_format(plan: Plan, tmp_path: Path) -> None:
    """A file has the format of its suffix in upper and lower case."""
    assert set(MAGIC) == set(PICTURE_FORMATS)
    for name in (*(f"t{suffix}" for suffix in PICTURE_FORMATS), "T.PDF"):
        plot_timelines(plan, [predicted_chart(plan)], tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(MAGIC[name[1:].lower()]), name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("t.jpg", "--png: t.jpg: expected a name ending in .png, .svg, .pdf, found 't.jpg'"),
        ("t", "--png: t: expected a name ending in .png, .svg, .pdf, found 't'"),
        ("none/t.png", "--png: none/t.png: cannot be written: there is no folder none"),
    ],
)
def test_bad_picture_files_are_refused_by_name(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the option, the file, what was expected and what was found."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError) as caught:
        check_picture("--png", Path(name))
    assert str(caught.value) == message


def test_timelines_have_a_legend_and_an_slo_line(plan: Plan, figures: list[Figure], picture: Path) -> None:
    """Each operator type or layer has an entry, and so have copies and the SLO; similar charts share a scale."""
    copies = [Event(1, 0, 0.0, 4.2), Event(1 << 20, -1, 0.0, 0.5, "x")]
    plot_timelines(plan, [predicted_chart(plan), measured_chart(plan, copies)], picture, graph=load(branches()))
    (figure,) = figures
    check_legend(figure)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(labels[:-2]) == ["Gemm", "MatMul", "Neg", "Relu"]
    assert labels[-2:] == ["copies", "SLO 4.50 ms"]
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim()
    assert all(any(line.get_xdata()[0] == 4.5 for line in axes.lines) for axes in figure.axes)


def test_adjacent_bars_of_one_colour_are_separated(plan: Plan, figures: list[Figure], picture: Path) -> None:
    """A white line marks the start of each bar, except of bars too short to be seen beside it."""
    spans = [(0.0, 2.0), (2.0, 2.001), (2.001, 4.0)]
    plot_timelines(plan, [measured_chart(plan, [Event(1, 0, start, end) for start, end in spans])], picture)
    (axes,) = figures[0].axes
    (lines,) = (found for found in axes.collections if isinstance(found, LineCollection))
    assert [segment[0][0] for segment in lines.get_segments()] == [0.0, 2.001]


def test_a_slow_run_gets_its_own_scale(plan: Plan, figures: list[Figure], picture: Path) -> None:
    """A measured run thirty times as long as the prediction has a time scale of its own."""
    plot_timelines(plan, [predicted_chart(plan), measured_chart(plan, [Event(1, 0, 0.0, 120.0)])], picture)
    for axes in figures[0].axes:
        step = axes.get_xticks()[1] - axes.get_xticks()[0]
        assert f"{step:.0e}"[0] in "125"
    ends = [axes.get_xlim()[1] for axes in figures[0].axes]
    assert ends == [pytest.approx(4.5 * 1.02), pytest.approx(120.0 * 1.02)]


def test_names_are_drawn_as_they_are(plan: Plan, tmp_path: Path) -> None:
    """Dollar signs and backslashes in names are not read as formulas."""
    odd = replace(plan, model=r"$\frac{$", operators=tuple(f"$\\x{{{i}$" for i in range(4)))
    plot_timelines(odd, [predicted_chart(odd)], tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(MAGIC[".png"])


def styles(lines: Sequence[Any]) -> list[tuple[str, ...]]:
    """Return colour, marker, its fill, and dashes of lines."""
    found = ((line.get_color(), line.get_marker(), line.get_fillstyle(), line.get_linestyle()) for line in lines)
    return [tuple(map(str, style)) for style in found]


def test_a_sweep_of_two_keys_has_a_whole_legend_and_distinct_lines(figures: list[Figure], picture: Path) -> None:
    """Four patterns and eight settings give 32 distinct lines, and the legend shows all of them."""
    source = find_scenario("table7").changed({"requests": 50})
    keys = [("gpu_memory_gb", (8, 12)), ("eviction", ("lru", "lfu", "cost", "belady")), ("gpu_slots", (1, 2))]
    simulation_plots.plot_sweep(run_sweep(source, parameter_grid(keys)), picture)  # type: ignore[arg-type]
    (figure,) = figures
    check_legend(figure)
    for axes in figure.axes:
        assert len(axes.lines) == len({style[1:] for style in styles(axes.lines)}) == 32
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:5] == ["gpu", "latency-optimal", "memory-optimal", "shrink", "eviction = lru, gpu_slots = 1"]
    assert len(labels) == 4 + 8


def test_a_sweep_of_one_key_distinguishes_patterns_without_colours(figures: list[Figure], picture: Path) -> None:
    """Each pattern has a marker and dashes of its own, the same in the legend, so that equal values hide no line."""
    points = run_sweep(find_scenario("table7").changed({"requests": 50}), parameter_grid([("gpu_memory_gb", (8, 12))]))
    simulation_plots.plot_sweep(points, picture)
    (figure,) = figures
    check_legend(figure)
    for axes in figure.axes:
        assert styles(axes.lines) == styles(figure.legends[0].get_lines())
        assert len({style[1:] for style in styles(axes.lines)}) == len(axes.lines) == 4


def test_a_sweep_of_priced_servers_has_their_cost_and_bands(figures: list[Figure], picture: Path) -> None:
    """The third panel has the cost of an hour of all servers; violations have the band of their intervals."""
    source = find_scenario("table7").changed({"requests": 400, "cost_per_hour": 3.0, "patterns": ["gpu"]})
    points = run_sweep(source, parameter_grid([("servers.count", (1, 2))]))
    simulation_plots.plot_sweep(points, picture)
    check_legend(figures[0])
    violations, _, cost = figures[0].axes
    assert np.asarray(cost.lines[0].get_ydata()) == pytest.approx([3.0, 6.0])
    (band,) = violations.collections
    intervals = [point.results[0].intervals["violations"] for point in points]
    assert band.get_datalim(violations.transData).y1 == pytest.approx(100 * max(one.high for one in intervals))


def test_a_search_is_drawn_with_its_limit_and_intervals(figures: list[Figure], picture: Path) -> None:
    """The line of a pattern has the values whose queues do not grow, and the limit is a line of its own."""
    sets = {"requests": 100, "rate_per_s": 40.0, "patterns": ["gpu"], "measure": "response", "slo.factor": 5.0}
    source = find_scenario("table7").changed(sets)
    condition = Condition("violations", 0.1)
    quantity = SERVERS.searched("servers", condition, source.build())
    limits = find_limits(SERVERS, source, "servers", condition)
    simulation_plots.plot_search(quantity, condition, limits, picture)
    check_legend(figures[0])
    (axes,) = figures[0].axes
    curve, limit = axes.lines
    shown = [probe for probe in limits[0].curve if probe.met != GROWS]
    assert np.asarray(curve.get_xdata()).tolist() == [probe.amount for probe in shown]
    assert np.asarray(curve.get_ydata()) == pytest.approx([100 * probe.figure.mean for probe in shown])
    assert np.asarray(limit.get_ydata())[0] == 10.0


def test_the_memory_of_every_server_is_drawn(figures: list[Figure], picture: Path) -> None:
    """Beside the mean, each server has a line, and their range an area; servers may have bins of other widths."""
    source = find_scenario("table7").changed({"requests": 300, "servers.count": 3, "patterns": ["gpu"]})
    (result,) = simulate(source.build())
    first, *others = result.servers
    halves = tuple(np.array(first.memory_mb)[: len(first.memory_mb) // 2 * 2].reshape(-1, 2).mean(axis=1).tolist())
    wider = replace(first, memory_bin_ms=2 * first.memory_bin_ms, memory_mb=halves)
    simulation_plots.plot_results([replace(result, servers=(wider, *others))], picture)
    memory = next(axes for axes in figures[0].axes if "each server" in axes.get_title())
    assert len(memory.patches) == 3 + 1 + 1
    own, mean = (np.asarray(memory.patches[i].get_data().values) for i in (0, -1))  # type: ignore[attr-defined]
    assert own[: len(halves)] == pytest.approx(np.array(halves) / 1000)
    assert len(mean) == pytest.approx(len(first.memory_mb) / 2, abs=1)


def test_the_memory_budget_and_the_load_are_drawn(
    results: Sequence[PatternResult], figures: list[Figure], picture: Path
) -> None:
    """A budget that is used up entirely is drawn as a line of its own, not on the edge of the panel.

    The last panels have the series of the results: arrivals once, since patterns share them, others by pattern.
    """
    busy = [replace(r, series=replace(r.series, waiting=tuple(range(len(r.series.waiting))))) for r in results]
    simulation_plots.plot_results(busy, picture)
    check_legend(figures[0])
    memory, arrivals, waiting, violations = figures[0].axes[-4:]
    (budget,) = memory.lines
    assert budget.get_ydata()[0] == pytest.approx(8.0)
    assert memory.get_ylim() == (0, pytest.approx(8.4))
    assert tuple(arrivals.lines[0].get_ydata()) == results[0].series.arrivals_per_s
    assert len(arrivals.lines) == 1
    for i, result in enumerate(busy):
        assert tuple(waiting.lines[i].get_ydata()) == result.series.waiting
        shown = np.asarray(violations.lines[i].get_ydata(), float)
        assert len(shown) <= 64
        total = result.total.violation_rate  # of all requests; the joined bins have about equal numbers of them
        assert np.nanmean(shown) / 100 == pytest.approx(total, abs=0.02)


def test_servers_that_come_and_go_are_drawn(figures: list[Figure], picture: Path) -> None:
    """The last panel has the servers that are available and those that are on, whose integral is the server hours."""
    (result,) = simulate(find_scenario("elastic").changed({"requests": 3000, "patterns": ["gpu"]}).build())
    simulation_plots.plot_results([result], picture)
    check_legend(figures[0])
    servers = figures[0].axes[-1]
    assert servers.get_title() == "servers: on (wide), available"
    available, on = (np.asarray(line.get_ydata()) for line in servers.lines)
    assert (available <= on + 1e-9).all()
    assert available.min() < on.max()
    widths_ms = np.minimum(result.series.bin_ms, result.duration_ms - result.series.bin_ms * np.arange(len(on)))
    assert (on * widths_ms).sum() / 3.6e6 == pytest.approx(result.usage.server_hours, rel=1e-6)


def test_no_panel_is_empty(results: Sequence[PatternResult], figures: list[Figure], picture: Path) -> None:
    """Series that are zero throughout have no panel, and the others share the room."""
    calm = [replace(r, series=replace(r.series, waiting=(0,) * len(r.series.waiting))) for r in results]
    simulation_plots.plot_results(calm, picture)
    titles = [axes.get_title() for axes in figures[0].axes]
    assert titles[-2:] == ["arrivals", "SLO violations"]
    assert "waiting requests" not in titles


def test_the_slo_line_is_on_the_axis_or_not_in_the_legend(plan: Plan, figures: list[Figure], picture: Path) -> None:
    """An SLO of up to twice the latency is inside the axis; with a greater one the legend does not name it."""
    for factor, visible in ((1.9, True), (5.0, False)):
        late = replace(plan, slo_ms=factor * plan.predicted.latency_ms)
        plot_timelines(late, [predicted_chart(late)], picture)
        figure = figures[-1]
        assert (late.slo_ms <= figure.axes[0].get_xlim()[1]) == visible
        assert any("SLO" in text.get_text() for text in figure.legends[0].get_texts()) == visible
        assert "SLO" in figure.axes[0].get_title(loc="left")


def test_narrow_bars_of_several_layers_are_one_block(plan: Plan, figures: list[Figure], picture: Path) -> None:
    """A thousand bars on two lanes become a few blocks that state how many bars they are."""
    count = 1000
    times = [Event(1, i % len(plan.segments), i / count, (i + 1) / count) for i in range(count)]
    plot_timelines(plan, [measured_chart(plan, times)], picture, graph=load(branches()))
    (axes,) = figures[0].axes
    numbers = [int(text.get_text()) for text in axes.texts]
    assert len(numbers) <= 2 * 20
    assert sum(numbers) == count
    assert "several, with their number" in [text.get_text() for text in figures[0].legends[0].get_texts()]


def test_an_alpha_sweep_without_accelerator_has_no_panel_of_memory(
    plan: Plan, figures: list[Figure], picture: Path
) -> None:
    """Without an accelerator only latencies are drawn, with the SLO on their axis."""
    alone = replace(plan, accelerator_only=None, slo_ms=3 * plan.predicted.latency_ms)
    alpha_sweep.plot_alpha_sweep([(0.0, alone), (1.0, alone)], picture)
    (axes,) = figures[0].axes
    assert axes.get_title() == "latency"
    assert axes.get_ylim()[1] > alone.slo_ms


def test_lines_of_many_settings_are_distinct() -> None:
    """Eight patterns with 24 settings each have 192 different styles, without their colours."""
    found = [simulation_plots.line_style(pattern, setting) for pattern in range(8) for setting in range(24)]
    assert len({(style["marker"], style["fillstyle"], style["linestyle"]) for style in found}) == 192


def test_legends_of_histograms_comparisons_and_alpha_sweeps_cover_nothing(
    results: Sequence[PatternResult], plan: Plan, figures: list[Figure], picture: Path
) -> None:
    """Legends stand beside or below the axes."""
    panels = {name: [(r.pattern, r.executions[name]) for r in results] for name in ("baseline", "batch-1")}
    simulation_plots.plot_histograms(panels, picture)
    timing = Timing("heft", 4.0, 3.5, 5.0, 9)
    rows = (PolicyResult("heft", plan, 1.0, 2, 1, timing), PolicyResult("greedy", plan, 1.0))
    baseline = Timing("onnxruntime, 2 threads", 6.0, 5.0, 7.0, 9)
    found = PolicyComparison(load(branches()), Profile(MACHINE, 2, None, {}), rows, (baseline,))
    comparison.plot_comparison(found, picture)
    alpha_sweep.plot_alpha_sweep([(0.0, plan), (1.0, plan)], picture)
    assert len(figures) == 3
    for figure in figures:
        check_legend(figure)
