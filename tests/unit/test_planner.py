"""The planner: defaults, options, remarks, and policies of installed packages."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

import chrion
from chrion import Graph, Profile, load, partition
from chrion.errors import OptionError
from chrion.graph.recurrent import chunk_choices, unroll
from chrion.profiler import CopyCost
from chrion.profiler.profiles import OperatorCost, PlainLatency
from chrion.scheduler import DEFAULT_POLICY, Prediction
from chrion.scheduler.limits import Limits
from chrion.scheduler.plan_options import PlanOptions
from chrion.scheduler.planner import Planner
from chrion.scheduler.priced_memory import MEMORIES
from chrion.zoo import build
from helpers import FLOAT, MACHINE, branches, make_model, node, value
from policy_packages import policy_installer
from random_profiles import coarse_random_profile


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Return a graph of two branches that meet."""
    return load(branches())


@pytest.fixture(scope="module")
def profile(graph: Graph) -> Profile:
    """Return random costs of that model on an accelerator and two cores."""
    return coarse_random_profile(graph, Random(0))


def test_the_default_policy_is_that_of_the_command(graph: Graph, profile: Profile) -> None:
    """``chrion.partition`` uses the default policy if none is named, as sessions do."""
    plan = partition(graph, profile)
    assert plan == partition(graph, profile, policy=DEFAULT_POLICY)
    assert plan.policy == DEFAULT_POLICY == "chrion"
    assert inspect.signature(chrion.partition).parameters["policy"].default == PlanOptions().policy == DEFAULT_POLICY


def test_the_initial_solution_is_no_remark(graph: Graph, profile: Profile) -> None:
    """A plan names where its schedule comes from, but no remark does."""
    plan = partition(graph, profile)
    assert plan.origin
    assert plan.remarks == ()
    assert partition(graph, profile, policy="heft").origin == "heft"


def test_a_plan_is_searched_for_only_if_more_than_latency_decides(caplog: pytest.LogCaptureFixture) -> None:
    """An SLO that no plan can meet and alpha 0 give the plan without limits; an SLO that can be met is searched for."""
    size = 240
    nodes = [node("Neg", ["x"], [f"y{i}"], name=f"neg{i}") for i in range(size)]
    wide = load(make_model(nodes, [value("x", FLOAT, [4])], [value(f"y{i}", FLOAT, [4]) for i in range(size)]))
    costs = {signature: OperatorCost("Neg", (1.0, 1.0), 0.5) for signature in wide.dag.signatures}
    measured = Profile(MACHINE, 2, "CPUExecutionProvider", costs, CopyCost(0.0, 0.0), CopyCost(0.0, 0.0))
    fastest = partition(wide, measured)
    caplog.set_level("INFO", "chrion")
    for slo, alpha in ((1.0, None), (1.0, 0.3), (1000.0, 0.0), (None, 0.0)):
        assert partition(wide, measured, slo, alpha).schedule == fastest.schedule
        assert ["no search, since HEFT" in record.message for record in caplog.records] == [True], (slo, alpha)
        caplog.clear()
    partition(wide, measured, 1000.0)
    assert not any("no search, since HEFT" in record.message for record in caplog.records)


@pytest.mark.parametrize(("notes", "expected"), [((), "resident"), (("from a paper",), "paper")])
def test_alpha_prices_measured_memory_where_there_is_any(
    graph: Graph, profile: Profile, notes: tuple[str, ...], expected: str
) -> None:
    """Without a choice, alpha prices resident memory if the profile was measured, and else that of Equation 4."""
    found = replace(profile, notes=notes, accelerator="CPUExecutionProvider")
    assert partition(graph, found, alpha=0.1).memory == expected
    for memory in MEMORIES:
        assert partition(graph, found, alpha=0.1, memory=memory).memory == memory


def test_alpha_that_changes_nothing_is_a_remark_with_the_reason(graph: Graph, profile: Profile) -> None:
    """The reason is the price from which another plan is preferred, the policy, or that there is no accelerator."""
    free = partition(graph, profile)
    (remark,) = partition(graph, profile, alpha=1e-9).remarks
    price = float(re.fullmatch(r"alpha changes nothing: .* are preferred from ([0-9.e+-]+) ms/MB on", remark)[1])  # type: ignore[index]
    assert partition(graph, profile, alpha=price * 0.99).predicted == free.predicted
    larger = partition(graph, profile, alpha=price * 1.01)
    assert larger.predicted.resident_mb < free.predicted.resident_mb
    assert larger.remarks == ()
    assert partition(graph, profile, alpha=1.0, policy="peft").remarks == (
        "alpha changes nothing: policy peft does not weigh memory",
    )
    alone = replace(profile, accelerator=None)
    assert partition(graph, alone, alpha=1.0).remarks == ("alpha changes nothing: there is no accelerator",)


def test_a_plan_is_compared_with_the_measured_plain_session(graph: Graph, profile: Profile) -> None:
    """A plan that is predicted to lose to it says so, by how much, and what to use; one that wins says nothing."""
    fastest_ms = partition(graph, profile).predicted.latency_ms
    for plain_ms, remarks in ((fastest_ms * 2, []), (fastest_ms, []), (fastest_ms / 1.25, ["25 % slower"])):
        plain = {graph.digest: PlainLatency(1, plain_ms)}
        plan = partition(graph, replace(profile, plain=plain))
        assert plan.cpu_only == Prediction(plain_ms, 0.0, 0.0)
        assert (plan.cpu_only_measured, plan.cpu_only_cores) == (True, 1)
        assert [remark.partition(" than plain")[0][-11:] for remark in plan.remarks] == remarks
    other = partition(graph, replace(profile, plain={"another graph": PlainLatency(1, 0.0)}))
    assert not other.cpu_only_measured
    wide = partition(graph, replace(profile, plain={graph.digest: PlainLatency(2, 0.0)}), cores=1)
    assert not wide.cpu_only_measured  # it would use more cores than the plan may


