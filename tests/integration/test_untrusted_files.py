"""Tests of damaged and malicious files: every reader refuses them with one line and has no other effect."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from chrion import HybridSession, Plan, Profile, load
from chrion.common.files import bundled_folder
from chrion.errors import InputError, ModelError, PlanError, ProfileError, ScenarioError, UnsafeModelError
from chrion.profiler.cache import MeasurementCache
from chrion.profiler.profiles import OperatorCost
from chrion.runtime.selection.decisions import Decision, DecisionCache
from chrion.scheduler.fixed_placement import fixed_plan
from chrion.serving.simulator.scenario import find_scenario
from chrion.serving.simulator.traces import read_trace
from chrion.zoo import RecurrentSpec, build_recurrent
from damaged_files import damaged_bytes, damaged_json
from helpers import FLOAT, alternating_lanes, assert_equal, branches, make_model, node, run_plain, value
from property_tests import examples
from seams.execution import limit

SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
OFTEN = examples(150, suppress_health_check=SLOW)
GRAPH = load(branches())
PLAN = json.loads(json.dumps(fixed_plan(GRAPH, alternating_lanes(GRAPH)).to_json()))
PROFILE = {
    **json.loads((bundled_folder("profiles") / "gtx1080ti-paper.json").read_bytes()),
    "notes": ["short"],
}
TRACES = {
    "csv": b"time_s,model\n0.5,a\n1.25,b\n1.25,a\n",
    "azure-functions-2019": b"HashOwner,HashApp,HashFunction,Trigger,1,2,3\no,a,f,http,1,0,2\no,a,g,timer,0,0,1\n",
    "azure-llm-2023": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    b"2023-11-16 18:15:50.9951690,396,109\n",
}
SCENARIO = b"""
seed = 3
patterns = ["gpu", "cpu"]
[[servers]]
gpu_memory_gb = 8
count = 2
[policies]
eviction = "lru"
routing = "resident-first"
[workload]
rate_per_s = 5.0
requests = 40
[[models]]
name = "a"
[models.variants.gpu]
latency_ms = 50
memory_mb = 1000
[models.variants.cpu]
latency_ms = 90
cpu_busy_ms = 90
cores = 1
memory_mb = 0
"""


def refused_or_read(read: Callable[[Path], object], content: bytes, path: Path) -> bool:
    """Return whether a reader accepts a file; it must raise no other exception than one with a single line."""
    path.write_bytes(content)
    try:
        read(path)
    except InputError as error:
        message = error.message
    else:
        return True
    assert message
    assert "\n" not in message
    return False


def plan_and_graph(path: Path) -> None:
    """Read a plan and check that it fits the model."""
    Plan.load(path).apply(GRAPH)


def profile_and_costs(path: Path) -> None:
    """Read a profile and estimate costs with it."""
    Profile.load(path).costs(GRAPH.dag)


# Readers.


@OFTEN
@given(content=st.one_of(damaged_json(PLAN), damaged_bytes(json.dumps(PLAN).encode())))
def test_damaged_plans(tmp_path: Path, content: bytes) -> None:
    """A damaged plan is refused, does not fit the model, or can be executed."""
    refused_or_read(plan_and_graph, content, tmp_path / "plan.json")


@OFTEN
@given(content=st.one_of(damaged_json(PROFILE), damaged_bytes(json.dumps(PROFILE).encode())))
def test_damaged_profiles(tmp_path: Path, content: bytes) -> None:
    """A damaged profile is refused or gives costs."""
    refused_or_read(profile_and_costs, content, tmp_path / "profile.json")


@OFTEN
@given(content=damaged_bytes(SCENARIO))
def test_damaged_scenarios(tmp_path: Path, content: bytes) -> None:
    """A damaged scenario is refused or can be built."""
    refused_or_read(lambda path: find_scenario(str(path)).build(), content, tmp_path / "s.toml")


@pytest.mark.parametrize("kind", TRACES)
@OFTEN
@given(data=st.data())
def test_damaged_traces(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    """A damaged trace is refused or read."""
    content = data.draw(damaged_bytes(TRACES[kind]))
    path = tmp_path / "trace.csv"
    path.unlink(missing_ok=True)
    refused_or_read(lambda path: read_trace(kind, path), content, path)


def test_undamaged_files_are_read(tmp_path: Path) -> None:
    """The files that the other tests damage are valid."""
    assert refused_or_read(plan_and_graph, json.dumps(PLAN).encode(), tmp_path / "p")
    assert refused_or_read(profile_and_costs, json.dumps(PROFILE).encode(), tmp_path / "q")
    assert refused_or_read(lambda path: find_scenario(str(path)).build(), SCENARIO, tmp_path / "s.toml")
    load(recurrent())
    for kind, content in TRACES.items():
        assert refused_or_read(lambda path, kind=kind: read_trace(kind, path), content, tmp_path / kind)


@pytest.mark.parametrize(("read", "failure"), [(Plan.load, PlanError), (Profile.load, ProfileError)])
def test_deeply_nested_json(tmp_path: Path, read: Callable[[Path], object], failure: type[InputError]) -> None:
    """Deeply nested JSON is refused before the stack overflows."""
    path = tmp_path / "deep.json"
    path.write_text('{"schema":' + "[" * 200_000)
    with pytest.raises(failure, match="not JSON: nested too deep"):
        read(path)


def test_deeply_nested_toml(tmp_path: Path) -> None:
    """Deeply nested TOML is refused before the stack overflows."""
    assert not refused_or_read(lambda p: find_scenario(str(p)), b"a = " + b"[" * 200_000, tmp_path / "deep.toml")


def test_endless_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading stops at the size limit of the kind of file."""
    limit(monkeypatch, "bytes of a model", 1 << 20)
    zero = Path("/dev/zero")
    with pytest.raises(PlanError, match="File too large"):
        Plan.load(zero)
    with pytest.raises(ModelError, match="more than 2 GB"):
        load(zero)
    with pytest.raises(ScenarioError, match="not a regular file"):
        read_trace("csv", zero)


