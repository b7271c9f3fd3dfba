"""Sweeps: in this process, in several processes and on a Ray cluster; and their pictures."""

import multiprocessing
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chrion.errors import OptionError, ScenarioError
from chrion.report import check_picture
from chrion.report import simulation_plots as plots
from chrion.simulator.overrides import parameter_grid
from chrion.simulator.run import simulate
from chrion.simulator.scenario import ScenarioSource, find_scenario
from chrion.simulator.sweep import SweepPoint, run_sweep
from ray_clusters import start_cluster
from server_client import wait_until

POINTS = parameter_grid([("gpu_memory_gb", (8, 10, 12)), ("eviction", ("lru", "lfu"))])
SETS = {"requests": 400}


def figures(points: list[SweepPoint]) -> list[Any]:
    """Return the results of a sweep as plain data for comparison."""
    return [point.to_json() for point in points]


@pytest.fixture
def source() -> ScenarioSource:
    return find_scenario("table7").changed(SETS)


@pytest.fixture
def ray_address() -> Iterator[str]:
    """Start a Ray cluster of two nodes on this machine, and stop it after the test."""
    pytest.importorskip("ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = start_cluster({"num_cpus": 1, "include_dashboard": False}, {"num_cpus": 1})
        cluster.wait_for_nodes()
        yield cluster.address
        cluster.shutdown()


def test_a_point_is_the_scenario_with_its_values_set(source: ScenarioSource) -> None:
    """Each point has the results of its scenario simulated alone, and progress counts the points."""
    calls: list[int] = []
    points = run_sweep(source, POINTS, progress=calls.append)
    assert calls == [1, 2, 3, 4, 5, 6]
    alone = simulate(source.changed(POINTS[3]).build())
    assert figures(points)[3]["patterns"] == SweepPoint({}, 9, alone).to_json()["patterns"]


def test_processes_change_nothing(source: ScenarioSource) -> None:
    """Two processes give the results of one, in the same order."""
    assert figures(run_sweep(source, POINTS, workers=2)) == figures(run_sweep(source, POINTS))


@pytest.mark.filterwarnings("ignore")
def test_a_ray_cluster_of_two_nodes_changes_nothing(source: ScenarioSource, ray_address: str) -> None:
    """A Ray cluster gives the results of one process, in the same order, and the connection is closed."""
    found = figures(run_sweep(source, POINTS, ray_address=ray_address))
    import ray  # noqa: PLC0415 # an optional dependency

    assert not ray.is_initialized()
    assert found == figures(run_sweep(source, POINTS))


def test_ray_is_optional(source: ScenarioSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ray, one line names the package to install."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match=r"pip install 'chrion\[ray\]'"):
        run_sweep(source, POINTS, ray_address="auto")


def test_an_unreachable_ray_cluster_is_refused(source: ScenarioSource) -> None:
    """An address without a listener is refused at once."""
    pytest.importorskip("ray")
    with pytest.raises(OptionError, match=r"--ray 127.0.0.1:1: .*refused"):
        run_sweep(source, POINTS, ray_address="127.0.0.1:1")


def test_an_invalid_point_stops_the_sweep(source: ScenarioSource) -> None:
    """If one point is invalid, none is simulated."""
    calls: list[int] = []
    with pytest.raises(ScenarioError, match="the largest server has"):
        run_sweep(source, parameter_grid([("gpu_memory_gb", (12, 5))]), progress=calls.append)
    assert calls == []


def test_pictures(source: ScenarioSource, tmp_path: Path) -> None:
    """A run and a sweep are drawn as PNG files."""
    pytest.importorskip("matplotlib")
    plots.plot_results(simulate(source.build()), tmp_path / "run.png")
    plots.plot_sweep(run_sweep(source, POINTS), tmp_path / "sweep.png")
    for name in ("run.png", "sweep.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_copies_are_drawn_as_models(source: ScenarioSource, tmp_path: Path) -> None:
    """The axis of a sweep over copies is the number of models: nine for one copy."""
    pytest.importorskip("matplotlib")
    points = run_sweep(source, parameter_grid([("copies", (1, 2))]))
    assert [point.models for point in points] == [9, 18]
    plots.plot_sweep(points, tmp_path / "sweep.svg")
    assert "<!-- models -->" in (tmp_path / "sweep.svg").read_text()


def test_a_plot_needs_numbers_and_a_known_format(source: ScenarioSource, tmp_path: Path) -> None:
    """A first key with text as values, an unsupported format and a missing folder are refused."""
    pytest.importorskip("matplotlib")
    points = run_sweep(source, parameter_grid([("eviction", ("lru", "lfu"))]))
    with pytest.raises(OptionError, match="expected numbers on the axis"):
        plots.plot_sweep(points, tmp_path / "sweep.png")
    with pytest.raises(
        OptionError, match=r"run.xyz: unsupported picture format: expected .png, .svg, .pdf, found .xyz"
    ):
        plots.plot_results(points[0].results, tmp_path / "run.xyz")
    with pytest.raises(OptionError, match="there is no folder"):
        plots.plot_results(points[0].results, tmp_path / "none" / "run.png")


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


def test_an_interrupt_ends_the_processes(source: ScenarioSource) -> None:
    """If a sweep in processes is interrupted, its processes end before their points are done."""
    points = parameter_grid([("requests", (200, 5_000_000, 5_000_000))])

    def interrupt(done: int) -> None:
        assert done == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(source, points, workers=2, progress=interrupt)
    # The thread of the pool may be noting the end of a process at this moment. A point takes more than a minute.
    wait_until(lambda: not multiprocessing.active_children(), 10.0)