def test_operators_are_counted_with_the_chunk_length() -> None:
    """Two layers on two cores overlap only in chunks; the plan names their length beside its operators."""
    graph = load(build("lstm", {"layers": 2, "seq": 32, "batch": 1, "io": 8, "chunk": 32}))
    costs = {}
    for variant in [graph, *(unroll(graph, chunk) for chunk in chunk_choices(graph))]:
        for signature, op_type, size in zip(
            variant.dag.signatures, variant.dag.op_types, variant.dag.input_bytes, strict=True
        ):
            costs[signature] = OperatorCost(op_type, (size / 1e3, size / 1e3) if op_type == "LSTM" else (0.0, 0.0))
    plan = partition(graph, Profile(MACHINE, 2, None, costs))
    assert plan.chunk is not None
    counts = f"{len(plan.operators)} operators ({len(graph.dag)} in the model"
    assert plan.operator_counts == f"{counts}; recurrent layers in chunks of {plan.chunk} steps)"
    assert plan.remarks == ()


def test_segments_last_as_long_as_their_lanes_are_busy(graph: Graph, profile: Profile) -> None:
    """The predicted times of a lane's segments add up to its busy time, with their dispatches."""
    for policy in ("chrion", "heft"):
        plan = partition(graph, replace(profile, dispatch_ms=0.25), policy=policy)
        for lane in set(plan.schedule.lanes):
            own = [at for at, segment in enumerate(plan.segments) if lane in plan.schedule.occupied(segment[0])]
            spans = (plan.segment_ms[at] for at in own)
            assert sum(end - start for start, end in spans) == pytest.approx(plan.busy_ms[lane])


def test_limits_that_no_plan_keeps_are_remarks(graph: Graph, profile: Profile) -> None:
    """The remarks contain the latency and the memory that exceed the SLO and the budget."""
    plan = partition(graph, profile, slo="1us")
    assert not plan.meets_slo
    assert plan.remarks[-1].startswith("no plan meets the SLO of 1.00 us: the fastest takes ")
    plan = partition(graph, profile, policy="accelerator", gpu_budget="1B")
    assert not plan.meets_budget
    assert plan.remarks[-1].startswith("no plan of this policy fits the GPU budget of ")
    assert "the smallest holds " in plan.remarks[-1]


def test_a_budget_below_the_base_memory_is_a_remark(graph: Graph, profile: Profile) -> None:
    """A plan on the CPU alone says that no use of the accelerator fits the budget, and only then."""
    based = replace(profile, base_memory_mb=345.0)
    plan = partition(graph, based, gpu_budget="100MB")
    assert plan.accelerator is None
    assert plan.remarks[-1].startswith(
        "the GPU budget of 100.0 MB excludes the accelerator: any use of it takes 345.0 MB"
    )
    assert not any("excludes" in remark for remark in partition(graph, based, gpu_budget="345MB").remarks)


def test_values_that_wait_for_their_copies_count_in_the_budget() -> None:
    """Four results that only the CPU reads have a buffer each, as its input has; an arena would hold one at a time."""
    kinds = ["Sin", "Cos", "Tanh", "Exp"]
    size, n = 64 * 64 * 4, len(kinds)
    nodes = [node(kind, ["x"], [f"a{i}"], name=kind) for i, kind in enumerate(kinds)]
    nodes += [node("Neg", [f"a{i}"], [f"y{i}"], name=f"neg{i}") for i in range(n)]
    outputs = [value(f"y{i}", FLOAT, [64, 64]) for i in range(n)]
    graph = load(make_model(nodes, [value("x", FLOAT, [64, 64])], outputs))
    costs = {
        signature: OperatorCost(op_type, (1.0, 1.0), None if op_type == "Neg" else 0.01)
        for signature, op_type in zip(graph.dag.signatures, graph.dag.op_types, strict=True)
    }
    profile = Profile(MACHINE, 2, "CPUExecutionProvider", costs, CopyCost(0.0, 0.0), CopyCost(0.0, 0.0))
    free = partition(graph, profile)
    assert free.on_accelerator == n
    assert free.predicted.frame_mb == free.predicted.resident_mb == (n + 1) * size / 1e6
    planner = Planner(graph, profile)
    for buffers in range(n + 2):
        plan = planner.plan(Limits(None, buffers * size / 1e6))
        assert plan.meets_budget
        assert plan.on_accelerator < max(1, buffers)
    assert plan.on_accelerator == n


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -1.0}, "alpha: expected a number of ms per MB, 0 or more, found -1.0"),
        ({"alpha": float("nan")}, "alpha: expected a number of ms per MB, 0 or more, found nan"),
        ({"policy": "hefty"}, "unknown policy 'hefty'"),
        ({"streams": 0}, "streams: expected 1 or more, found 0"),
        ({"meter": lambda *_: None}, "policy chrion measures no stages .choose policy ios"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, object], message: str) -> None:
    """Invalid options are refused with a message that says what was expected."""
    with pytest.raises(OptionError, match=message):
        PlanOptions(**options)  # type: ignore[arg-type]


def test_a_policy_of_a_package_plans(
    graph: Graph, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package's policy is selected by name, and limits apply as for any policy."""
    policy_installer(tmp_path, monkeypatch)("last-core", "last-core = last_core:last_core")
    plan = partition(graph, profile, policy="last-core", slo="1s", gpu_budget="1MB")
    assert plan.policy == "last-core"
    assert set(plan.schedule.lanes) == {2}
    assert plan.meets_slo
    assert plan.meets_budget
