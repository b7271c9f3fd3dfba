"""Servers of simulations whose figures come from datasheets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_hardware import ACCELERATOR

from chrion.errors import InputError, ScenarioError
from chrion.serving.simulator.results import to_json
from chrion.serving.simulator.run import simulate
from chrion.serving.simulator.scenario import Scenario, find_scenario

MODEL = '[[models]]\nname = "m"\nvariants.gpu = {latency_ms = 20, memory_mb = 1000, gpu_busy_ms = 20}\n'
LOAD = "workload = { rate_per_s = 1, requests = 50 }\n"


def scenario(folder: Path, server: str, **sets: Any) -> Scenario:
    path = folder / "s.toml"
    path.write_text(f"{LOAD}[[servers]]\n{server}\n{MODEL}")
    return find_scenario(str(path)).changed(sets).build()


def test_a_server_has_the_figures_of_its_parts(tmp_path: Path) -> None:
    """An L4 beside the paper's GTX 1080 Ti: 300 to 484 GB/s, both bound by memory; PCI Express 4.0; 16 cores."""
    (server,) = scenario(tmp_path, 'hardware = "l4+epyc-16"').servers
    assert (server.gpu_memory_gb, server.cpu_cores) == (24, 16)
    assert server.gpu_speed == pytest.approx(300 / 484)
    assert server.pcie_gb_per_s == pytest.approx(31.5 * 0.76)
    assert server.cost_per_hour == pytest.approx(0.8048)


def test_given_figures_take_precedence(tmp_path: Path) -> None:
    """A server's own keys, a reference of its own, and several GPUs at the price of one each."""
    text = 'hardware = "h200+epyc-16"\ntimes_on = "h100"\ngpus = 8\ncpu_cores = 96\ngpu_memory_gb = 100'
    (server,) = scenario(tmp_path, text).servers
    assert (server.gpu_memory_gb, server.cpu_cores) == (100, 96)
    assert server.gpu_speed == pytest.approx(4800 / 3350)
    assert server.cost_per_hour == pytest.approx(8 * 7.912)
    (alone,) = scenario(tmp_path, 'hardware = "l4"').servers
    assert alone.cpu_cores == 12  # the default: no processor is named


def test_a_faster_gpu_serves_faster_and_results_are_marked(tmp_path: Path) -> None:
    """Without waiting, response times are in the ratio of the bandwidths; the JSON names the hardware."""
    found = {}
    for name in ("l4", "a10"):
        built = scenario(tmp_path, "", hardware=name)
        results = simulate(built)
        found[name] = results[0].total.response.p50_ms
        assert to_json(built, results)["estimated_hardware"] == [name]
    assert found["l4"] / found["a10"] == pytest.approx(600 / 300, rel=0.02)
    assert to_json(scenario(tmp_path, ""), ())["estimated_hardware"] == []


def test_files_are_looked_for_beside_the_scenario(tmp_path: Path) -> None:
    """A TOML file of a part is relative to the scenario's folder."""
    (tmp_path / "mine.toml").write_text(ACCELERATOR)
    (server,) = scenario(tmp_path, 'hardware = "mine.toml+epyc-32"').servers
    assert (server.gpu_memory_gb, server.cpu_cores) == (8, 32)
    assert server.gpu_speed == pytest.approx(100 / 484)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ('hardware = "l5"', "servers.hardware: hardware 'l5': unknown part 'l5'"),
        ('hardware = "epyc-16"', "it has no accelerator"),
        ("hardware = 5", "servers.hardware: expected text"),
        ('hardware = "l4"\ntimes_on = "epyc-16"', "it has no accelerator"),
        ('hardware = "l4"\ntimes_on = "l5"', "servers.times_on: hardware 'l5': unknown part"),
        ('hardware = "l4"\ngpus = "two"', "servers[0].gpus: expected a whole number"),
    ],
)
def test_wrong_hardware_is_refused(tmp_path: Path, server: str, message: str) -> None:
    """The message is one line and names the key."""
    with pytest.raises(InputError) as caught:
        scenario(tmp_path, server)
    assert isinstance(caught.value, ScenarioError)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
