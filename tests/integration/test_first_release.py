"""Tests that files of the first release are read with the same meaning.

``tests/data/first_release`` holds two models, a profile of each, and a plan from that profile: one that cuts recurrent
operators into chunks for two cores, and one for an accelerator. Times in the profiles are twenty times those measured,
so that plans for such small models have several lanes.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from chrion import HybridSession, Plan, load, partition
from chrion.errors import InputError, PlanError, ProfileError
from chrion.profiler import Profile
from helpers import assert_same_as_plain

FIRST = Path(__file__).parent.parent / "data" / "first_release"
MODELS = ("branches", "lstm")


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_is_read_and_executed(name: str) -> None:
    """The plan runs on its lanes and with its chunks, and gives correct outputs."""
    model, file = FIRST / f"{name}.onnx", FIRST / f"{name}.plan.json"
    written = json.loads(file.read_text())
    with HybridSession(model, plan=file) as session:
        plan = session.plan
        assert plan is not None
        assert list(plan.schedule.lanes) == written["lanes"]
        assert [list(s) for s in plan.segments] == written["segments"]
        assert (plan.chunk, plan.accelerator) == (written["chunk"], written["accelerator"])
        assert plan.predicted.latency_ms == written["predicted"]["latency_ms"]
        (info,) = session.get_inputs()
        x = np.random.default_rng(0).standard_normal(info.shape).astype(np.float32)
        assert_same_as_plain(session, str(model), {info.name: x})


@pytest.mark.parametrize("name", MODELS)
def test_a_profile_is_read_and_used_for_planning(name: str) -> None:
    """The profile's signatures are those of the model's operators, so that no cost is estimated."""
    graph, profile = load(FIRST / f"{name}.onnx"), Profile.load(FIRST / f"{name}.profile.json")
    written = json.loads((FIRST / f"{name}.profile.json").read_text())
    assert {s: list(o.cpu_ms) for s, o in profile.operators.items()} == {
        s: o["cpu_ms"] for s, o in written["operators"].items()
    }
    assert profile.missing(graph.dag) == ()
    assert partition(graph, profile, alpha=0.0).estimated == 0


@pytest.mark.parametrize(("kind", "error"), [("plan", PlanError), ("profile", ProfileError)])
@pytest.mark.parametrize(
    ("schema", "way"),
    [
        ("chrion.{}/3", "upgrade Chrion"),
        ("chrion.{}/0", "create the file again"),
        ("chrion.other/1", "create the file again"),
        (None, "create the file again"),
    ],
)
def test_other_schemas_are_refused_with_the_schema_hint(
    tmp_path: Path, kind: str, error: type[InputError], schema: str | None, way: str
) -> None:
    """Files of newer, older and other schemas are refused with a hint."""
    content = json.loads((FIRST / f"lstm.{kind}.json").read_text())
    content["schema"] = schema and schema.format(kind)
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content))
    read = Plan.load if kind == "plan" else Profile.load
    with pytest.raises(error, match=rf"file\.json.*expected.*chrion\.{kind}/1.*{way}"):
        read(path)


def test_a_plan_of_another_model_is_refused() -> None:
    """The error says what differs and how to create a new plan."""
    with pytest.raises(PlanError, match=r"does not fit.*chrion partition"):
        HybridSession(FIRST / "branches.onnx", plan=FIRST / "lstm.plan.json")
