"""Sweeps in this process, and their pictures."""

import sys
from pathlib import Path

import pytest

from chrion.errors import OptionError, ScenarioError
from chrion.report import simulation_plots as plots
from chrion.report.figures import check_picture
from chrion.serving.simulator.overrides import parameter_grid
from chrion.serving.simulator.run import simulate
from chrion.serving.simulator.scenario import ScenarioSource, find_scenario
from chrion.serving.simulator.sweep import SweepPoint, run_sweep

POINTS = parameter_grid([("gpu_memory_gb", (8, 10, 12)), ("eviction", ("lru", "lfu"))])


@pytest.fixture(scope="module")
def source() -> ScenarioSource:
    return find_scenario("table7").changed({"requests": 60})


@pytest.fixture(scope="module")
def points(source: ScenarioSource) -> list[SweepPoint]:
    """Return the results at all points."""
    calls: list[int] = []
    found = run_sweep(source, POINTS, progress=calls.append)
    assert calls == [1, 2, 3, 4, 5, 6]
    return found


def test_a_point_is_the_scenario_with_its_values_set(source: ScenarioSource, points: list[SweepPoint]) -> None:
    """Each point has the results of its scenario simulated alone."""
    assert [point.values for point in points] == POINTS
    for values, point in zip(POINTS, points, strict=True):
        alone = simulate(source.changed(values).build())
        assert point.to_json() == SweepPoint(values, 9, alone).to_json()


def test_ray_is_optional(source: ScenarioSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ray, one line names the package to install."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match=r"pip install 'chrion\[ray\]'"):
        run_sweep(source, POINTS, ray_address="auto")


def test_an_invalid_point_stops_the_sweep(source: ScenarioSource) -> None:
    """If one point is invalid, none is simulated."""
    calls: list[int] = []
    with pytest.raises(ScenarioError, match="the largest server has"):
        run_sweep(source, parameter_grid([("gpu_memory_gb", (12, 5))]), progress=calls.append)
    assert calls == []


def test_pictures(points: list[SweepPoint], tmp_path: Path) -> None:
    """A run and a sweep are drawn as PNG files."""
    pytest.importorskip("matplotlib")
    plots.plot_results(points[0].results[:2], tmp_path / "run.png")
    plots.plot_sweep(points, tmp_path / "sweep.png")
    for name in ("run.png", "sweep.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_copies_are_drawn_as_models(source: ScenarioSource, tmp_path: Path) -> None:
    """The axis of a sweep over copies is the number of models: nine for one copy."""
    pytest.importorskip("matplotlib")
    points = run_sweep(source, parameter_grid([("copies", (1, 2))]))
    assert [point.models for point in points] == [9, 18]
    plots.plot_sweep(points, tmp_path / "sweep.svg")
    assert "<!-- models -->" in (tmp_path / "sweep.svg").read_text()


def test_a_plot_needs_numbers_and_a_known_format(points: list[SweepPoint], tmp_path: Path) -> None:
    """A first key with text as values, an unsupported format and a missing folder are refused."""
    pytest.importorskip("matplotlib")
    panels = {"all": [("gpu", points[0].results[0].responses)]}
    words = [SweepPoint({"eviction": "lru"}, 9, point.results) for point in points]
    with pytest.raises(OptionError, match="expected numbers on the axis"):
        plots.plot_sweep(words, tmp_path / "sweep.png")
    with pytest.raises(OptionError, match=r"run.xyz: expected a name ending in .png, .svg, .pdf, found 'run.xyz'"):
        plots.plot_histograms(panels, tmp_path / "run.xyz")
    with pytest.raises(OptionError, match="there is no folder"):
        plots.plot_histograms(panels, tmp_path / "none" / "run.png")


def test_matplotlib_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib, one line names the package to install."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OptionError, match=r"pip install 'chrion\[plot\]'"):
        check_picture("--plot", tmp_path / "run.png")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("seed", "seed"), "key 'seed' occurs twice"),
        (("gpu_memory_gb", "servers.gpu_memory_gb"), "'gpu_memory_gb' and 'servers.gpu_memory_gb' are the same"),
    ],
)
def test_a_repeated_key_is_refused(keys: tuple[str, str], message: str) -> None:
    """Two sweeps of one key are refused, since one of them would be lost."""
    with pytest.raises(OptionError, match=message):
        parameter_grid([(keys[0], (1, 2)), ("rate_per_s", (3,)), (keys[1], (4, 5))])
