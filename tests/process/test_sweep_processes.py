"""Sweeps in several processes and on a Ray cluster."""

import multiprocessing
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from chrion.errors import OptionError
from chrion.serving.simulator.overrides import parameter_grid
from chrion.serving.simulator.scenario import ScenarioSource, find_scenario
from chrion.serving.simulator.sweep import run_sweep
from ray_clusters import start_cluster
from server_client import wait_until

POINTS = parameter_grid([("gpu_memory_gb", (8, 10, 12)), ("eviction", ("lru", "lfu"))])


def figures(source: ScenarioSource, **way: Any) -> list[Any]:
    """Return the results of a sweep as plain data for comparison."""
    return [point.to_json() for point in run_sweep(source, POINTS, **way)]


@pytest.fixture(scope="module")
def source() -> ScenarioSource:
    return find_scenario("table7").changed({"requests": 400})


@pytest.fixture(scope="module")
def expected(source: ScenarioSource) -> list[Any]:
    """Return the results of a sweep in this process."""
    return figures(source)


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


def test_processes_change_nothing(source: ScenarioSource, expected: list[Any]) -> None:
    """Two processes give the results of one, in the same order."""
    assert figures(source, workers=2) == expected


@pytest.mark.filterwarnings("ignore")
def test_a_ray_cluster_of_two_nodes_changes_nothing(
    source: ScenarioSource, expected: list[Any], ray_address: str
) -> None:
    """A Ray cluster gives the results of one process, in the same order, and the connection is closed."""
    found = figures(source, ray_address=ray_address)
    import ray  # noqa: PLC0415 # an optional dependency

    assert not ray.is_initialized()
    assert found == expected


def test_an_unreachable_ray_cluster_is_refused(source: ScenarioSource) -> None:
    """An address without a listener is refused at once."""
    pytest.importorskip("ray")
    with pytest.raises(OptionError, match=r"--ray 127.0.0.1:1: .*refused"):
        run_sweep(source, POINTS, ray_address="127.0.0.1:1")


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
