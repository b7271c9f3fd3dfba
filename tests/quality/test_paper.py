"""Plans for the bundled profile of the paper's machine, compared with the results in the paper."""

from __future__ import annotations

import math

import pytest

from chrion import Graph, Profile, load, partition
from chrion.common.files import bundled_folder
from chrion.scheduler import evaluate
from chrion.scheduler.limits import Limits
from chrion.scheduler.planner import Planner
from chrion.scheduler.policies.registry import POLICIES
from chrion.zoo import build
from policy_solutions import solve_policy

#: Table 6, GPU rows and CPU row: memory in MB, latency in ms, latency in ms.
TABLE_6 = {
    "lstm-baseline": (1643.0, 59.3, 70.6),
    "lstm-layers-4": (777.0, 20.5, 23.9),
    "lstm-layers-8": (1209.0, 39.0, 47.1),
    "lstm-layers-16": (2075.0, 78.1, 94.1),
    "lstm-batch-1": (1643.0, 58.3, 65.9),
    "lstm-batch-2": (1643.0, 59.1, 63.3),
    "lstm-batch-4": (1643.0, 57.2, 67.0),
    "lstm-batch-16": (1643.0, 58.2, 80.4),
    "lstm-io-32": (1533.0, 59.2, 61.5),
    "lstm-io-128": (2461.0, 58.6, 96.8),
    "lstm-seq-32": (777.0, 19.7, 23.7),
    "lstm-seq-64": (1209.0, 39.2, 47.1),
    "lstm-seq-128": (2075.0, 78.5, 95.4),
}


@pytest.fixture(scope="module")
def paper() -> Profile:
    """Return the bundled profile of the paper's machine."""
    return Profile.load(bundled_folder("profiles") / "gtx1080ti-paper.json")


@pytest.fixture(scope="module")
def baseline() -> Graph:
    """Return the paper's baseline: 12 layers, batch 8, width 64, 96 steps."""
    return load(build("lstm-baseline"))


@pytest.fixture(scope="module")
def planner(paper: Profile, baseline: Graph) -> Planner:
    """Return the planner of the default policy for the baseline."""
    return Planner(baseline, paper)


def test_the_profile_holds_the_derived_constants(paper: Profile, baseline: Graph) -> None:
    """The profile of the paper's machine has 51.5 us for each cell and 345 MB of base memory."""
    assert "1080 Ti" in (paper.machine.accelerator or "")
    assert paper.base_memory_mb == 345.0
    cells = [c for c in paper.operators.values() if c.op_type == "LSTM"]
    assert {c.accelerator_ms for c in cells} == {0.0515}
    assert paper.missing(baseline.dag) == ()
    assert paper.notes


@pytest.mark.parametrize("name", TABLE_6)
def test_the_rows_of_table_6(paper: Profile, name: str) -> None:
    """GPU latency and memory are within five percent of Table 6, and CPU latency within thirteen.

    The baseline's CPU latency is within two.
    """
    memory_mb, gpu_ms, cpu_ms = TABLE_6[name]
    graph = load(build(name))
    costs = paper.costs(graph.dag)
    gpu = solve_policy("accelerator", graph.dag, costs).timeline
    cpu = solve_policy("cpu", graph.dag, costs).timeline
    assert gpu.latency_ms == pytest.approx(gpu_ms, rel=0.05)
    assert gpu.memory_mb == pytest.approx(memory_mb, rel=0.05)
    assert cpu.latency_ms == pytest.approx(cpu_ms, rel=0.02 if name == "lstm-baseline" else 0.13)
    assert cpu.memory_mb == 0.0


def test_the_papers_plan_beats_the_gpu_alone(paper: Profile, baseline: Graph) -> None:
    """The plan has less latency and memory than the GPU alone. As in section 6.3, the SLO is 60 ms and alpha is 0.3."""
    plan = partition(baseline, paper, "60ms", 0.3, "chrion-paper")
    assert plan.meets_slo
    assert plan.accelerator_only is not None
    assert plan.predicted.latency_ms < min(60.0, plan.accelerator_only.latency_ms)
    assert plan.predicted.memory_mb < plan.accelerator_only.memory_mb


def test_the_latency_optimal_plan_gains_as_much_as_the_papers(paper: Profile, baseline: Graph) -> None:
    """The gains over the accelerator alone are no smaller than with the 52.0 ms and 948.1 MB of Table 6."""
    plan = partition(baseline, paper, policy="chrion-paper")
    assert plan.accelerator_only is not None
    assert plan.predicted.latency_ms / plan.accelerator_only.latency_ms <= 52.0 / 59.3
    assert plan.predicted.memory_mb < plan.accelerator_only.memory_mb


@pytest.mark.parametrize("slo_ms", [40.0, 70.0])
def test_no_policy_of_the_paper_needs_much_less_memory_within_an_slo(
    paper: Profile, baseline: Graph, planner: Planner, slo_ms: float
) -> None:
    """The default policy takes at most 2 % more than the paper's selections, whose alpha is found for the SLO."""
    plans = [partition(baseline, paper, slo_ms, policy=policy) for policy in ("chrion-paper", "bfs", "dfs")]
    least_mb = min((plan.predicted.memory_mb for plan in plans if plan.meets_slo), default=math.inf)
    plan = planner.plan(Limits(slo_ms))
    assert plan.meets_slo
    assert plan.predicted.memory_mb <= 1.02 * least_mb


def test_memory_falls_as_alpha_grows(paper: Profile, baseline: Graph) -> None:
    """From alpha 0 to 1, memory decreases and latency increases, as in Figure 10."""
    plans = [partition(baseline, paper, alpha=alpha, policy="chrion-paper") for alpha in (0.0, 0.3, 1.0)]
    assert plans[0].predicted.latency_ms == min(p.predicted.latency_ms for p in plans)
    assert plans[2].predicted.memory_mb < plans[0].predicted.memory_mb


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"exact"}))  # too large for an exact solution
def test_predictions_of_every_policy_are_those_of_the_evaluator(paper: Profile, baseline: Graph, policy: str) -> None:
    """Predictions equal the evaluator's for all policies but the exact one, which is for small graphs."""
    plan = partition(baseline, paper, alpha=0.1, policy=policy)
    timeline = evaluate(baseline.dag, paper.costs(baseline.dag), plan.schedule, plan.segments)
    assert (plan.predicted.latency_ms, plan.predicted.memory_mb) == (timeline.latency_ms, timeline.memory_mb)
    if policy == "cpu":
        assert plan.on_accelerator == 0
    if policy == "accelerator":
        assert plan.on_cpu == 0
