"""Profiles estimated from datasheets, and their correction by measured operators."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import chrion
from chrion.errors import HardwareError, ProfileError
from chrion.graph.work import node_work
from chrion.hardware import hardware
from chrion.profiler import OperatorCost, Profile
from chrion.profiler.datasheet import KERNELS
from chrion.profiler.hardware_profile import estimate_profile
from chrion.scheduler import Plan, partition
from chrion.zoo import build
from helpers import FLOAT, MACHINE, make_model, node, value

L4 = hardware("l4+epyc-16")


def branches() -> onnx.ModelProto:
    """Build two large products that are added, and the shape of the result."""
    weights = {f"w{i}": np.zeros((512, 2048), np.float32) for i in range(2)}
    nodes = [node("MatMul", ["x", f"w{i}"], [f"p{i}"], name=f"m{i}") for i in range(2)]
    nodes += [node("Add", ["p0", "p1"], ["y"], name="a"), node("Shape", ["y"], ["s"], name="s")]
    outputs = [value("y", FLOAT, [64, 2048]), value("s", onnx.TensorProto.INT64, [2])]
    return make_model(nodes, [value("x", FLOAT, [64, 512])], outputs, weights)


def test_an_operator_on_an_accelerator_by_hand() -> None:
    """A product of 64 rows: 134 MFLOP at 60 TFLOPS take 2.2 us, 4.8 MB at 300 GB/s 16.2 us; 3.8 us for the launch."""
    graph = chrion.load(branches(), optimise=False)
    costs = estimate_profile(graph, L4, 2).costs(graph.dag)
    at = graph.dag.names.index("m0")
    moved = 4 * (64 * 512 + 512 * 2048 + 64 * 2048)
    by_memory = moved / 300e9 * 1e3
    assert by_memory > 2 * 64 * 512 * 2048 / 60e12 * 1e3
    node_ms = KERNELS.node_cycles / 3.7e6  # on the host, whose clock is 3.7 GHz
    assert costs.accelerator_ms is not None
    assert costs.accelerator_ms[at] == pytest.approx(by_memory + 0.0038 + node_ms)
    assert math.isinf(costs.accelerator_ms[graph.dag.names.index("s")])


def test_an_operator_on_a_processor_by_hand() -> None:
    """The same product: 134 MFLOP at 3.7 GHz with 32 operations a cycle, of which 88 % at 64 / 67.4 are reached."""
    graph = chrion.load(branches(), optimise=False)
    costs = estimate_profile(graph, L4, 1).costs(graph.dag)
    share = KERNELS.product_efficiency * 64 / (64 + KERNELS.half_rows)
    expected = 2 * 64 * 512 * 2048 / (3.7e6 * 32 * share) + KERNELS.node_cycles / 3.7e6
    assert costs.cpu_ms[0][graph.dag.names.index("m0")] == pytest.approx(expected)


def test_copies_and_the_machine_are_those_of_the_parts() -> None:
    """PCI Express 4.0 with 31.5 GB/s, 76 % of it, and 10 us; 16 cores of an EPYC 9124."""
    graph = chrion.load(branches(), optimise=False)
    profile = estimate_profile(graph, L4)
    assert profile.upload == profile.download
    assert profile.upload.ms(10**9) == pytest.approx(0.01 + 1e3 / (31.5 * 0.76))
    assert (profile.cores, profile.accelerator) == (16, "CUDAExecutionProvider")
    assert profile.cache_bytes == 1 << 20
    assert str(profile.machine) == "AMD EPYC 9124, 16 cores, NVIDIA L4, estimated from datasheets"
    alone = estimate_profile(graph, hardware("epyc-16"))
    assert alone.accelerator is None
    assert alone.handoff_ms < profile.handoff_ms


@pytest.mark.usefixtures("short_planning")
def test_every_operator_of_every_variant_has_a_cost_and_counts_as_estimated(tmp_path: Path) -> None:
    """Chunks of recurrent operators are among them; plans and stored profiles keep the mark."""
    graph = chrion.load(build("lstm", {"layers": 1, "seq": 2, "chunk": 2, "io": 16, "batch": 1}))
    profile = estimate_profile(graph, L4, 2)
    assert profile.missing(graph.dag) == tuple(range(len(graph.dag)))
    plan = partition(graph, profile)
    planned = plan.apply(graph)
    assert set(planned.dag.signatures) <= profile.operators.keys()
    assert plan.estimated == len(planned.dag)
    assert plan.machine.hardware == "l4+epyc-16"
    plan.save(tmp_path / "p.json")
    assert Plan.load(tmp_path / "p.json").machine == plan.machine
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json").machine.hardware == "l4+epyc-16"


def test_more_cores_take_less_time_together_and_no_less_alone() -> None:
    """Wide times fall with the width for a large product; times of busy cores do not fall with their number."""
    graph = chrion.load(branches(), optimise=False)
    cost = estimate_profile(graph, L4).operators[graph.dag.signatures[0]]
    assert list(cost.by_width) == [2, 4, 8, 16]
    wide = list(cost.wide_ms)
    assert wide == sorted(wide, reverse=True)
    assert wide[0] < cost.cpu_ms[0]
    assert list(cost.cpu_ms) == sorted(cost.cpu_ms)


def test_an_estimated_machine_is_not_the_measured_one() -> None:
    """Fingerprints differ, so that estimated costs never count as measured; without the mark they are as before."""
    names = ("accelerator", "cores", "cpu", "memory_mb", "onnxruntime", "system")
    facts = {name: getattr(MACHINE, name) for name in names} | {"memory_mb": round(MACHINE.memory_mb / 1000)}
    assert MACHINE.fingerprint == hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    assert replace(MACHINE, hardware="l4").fingerprint != MACHINE.fingerprint


def test_machines_that_cannot_be_planned_for_are_refused() -> None:
    """A machine needs a processor, and as many cores as are asked for."""
    graph = chrion.load(branches(), optimise=False)
    with pytest.raises(HardwareError, match="a processor is missing"):
        estimate_profile(graph, hardware("l4"))
    with pytest.raises(HardwareError, match="expected 1 to 16, the cores of epyc-16, found 17"):
        estimate_profile(graph, L4, 17)


def measured(estimated: Profile, operators: dict[str, OperatorCost]) -> Profile:
    """Return a profile that counts as measured, of a few operators."""
    return replace(estimated, machine=MACHINE, operators=operators)


def test_corrections_find_the_factors_of_a_machine() -> None:
    """On a machine twice as slow as estimated on its cores and thrice on its accelerator, the corrected costs agree.

    The operator that was measured has its measured times; the others come close.
    """
    graph = chrion.load(branches(), optimise=False)
    estimated = estimate_profile(graph, L4, 2)
    truth = {
        signature: replace(
            each,
            cpu_ms=tuple(2 * ms for ms in each.cpu_ms),
            accelerator_ms=None if each.accelerator_ms is None else 3 * each.accelerator_ms,
        )
        for signature, each in estimated.operators.items()
    }
    assert len(truth) == 3
    one = graph.dag.signatures[0]
    few = {signature: truth[signature] for signature in graph.dag.signatures if signature != one}
    corrected = estimate_profile(graph, L4, 2, corrections=measured(estimated, few))
    for signature, each in corrected.operators.items():
        # The product is the only operator of its type, and the only one that is bound by arithmetic on the cores.
        near = 0.01 if signature in few else 0.55
        assert each.cpu_ms == pytest.approx(truth[signature].cpu_ms, rel=near)
        if each.accelerator_ms is not None:
            assert each.accelerator_ms == pytest.approx(truth[signature].accelerator_ms, rel=near)
    assert corrected.machine.hardware == "l4+epyc-16, corrected by 2 measured operators"
    assert corrected.missing(graph.dag)
    alone = estimate_profile(graph, L4, 2, corrections=measured(estimated, {one: truth[one]}))
    assert alone.operators[one].cpu_ms == pytest.approx(truth[one].cpu_ms)
    assert alone.machine.hardware == "l4+epyc-16, corrected by 1 measured operator"


def test_estimates_do_not_correct_estimates() -> None:
    """A profile that is itself estimated is refused."""
    graph = chrion.load(branches(), optimise=False)
    with pytest.raises(ProfileError, match="estimated, not measured"):
        estimate_profile(graph, L4, 2, corrections=estimate_profile(graph, L4, 2))


def test_corrections_need_a_common_operator() -> None:
    """A profile of another model corrects nothing."""
    graph = chrion.load(branches(), optimise=False)
    estimated = estimate_profile(graph, L4, 2)
    with pytest.raises(ProfileError, match="none of the model's operators"):
        estimate_profile(graph, L4, 2, corrections=measured(estimated, {"other": OperatorCost("MatMul", (1.0,))}))


def test_the_zoo_has_no_operator_without_work() -> None:
    """Every node of a small model of each kind moves bytes, and its products are counted."""
    transformer = {"layers": 1, "hidden": 16, "heads": 2, "inner": 32, "seq": 6, "vocabulary": 20}
    for name, parameters in (
        ("deepfm", {"batch": 2, "vocabulary": 20, "hidden": 16}),
        ("squeezenet", {"resolution": 64, "width": 0.1, "classes": 7}),
        ("t5", {**transformer, "target": 5}),
        ("bert", transformer),
    ):
        graph = chrion.load(build(name, parameters))
        for each in graph.model.graph.node:
            found = node_work(each, graph.values)
            assert found.traffic > 0, each.op_type
            assert bool(found.products) == (each.op_type in {"Conv", "MatMul", "Gemm"}), each.op_type
