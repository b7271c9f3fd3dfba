"""The default policy beside the policies it starts from, and beside itself with less: it is never predicted slower."""

from __future__ import annotations

from typing import Any

import pytest

import chrion
from chrion import Graph, Profile
from chrion.scheduler import POLICIES
from chrion.scheduler.limits import Limits
from chrion.scheduler.plan_options import PlanOptions
from chrion.scheduler.planner import Planner
from chrion.scheduler.policies.policy import SchedulePolicy
from chrion.zoo import BUILDERS, build
from decoder_support import FORMS, small_decoder
from made_machines import FAMILIES, made_problem, roofline_profile
from policy_solutions import solve_policy
from property_tests import in_full_profile
from small_networks import SMALL

#: The policies of schedules, without the exact optimum.
CHEAP = sorted(name for name, policy in POLICIES.items() if isinstance(policy, SchedulePolicy) and name != "exact")
#: Recurrent networks: parameters that make them small.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    kind: (kind, {"layers": 3, "seq": 12, "chunk": 4, "io": 64, "batch": 1}) for kind in ("lstm", "gru", "rnn")
}
RECURRENT["lstm, bidirectional"] = ("lstm", {"layers": 3, "seq": 12, "io": 64, "batch": 1, "bidirectional": True})
RECURRENT["lstm, folded"] = ("lstm", {"layers": 4, "seq": 24, "chunk": 24, "io": 64, "batch": 1})
NETWORKS = {**{name: (name, parameters) for name, (parameters, _) in SMALL.items()}, **RECURRENT}
#: The sizes of one token after four others, for decoders.
SIZES = {"batch_size": 1, "sequence_length": 1, "past_sequence_length": 4, "total_sequence_length": 5}
CORES = 3
#: Networks of which only the full profile makes plans, since others show the same in less time.
LARGER = {
    *("googlenet", "inception-v3", "nasnet-a", "darts", "llama", "t5", "lstm, bidirectional"),
    *(form for form in FORMS if form.count("-") > 1),
}
PLANNED = [name for name in (*NETWORKS, *FORMS) if in_full_profile() or name not in LARGER]
#: The numbers of operators of random graphs.
OPERATORS = (20, 60) if in_full_profile() else (16, 32)


def load_network(name: str) -> Graph:
    """Return the graph of a small network of the zoo."""
    if name not in FORMS:
        return chrion.load(build(*NETWORKS[name]))
    model = small_decoder(name)
    shapes = {
        info.name: tuple(SIZES.get(d.dim_param, d.dim_value) for d in info.type.tensor_type.shape.dim)
        for info in model.graph.input
    }
    return chrion.load(model, shapes)


def latency_ms(graph: Graph, profile: Profile, policy: str = "chrion", **options: Any) -> float:
    """Return the predicted latency of a plan."""
    return Planner(graph, profile, PlanOptions(policy=policy, **options)).plan(Limits()).predicted.latency_ms


def test_the_whole_zoo_is_covered() -> None:
    """Every kind of network that the zoo builds is planned here."""
    assert {kind for kind, _ in NETWORKS.values()} | set(FORMS) == set(BUILDERS)


def checked_planner(graph: Graph, *, accelerator: bool) -> Planner:
    """Return the planner on a machine on which neither a cheap policy nor fewer cores are faster."""
    profile = roofline_profile(graph, CORES, accelerator=accelerator)
    planner = Planner(graph, profile)
    own = planner.plan(Limits()).predicted.latency_ms
    for policy in CHEAP:
        if accelerator or policy != "accelerator":
            assert own <= latency_ms(graph, profile, policy) + 1e-9, policy
    for cores in range(1, CORES):
        assert own <= latency_ms(graph, profile, cores=cores) + 1e-9, cores
    if accelerator:
        assert own <= latency_ms(graph, profile, streams=1) + 1e-9
    return planner


