"""The number of replicas on a Ray cluster, their cores, and the messages if they cannot be started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chrion.errors import OptionError
from chrion.serving.server.options import ClusterOptions, DeviceOptions, ServerOptions

NODES: list[dict[str, Any]] = [
    {"Alive": True, "Resources": {"CPU": 4.0, "GPU": 2.0}},
    {"Alive": True, "Resources": {"CPU": 2.0}},
    {"Alive": True, "Resources": {"memory": 1.0}},
    {"Alive": False, "Resources": {"CPU": 8.0, "GPU": 8.0}},
]


def test_one_replica_for_each_node_or_gpu() -> None:
    """Nodes that have ended do not count, nor do nodes without CPUs, such as a head that is kept free."""
    scaling = pytest.importorskip("chrion.serving.server.ray_scaling")
    assert scaling.count_places(NODES, gpus=False) == 2
    assert scaling.count_places(NODES, gpus=True) == 2


def test_replicas_follow_requests_as_simulated_servers_do() -> None:
    """At every tenth second more replicas start at once, and fewer are wanted once they were enough for 30 s."""
    now_s = 1000.0
    rules = {"min_servers": 1, "target": 2.0, "period_s": 10.0, "stop_after_s": 30.0}
    by_load = pytest.importorskip("chrion.serving.server.ray_scaling").ByLoad(4, lambda: now_s, **rules)
    requests = {10: 5.0, 20: 0.4, 30: 0.0, 40: 0.0, 50: 100.0}
    number, found = 1, []
    for second in range(60):
        now_s = 1000.0 + second
        context = SimpleNamespace(target_num_replicas=number, total_num_requests=requests.get(second, 7.0))
        number, _ = by_load(context)
        found.append(number)
    # For 5 requests, ceil(5 / 2). The replicas of the beginning and those wanted at 10 s count for 30 s.
    assert found == [1] * 10 + [3] * 30 + [1] * 10 + [4] * 10


@pytest.mark.parametrize(("cores", "count"), [(8, 1), (8, 3), (2, 4), (1, 2)])
def test_replicas_of_a_node_share_its_cores(cores: int, count: int) -> None:
    """Every replica has a core, no core is left out, and none has two replicas if there are enough."""
    share = pytest.importorskip("chrion.serving.server.ray_replica").share
    shares = [share(range(cores), index, count) for index in range(count)]
    assert all(shares)
    assert {core for own in shares for core in own} == set(range(cores))
    if cores >= count:
        assert sum(map(len, shares)) == cores


def test_impossible_clusters_are_refused(tmp_path: Path) -> None:
    """An address where nothing listens, and model control, are refused at once."""
    run = pytest.importorskip("chrion.serving.server.ray_serve").run
    cluster = ClusterOptions("127.0.0.1:1", DeviceOptions())
    with pytest.raises(OptionError, match=r"--ray 127.0.0.1:1: .*refused"):
        run(ServerOptions(tmp_path), cluster, print)
    with pytest.raises(OptionError, match="--model-control explicit: not with --ray"):
        run(ServerOptions(tmp_path, control="explicit"), cluster, print)


def test_devices_decide_on_the_machine_that_serves(tmp_path: Path) -> None:
    """Replicas of a node share half of its free memory; a budget for a missing accelerator is an error."""
    options = ServerOptions(tmp_path)
    alone, shared = (DeviceOptions().applied_to(options, replicas=count).budgets["host"] for count in (1, 2))
    assert shared == pytest.approx(alone / 2, rel=0.2)
    assert DeviceOptions(memory_mb=5.0, gpu_mb=7.0).applied_to(options).budgets == {"host": 5_000_000}
    with pytest.raises(OptionError, match="--gpu-budget: there is no accelerator"):
        DeviceOptions("none", 7.0, needs_gpu=True).applied_to(options)
