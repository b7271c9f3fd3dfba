"""The choice of a replica for each request."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from chrion.errors import OptionError
from chrion.serving.manager.cluster_view import ClusterView, ReplicaState
from chrion.serving.manager.policies import ROUTING, route_resident_first
from chrion.serving.manager.policy_settings import PolicySpec
from chrion.serving.server.options import parse_policies, parse_replicas
from chrion.serving.simulator.engine import ClusterEngine, EngineConfig
from chrion.serving.simulator.settings import ServerSpec
from chrion.serving.variants import Variant
from property_tests import repetitions
from simulator_support import engine_of

REPLICAS = ["a", "b", "c"]


def state(number: int, *homes: str, **more: object) -> ReplicaState:
    """Return a report."""
    return ReplicaState(number, frozenset(homes), **more)  # type: ignore[arg-type]


@pytest.fixture
def view() -> ClusterView:
    """Return a view of three replicas with the same free memory."""
    found = ClusterView(route_resident_first)
    found.set_replicas(REPLICAS)
    for name in REPLICAS:
        found.report(name, state(0, free_bytes=100))
    return found


def choose(view: ClusterView, request: int, model: str, replicas: list[str] = REPLICAS, now_s: float = 0.0) -> str:
    """Choose a replica with a random number that no policy here uses."""
    return view.choose(now_s, request, model, replicas, 0.5)


def test_a_request_goes_to_the_replica_with_the_model(view: ClusterView) -> None:
    """A reported model is found, also under the name of the highest version, until the replica reports its eviction."""
    view.report("b", state(1, "m/2", "m/", free_bytes=100))
    assert [choose(view, 0, "m/2"), choose(view, 1, "m/")] == ["b", "b"]
    view.end(0)
    view.end(1)
    view.report("b", state(2, free_bytes=100))
    assert choose(view, 2, "m/2") == "a"


def test_a_request_goes_to_a_replica_that_is_about_to_load_the_model(view: ClusterView) -> None:
    """The second request follows the first, before the replica has reported the load."""
    first = choose(view, 0, "m/1")
    assert choose(view, 1, "m/1") == first
    view.report(first, state(1))  # was made before the requests arrived
    assert choose(view, 2, "m/1") == first


def test_a_missing_model_goes_to_the_least_loaded_replica(view: ClusterView) -> None:
    """Of replicas with equally few requests, also if not reported yet, the one with the most free memory is chosen."""
    view.report("a", state(1, free_bytes=50))
    view.report("c", state(1, free_bytes=200))
    chosen = [choose(view, number, f"m{number}/1") for number in range(4)]
    assert chosen == ["c", "b", "a", "c"]


def test_a_replica_that_has_just_started_counts_as_empty(view: ClusterView) -> None:
    """It receives the next missing model, although it has not reported its memory yet."""
    view.set_replicas([*REPLICAS, "d"])
    assert choose(view, 0, "m/1", [*REPLICAS, "d"]) == "d"


def test_a_replica_that_cannot_hold_the_model_is_not_chosen(view: ClusterView) -> None:
    """A model goes to the only replica that it fits on; if it fits on none, one of them refuses it."""
    for name in "ac":
        view.report(name, state(1, unfit=frozenset({"m/1"}), free_bytes=900))
    assert choose(view, 0, "m/1") == "b"
    view.report("b", state(1, unfit=frozenset({"m/1"})))
    assert choose(view, 1, "m/1") in REPLICAS


@pytest.mark.parametrize("name", ["random", "least-loaded", "resident-first"])
@pytest.mark.parametrize("rate_per_s", [5.0, 40.0])
def test_simulated_servers_are_chosen_as_replicas_are(name: str, rate_per_s: float) -> None:
    """A view that is told what simulated servers report chooses the server of each of their requests."""
    rng = np.random.default_rng(0)
    requests, policy = repetitions(1500), ROUTING[name]
    variants = [Variant("v", mb, mb / 20, mb / 20, load_mb=mb) for mb in map(float, rng.integers(300, 1500, 15))]
    specs = [ServerSpec(gpu_memory_gb=gb, load_fixed_ms=50.0) for gb in (3.0, 4.0, 1.2, 4.0)]
    models, gaps = rng.integers(0, 15, requests), rng.exponential(1000 / rate_per_s, requests)
    times = np.cumsum(gaps)
    config = EngineConfig(specs, variants, engine_of(variants).config.policies, policy, 1)
    rows: list[Any] = []
    ClusterEngine(config).run([(times, models)], keep=rows.append)
    ends = np.concatenate(rows)[:, [0, 5]]
    view, names, asked = ClusterView(policy), [f"r{i}" for i in range(len(specs))], count()
    view.set_replicas(names)

    def route(*inputs: Any) -> int:
        """Choose by the policy, and by the view, which learns before what has changed."""
        number = next(asked)
        for ended in ends[ends[:, 1] <= times[number], 0]:
            view.end(int(ended))
        for at, server in enumerate(engine.servers):
            held = (m for m, homes in enumerate(engine.cluster.homes) if at in homes)
            unfit = (m for m, eligible in enumerate(engine.eligible) if at not in eligible)
            view.report(
                names[at],
                state(number, *map(str, held), unfit=frozenset(map(str, unfit)), free_bytes=server.free_bytes),
            )
        assert [view.outstanding(name) for name in names] == inputs[0]
        chosen = policy(*inputs)
        assert view.choose(0.0, number, str(models[number]), names[::-1], inputs[3]) == names[chosen]
        return chosen

    engine = ClusterEngine(replace(config, route=route))
    engine.run([(times, models)])
    assert next(asked) == requests
    assert sum(engine.cluster.loads) > requests / 50


def test_a_lost_replica_is_avoided(view: ClusterView) -> None:
    """A suspended replica gets no requests for a while, one that has gone is forgotten, with the models that it had."""
    view.report("b", state(1, "m/1"))
    view.suspend("b", 10.0)
    assert view.available(5.0) == ["a", "c"]
    assert choose(view, 0, "m/1", now_s=5.0) != "b"
    assert choose(view, 1, "n/1", ["b"], now_s=5.0) == "b"
    view.set_replicas(["a", "c"])
    assert view.end(1) == "b"
    assert view.outstanding("b") == 0
    assert choose(view, 2, "m/1", ["a", "c"]) in {"a", "c"}


def test_a_repeated_request_counts_once(view: ClusterView) -> None:
    """A request that is sent again is counted at its new replica only, and its end is noted once."""
    first = choose(view, 0, "m/1")
    second = choose(view, 0, "m/1", [name for name in REPLICAS if name != first])
    assert [view.outstanding(first), view.outstanding(second)] == [0, 1]
    assert [view.end(0), view.end(0)] == [second, ""]


@pytest.mark.parametrize("gone", [True, False])
def test_requests_of_lost_replicas_are_repeated(view: ClusterView, gone: bool) -> None:  # noqa: FBT001 - a case
    """A request counts as repeated if its replica was lost, and not if the router only chooses again."""
    first = choose(view, 0, "m/1")
    others = [name for name in REPLICAS if name != first]
    assert choose(view, 0, "m/1", [first]) == first
    assert view.repeated == 0
    if gone:
        view.set_replicas(others)
    else:
        view.suspend(first, 10.0)
    choose(view, 0, "m/1", others, now_s=5.0)
    choose(view, 1, "m/1", others, now_s=5.0)
    assert view.repeated == 1


def test_names_of_models_do_not_accumulate(view: ClusterView) -> None:
    """Names that no replica has are forgotten with the next report, also if the report or the replica comes late."""
    for number in range(100):
        choose(view, number, f"unknown{number}/1")
        choose(view, 1000 + number, "")
        view.end(number)
    choose(view, 100, "asked/1")
    for name in REPLICAS:
        view.report(name, state(1, "held/1"))
    assert set(view.homes) == {"asked/1", "held/1"}
    view.end(100)
    view.set_replicas([])
    assert not view.homes


def test_options_of_clusters() -> None:
    """The routing policy is one of the serving policies; replicas are a number, a range, or those of the nodes."""
    found = parse_policies("cost, least-loaded,deadline", PolicySpec(), routing=True)
    assert found == PolicySpec(eviction="cost", routing="least-loaded", admission="deadline")
    assert parse_policies("lru", PolicySpec(routing="random"), routing=True).routing == "random"
    with pytest.raises(OptionError, match="two policies for routing: 'random'"):
        parse_policies("least-loaded,random", PolicySpec(), routing=True)
    assert [parse_replicas(text) for text in ("nodes", "3", "2..8")] == [(0, 0), (3, 3), (2, 8)]
    for text in ("", "0", "3..2", "a", "1..", "-1", "1..2..3"):
        with pytest.raises(OptionError, match="--replicas"):
            parse_replicas(text)
