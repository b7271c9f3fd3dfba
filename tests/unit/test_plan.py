"""Plan files: round trips, and refusal of damaged files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion import ChrionError, Plan
from chrion.errors import PlanError
from chrion.graph import Dag
from chrion.graph.segments import cut
from chrion.scheduler import Prediction, Schedule, evaluate
from helpers import MACHINE
from strategies import costs_for, dags, schedules

NAN, INFINITE = float("nan"), float("inf")


def plan_of(dag: Dag, schedule: Schedule, **fields: Any) -> Plan:
    """Return a plan with a schedule."""
    segments = cut(dag, schedule.order, schedule.lanes, stages=schedule.stages, widths=schedule.widths)
    return Plan(
        **{
            "model": "model",
            "digest": "0" * 32,
            "shapes": {"x": (1, 2), "s": ()},
            "chunk": None,
            "policy": "chrion-paper",
            "alpha": 0.25,
            "slo_ms": 60.0,
            "budget_mb": 600.0,
            "accelerator": None,
            "machine": MACHINE,
            "estimated": 1,
            "schedule": schedule,
            "operators": dag.names,
            "segments": segments,
            "segment_ms": tuple((0.5, 1.5) for _ in segments),
            "predicted": Prediction(1.5, 2.5, 2.5),
            "busy_ms": (0.0, 1.0, 2.0),
            "lower_bound_ms": 1.0,
            "accelerator_only": Prediction(3.0, 4.0, 4.0),
            "cpu_only": None,
            "remarks": ("a remark, with “quotes”",),
            **fields,
        }
    )


DAG = Dag.from_edges(4, [(0, 1), (1, 2), (0, 3)])
PLAN = plan_of(DAG, Schedule((0, 1, 2, 3), (1, 1, 2, 1), 2))


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    """The plan read equals the plan written, field by field."""
    PLAN.save(tmp_path / "p.json")
    assert Plan.load(tmp_path / "p.json") == PLAN


@given(data=st.data())
def test_any_plan_survives_its_file(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Plans with random schedules and predictions are read as they were written."""
    dag = data.draw(dags())
    costs = data.draw(costs_for(dag, wide=data.draw(st.booleans())))
    schedule = data.draw(schedules(dag, costs, most_streams=3, staged=None))
    timeline = evaluate(dag, costs, schedule)
    busy = timeline.busy_ms
    plan = plan_of(
        dag, schedule, predicted=Prediction(timeline.latency_ms, timeline.memory_mb, timeline.memory_mb), busy_ms=busy
    )
    path = tmp_path_factory.mktemp("plans") / "p.json"
    plan.save(str(path))
    assert Plan.load(str(path)) == plan


def test_counts_and_verdict() -> None:
    """Operators are counted by device; a latency equal to the SLO meets it."""
    plan = plan_of(DAG, Schedule((0, 1, 2, 3), (0, 0, 1, 0), 1))
    assert (plan.on_accelerator, plan.on_cpu) == (3, 1)
    assert replace(plan, slo_ms=1.5).meets_slo
    assert not replace(plan, slo_ms=1.4999).meets_slo
    assert replace(plan, slo_ms=None).meets_slo


def test_the_repr_of_a_plan_is_one_line() -> None:
    """It has the model, the policy, the predicted latency, and the memory if the plan uses an accelerator."""
    plan = replace(PLAN, model="lstm", policy="heft", predicted=Prediction(32.99, 1069.3, 348.2), memory="paper")
    assert repr(replace(plan, accelerator="SomeExecutionProvider")) == "<Plan of lstm: heft, 33.0 ms, 1069.3 MB>"
    assert repr(replace(plan, accelerator=None)) == "<Plan of lstm: heft, 33.0 ms>"


#: Keys that a plan file need not have.
OPTIONAL = (
    "remarks",
    "streams",
    "stages",
    "widths",
    "merged",
    "budget_mb",
    "memory",
    "origin",
    "off_accelerator",
    "cpu_only_cores",
    "cpu_only_measured",
    "model_operators",
    "native",
    "priced",
    "trees",
    "uncut",
    "packed_mb",
    "precision",
    "expected_error",
)


def test_a_missing_key_is_refused(tmp_path: Path) -> None:
    """A plan file needs all keys that have no default."""
    for missing in PLAN.to_json().keys() - set(OPTIONAL):
        content = {key: value for key, value in PLAN.to_json().items() if key != missing}
        assert_refused(tmp_path, json.dumps(content), missing)