# Models.


def recurrent() -> bytes:
    """Return a small model with weights, chunks and several layers."""
    return bytes(build_recurrent(RecurrentSpec(layers=2, batch=1, io=3, seq=4, chunk=2)).SerializeToString())


def test_a_model_whose_name_is_not_valid_text() -> None:
    """A session runs a model with an invalid name, as onnxruntime does."""
    model, x = branches(), np.ones((2, 4), np.float32)
    damaged = model.SerializeToString().replace(b"tiny", b"t\xffny")
    with HybridSession(damaged) as session:
        assert_equal(session.run(None, {"x": x}), run_plain(model, {"x": x}))
        assert not session.get_modelmeta().graph_name


# Files that a model names.


def weights_elsewhere(location: str) -> onnx.ModelProto:
    """Return a model whose only weight is in another file."""
    weight = TensorProto(name="w", data_type=FLOAT, dims=[1000], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value=location)
    model = make_model([node("Add", ["x", "w"], ["y"])], [value("x", FLOAT, [1000])], [value("y", FLOAT, [1000])])
    model.graph.initializer.append(weight)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model's folder; links in it lead to a folder with a secret file next to it."""
    secret, own = tmp_path / "secret", tmp_path / "models"
    for made in (secret, own):
        made.mkdir()
        np.ones(1000, np.float32).tofile(made / "w.bin")
    (own / "link.bin").symlink_to("../secret/w.bin")
    (own / "linked").symlink_to("../secret")
    (own / "circle").symlink_to("circle")
    (own / "inner.bin").symlink_to("w.bin")
    return own


@pytest.mark.parametrize(
    "location",
    [
        "../secret/w.bin",
        "sub/../../secret/w.bin",
        "..\\secret\\w.bin",
        "C:\\secret\\w.bin",
        "/etc/passwd",
        "/dev/zero",
        "link.bin",
        "linked/w.bin",
        "circle",
        "a\0b",
        "*/_ORT_MEM_ADDR_/*",
    ],
)
def test_weights_outside_the_folder_are_refused(folder: Path, location: str) -> None:
    """Absolute paths, paths and links that leave the folder, and URLs are refused with the name of the weight."""
    path = folder / "m.onnx"
    onnx.save(weights_elsewhere(location), path)
    for read in (load, HybridSession):
        with pytest.raises(UnsafeModelError, match="weight 'w' is outside"):
            read(path)


@pytest.mark.parametrize("location", ["../secret/w.bin", "/nowhere/w.bin"])
def test_weights_that_options_hold_need_no_file(location: str) -> None:
    """A model in memory whose weights are in memory is served; without them it is refused."""
    model, weight = weights_elsewhere(location).SerializeToString(), np.ones(1000, np.float32).tobytes()
    options = ort.SessionOptions()
    options.add_external_initializers_from_files_in_memory([location], [weight], [len(weight)])
    for mode in ("never", "now"):
        with HybridSession(model, options, tune=mode) as session:
            assert_equal(session.run(None, {"x": np.ones(1000, np.float32)}), [np.full(1000, 2, np.float32)])
        with pytest.raises(UnsafeModelError, match="weight 'w' is outside"):
            HybridSession(model, tune=mode)


@pytest.mark.parametrize("location", ["a" * 300, "a/" * 3000 + "b", "w.bin/b"])
def test_weights_with_impossible_names_are_refused(folder: Path, location: str) -> None:
    """No file can have such a name; the model is refused like others whose weights are missing."""
    onnx.save(weights_elsewhere(location), folder / "m.onnx")
    with pytest.raises(ModelError, match=r"m\.onnx: onnxruntime refuses the model: "):
        load(folder / "m.onnx")