@pytest.mark.parametrize("name", PLANNED)
def test_no_policy_is_predicted_faster_on_a_network_of_the_zoo(name: str) -> None:
    """Neither a cheap policy nor the default one with fewer cores, one stream or no accelerator is faster."""
    graph = load_network(name)
    on_cores = checked_planner(graph, accelerator=False).plan(Limits()).predicted.latency_ms
    planner = checked_planner(graph, accelerator=True)
    assert planner.plan(Limits()).predicted.latency_ms <= on_cores + 1e-9
    assert_alpha_and_budget_are_monotone(planner)


def assert_alpha_and_budget_are_monotone(planner: Planner) -> None:
    """Check plans of one machine: a larger alpha never gives less latency or more memory, nor a smaller budget."""
    whole = planner.plan(Limits()).predicted
    for share in (0.3, 0.6, 1.0):
        limits = Limits(None, share * whole.resident_mb)
        plans = [planner.plan(limits, alpha).predicted for alpha in (0.0, 0.01, 0.1, 1.0, 10.0)]
        assert [p.latency_ms for p in plans] == sorted(p.latency_ms for p in plans)
        assert [p.resident_mb for p in plans] == sorted((p.resident_mb for p in plans), reverse=True)
        assert whole.latency_ms <= plans[0].latency_ms


@pytest.mark.parametrize("name", ["squeezenet", "deepfm", "bert", "moe", "gpt2-decoder", "lstm", "gru"])
def test_no_alpha_is_served_better_by_the_papers_policy(name: str) -> None:
    """If alpha prices the paper's memory, ``chrion-paper`` has no less L + alpha * M (Equation 5) at any alpha.

    The alphas are powers of the fourth root of two, from where memory hardly counts to where latency hardly does. A
    larger one gives neither less latency nor more memory.
    """
    graph = load_network(name)
    profile = roofline_profile(graph, CORES, accelerator=True)
    whole = Planner(graph, profile, PlanOptions(policy="accelerator")).plan(Limits()).predicted
    alphas = [0.0, *(whole.latency_ms / whole.memory_mb * 2.0 ** (power / 4) for power in range(-32, 33))]
    planner = Planner(graph, profile, PlanOptions(memory="paper"), alphas=alphas)
    paper = Planner(graph, profile, PlanOptions(policy="chrion-paper"))
    plans = [planner.plan(Limits(), alpha).predicted for alpha in alphas]
    for alpha, own in zip(alphas, plans, strict=True):
        other = paper.plan(Limits(), alpha).predicted
        assert own.latency_ms + alpha * own.memory_mb <= other.latency_ms + alpha * other.memory_mb + 1e-9, alpha
    assert [p.latency_ms for p in plans] == sorted(p.latency_ms for p in plans)
    assert [p.memory_mb for p in plans] == sorted((p.memory_mb for p in plans), reverse=True)


@pytest.mark.parametrize("weights", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize("streams", [0, 1, 2], ids=["cores", "one stream", "two streams"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_policy_is_predicted_faster_on_random_graphs(family: str, streams: int, *, weights: bool) -> None:
    """The same on random graphs of up to 60 operators, with and without weights, accelerator and streams."""
    for seed, n in enumerate(OPERATORS):
        dag, costs = made_problem(
            family, n, 3, seed, accelerator=bool(streams), weights=weights, streams=max(1, streams)
        )
        own = solve_policy("chrion", dag, costs).timeline.latency_ms
        for policy in CHEAP:
            if streams or policy != "accelerator":
                other = solve_policy(policy, dag, costs).timeline.latency_ms
                assert own <= other + 1e-9, (policy, n)
        for cores, fewer in [(2, streams), *((3, fewer) for fewer in range(streams))]:
            limited = solve_policy("chrion", dag, costs.limited_to(cores, fewer))
            assert own <= limited.timeline.latency_ms + 1e-9, (cores, fewer, n)