def test_a_file_of_the_required_keys_is_read() -> None:
    """Without the others, a plan has one accelerator lane, no stages, no budget and no remarks."""
    content = {key: value for key, value in PLAN.to_json().items() if key not in OPTIONAL}
    assert Plan.from_json(content) == replace(PLAN, budget_mb=None, remarks=())


#: Values of the wrong type, out of range, or in contradiction to each other.
DAMAGED_VALUES = [
    ("schema", "chrion.plan/0"),
    ("memory", "some"),
    ("memory", None),
    ("precision", "half"),
    ("merged", 7),
    ("merged", [7]),
    ("streams", 0),
    ("streams", "2"),
    ("widths", [1, 1, 1]),
    ("widths", [1, 1, 1, 0]),
    ("widths", [1, 1, 2, 1]),
    ("widths", [3, 3, 1, 1]),
    ("widths", [2, 1, 1, 1]),
    ("widths", [1, 1, 1, "1"]),
    ("stages", [0, 0, 0]),
    ("stages", [0, 1, 1, 0]),
    ("stages", [1, 1, 0, 0]),
    ("stages", [0, 0, 0, "1"]),
    ("schema", None),
    ("cores", "2"),
    ("cores", 2.5),
    ("cores", -1),
    ("cores", 1),
    ("cores", INFINITE),
    ("alpha", "much"),
    ("alpha", NAN),
    ("alpha", -1),
    ("slo_ms", NAN),
    ("slo_ms", "60ms"),
    ("budget_mb", NAN),
    ("budget_mb", "600MB"),
    ("budget_mb", -1),
    ("estimated", "some"),
    ("estimated", INFINITE),
    ("shapes", [1, 2]),
    ("shapes", {"x": ["a"]}),
    ("machine", {}),
    ("machine", 7),
    ("machine", None),
    ("predicted", 7),
    ("operators", 7),
    ("operators", ["0", "1", "2"]),
    ("order", [0, 1, 2]),
    ("order", [0, 1, 2, 2]),
    ("order", [0, 1, 2, 4]),
    ("order", [0, 1, 2, 3.0]),
    ("order", "0123"),
    ("lanes", [1, 1, 2]),
    ("lanes", [1, 1, 3, 1]),
    ("lanes", [1, 1, -1, 1]),
    ("lanes", [1, 1, "2", 1]),
    ("lanes", [1, 1, True, 1]),
    ("segments", [[0, 1], [2]]),
    ("segments", [[0, 1], [2, 3]]),
    ("segments", [[0, 1, 2, 3], []]),
    ("segments", [0, 1, 2, 3]),
    ("segment_ms", [[0.0, 1.0]]),
    ("segment_ms", [[0.0, NAN]] * 3),
    ("segment_ms", [[-1.0, 1.0]] * 3),
    ("segment_ms", [[0.0, "1"]] * 3),
    ("segment_ms", [[0.0]] * 3),
    ("remarks", 7),
]


def test_a_damaged_value_is_refused(tmp_path: Path) -> None:
    """A plan file in which one value is invalid is refused."""
    for key, value in DAMAGED_VALUES:
        assert_refused(tmp_path, json.dumps(PLAN.to_json() | {key: value}), f"{key} = {value!r}")


def test_a_damaged_prediction_is_refused(tmp_path: Path) -> None:
    """Predictions that are infinite, negative or not numbers are refused."""
    for key, value in itertools.product(("latency_ms", "memory_mb"), (NAN, INFINITE, -0.5, "1", None, True, [1.0])):
        content = PLAN.to_json()
        content["predicted"][key] = value
        assert_refused(tmp_path, json.dumps(content), f"{key} = {value!r}")


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda _: "",
        lambda _: "[]",
        lambda _: "null",
        lambda _: "not json",
        lambda text: b"\x80" + text.encode(),
    ],
)
def test_a_file_without_a_plan_is_refused(tmp_path: Path, damage: Callable[[str], str | bytes]) -> None:
    """Truncated and empty files, other types of JSON, and files that are not text are refused."""
    assert_refused(tmp_path, damage(json.dumps(PLAN.to_json())))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    """The message says that the path cannot be read."""
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(PlanError, match="cannot be read"):
            Plan.load(path)


def assert_refused(tmp_path: Path, content: str | bytes, case: str = "") -> None:
    """Assert that the file is refused with an error that names it."""
    path = tmp_path / "damaged.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PlanError, match=r"damaged\.json") as caught:
        pytest.fail(f"{case}: the file was read as {Plan.load(path)}")
    assert isinstance(caught.value, ChrionError)