def test_weights_of_inner_graphs_and_functions_are_checked(folder: Path) -> None:
    """A path outside the folder is refused in a constant, in a branch and in a function."""
    weight = weights_elsewhere("../secret/w.bin").graph.initializer[0]
    constant = node("Constant", [], ["c"], value=weight)
    inner = helper.make_graph([constant], "inner", [], [value("c", FLOAT, [1000])])
    branch = node("If", ["flag"], ["y"], then_branch=inner, else_branch=inner)
    local = helper.make_function("local", "F", ["x"], ["c"], [constant], [helper.make_opsetid("", 17)])
    outputs = [value("y", FLOAT, [1000])]
    models = [
        make_model([branch], [value("flag", TensorProto.BOOL, [])], outputs),
        make_model([node("F", ["x"], ["y"], domain="local")], [value("x", FLOAT, [1])], outputs, functions=[local]),
    ]
    for model in models:
        onnx.save(model, folder / "m.onnx")
        with pytest.raises(UnsafeModelError):
            load(folder / "m.onnx")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_weights_whose_name_is_not_utf8_are_read(folder: Path) -> None:
    """A session reads them as onnxruntime does, and protects the folder as for other names."""
    path = folder / "m.onnx"
    path.write_bytes(weights_elsewhere("w?.bin").SerializeToString().replace(b"w?.bin", b"w\xff.bin"))
    (folder / os.fsdecode(b"w\xff.bin")).write_bytes((folder / "w.bin").read_bytes())
    feed = {"x": np.ones(1000, np.float32)}
    for mode in ("never", "now"):
        with HybridSession(path, tune=mode) as session:
            assert_equal(session.run(None, feed), ort.InferenceSession(path).run(None, feed))
    path.write_bytes(weights_elsewhere("../secret/w?.bin").SerializeToString().replace(b"w?.bin", b"w\xff.bin"))
    with pytest.raises(UnsafeModelError, match="weight 'w' is outside"):
        HybridSession(path, tune="never")


@pytest.mark.parametrize("location", ["w.bin", "./w.bin", "inner.bin"])
def test_weights_in_the_folder_are_read(folder: Path, location: str) -> None:
    """Weights in the folder are read, also through a link within it."""
    path = folder / "m.onnx"
    onnx.save(weights_elsewhere(location), path)
    x = np.arange(1000, dtype=np.float32)
    with HybridSession(path) as session:
        assert_equal(session.run(None, {"x": x}), run_plain(str(path), {"x": x}))


# The cache.


def only_file(folder: Path) -> Path:
    """Return the file in a folder, at any depth."""
    (found,) = (path for path in folder.rglob("*") if path.is_file())
    return found


@OFTEN
@given(content=damaged_bytes(b'{"signature": "s", "cost": {"op_type": "Relu", "cpu_ms": [1.0, 2.0]}}'))
def test_damaged_measurements_are_ignored(content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A damaged file of measurements counts as missing."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path))
    cache = MeasurementCache("damaged", 2)
    cache.put("s", OperatorCost("Relu", (1.0, 2.0)))
    only_file(tmp_path).write_bytes(content)
    found = cache.get("s")
    assert found is None or isinstance(found, OperatorCost)


@examples(60, suppress_health_check=SLOW)
@given(content=damaged_json({"winner": "plan 1", "plan": PLAN, "why": "fastest"}))
def test_damaged_decisions_are_ignored(content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A damaged file of decisions counts as missing."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path))
    memory = DecisionCache("damaged")
    memory.keep(Decision("plain", None, "why"))
    only_file(tmp_path).write_bytes(content)
    found = memory.recall()
    assert found is None or isinstance(found, Decision)


@pytest.mark.usefixtures("short_planning")
def test_a_decision_that_no_longer_fits_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cached plan for another model, or for more cores than exist, has no effect."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path))
    model, x = branches(size=5), np.ones((2, 5), np.float32)
    HybridSession(model, cores=1).close()
    choices = list((tmp_path / "decisions").iterdir())
    for damage in ({"digest": "0" * 32}, {"cores": 10**6}, {"accelerator": "NoSuchProvider"}):
        for choice in choices:
            choice.write_text(json.dumps({"winner": "plan 1", "plan": {**PLAN, **damage}, "why": "it says so"}))
        with HybridSession(model, cores=1) as session:
            assert_equal(session.run(None, {"x": x}), run_plain(model, {"x": x}))
        assert all(json.loads(choice.read_text())["why"] != "it says so" for choice in choices)


def test_cached_files_are_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only the owner can access cached files and folders, whatever the umask."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        MeasurementCache("private", 1).put("s", OperatorCost("Relu", (1.0,)))
        DecisionCache("private").keep(Decision("plain", None, "why"))
    finally:
        os.umask(before)
    made = list((tmp_path / "cache").rglob("*"))
    assert len([p for p in made if p.is_file()]) == 2
    for path in (tmp_path / "cache", *made):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_an_unwritable_cache_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If a file is in the place of the cache's folder, nothing is cached and sessions work."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "file" / "cache"))
    cache = MeasurementCache("f", 1)
    cache.put("s", OperatorCost("Relu", (1.0,)))
    assert cache.get("s") is None
    with HybridSession(branches(), cores=1) as session:
        assert session.run(None, {"x": np.ones((2, 4), np.float32)})
