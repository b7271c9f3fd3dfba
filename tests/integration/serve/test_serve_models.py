"""The models of a server: within their memory, beside their repository, and as the simulation predicts."""

from __future__ import annotations

import math
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from chrion import load
from chrion.scheduler import fixed_plan
from chrion.serving.manager import PolicySpec
from chrion.serving.manager.policies import EVICTION, LOAD_ORDER, ROUTING
from chrion.serving.manager.policy_settings import ServerPolicies
from chrion.serving.simulator.engine import ClusterEngine, EngineConfig
from chrion.serving.simulator.settings import ServerSpec
from chrion.serving.variants import Variant
from helpers import FLOAT, alternating_lanes, branches, make_model, node, value
from local_server import LocalServer, local_server
from model_repository import columns, identity, product, put
from server_client import wait_until

ROWS = np.ones((1, 4), np.float32)


@pytest.mark.parametrize("change", ["renamed over", "deleted", "overwritten"])
@pytest.mark.parametrize("planned", [False, True], ids=["plain", "plan"])
def test_a_version_answers_from_the_file_that_it_opened(tmp_path: Path, change: str, *, planned: bool) -> None:
    """After an eviction the same model is opened again, or none if its content is lost; never another one."""
    file = put(tmp_path, "m", branches(size=300))
    other = branches(size=300)
    other.graph.node[2].op_type = "Abs"
    new = other.SerializeToString()
    if planned:
        graph = load(file)
        fixed_plan(graph, alternating_lanes(graph)).save(file.parent / "lanes.plan.json")
    put(tmp_path, "other", product(200, 1))
    x = np.ones((2, 300), np.float32)
    with local_server(tmp_path, memory_mb=6.0) as server:
        _, before, _ = server.infer("m", x)
        assert server.infer("other", np.ones((1, 200), np.float32))[0] == 200
        assert server.metric("chrion_model_evictions_total") == 1
        if change == "overwritten":
            file.write_bytes(new)
        else:
            file.unlink()
            if change == "renamed over":
                file.write_bytes(new)
        status, found, _ = server.infer("m", x)
    if change == "overwritten":
        assert status >= 400
        assert found["error"] == (
            "model 'm': the model cannot be loaded: its files have changed since it was added: restart the server, or "
            "load the model again with --model-control explicit, and replace files by renaming new ones over them"
        )
    else:
        assert (status, found["outputs"]) == (200, before["outputs"])


def test_many_models_share_little_memory(tmp_path: Path) -> None:
    """Ten models are served in memory for four; memory stays in the budget, and those in use stay."""
    for number in range(10):
        put(tmp_path, f"m{number}", product(200, number))
    size_mb = 0.16 * 1.1 + 4.0
    with local_server(tmp_path, memory_mb=4.5 * size_mb) as server:
        for number in np.random.default_rng(0).permutation(np.repeat(np.arange(10), 4)):
            status, found, _ = server.infer(f"m{number}", np.ones((1, 200), np.float32))
            assert status == 200, found
            used, budget = (server.metric(f"chrion_memory_{what}_bytes", device="host") for what in ("used", "budget"))
            assert used <= budget
        assert server.metric("chrion_model_evictions_total") > 15
        assert server.metric("nv_inference_request_success") == 40
        resident = server.metric("chrion_model_resident_bytes", device="host")
        assert resident == used
        assert 3 * size_mb * 1e6 < resident


def test_a_model_that_is_too_slow_says_so_and_when_it_is_measured_again(tmp_path: Path) -> None:
    """With the policy ``deadline``, one request measures it; the next is told both times, and when to try again."""
    put(tmp_path, "m", product(), toml='slo = "1us"\n')
    with local_server(tmp_path, policies=PolicySpec(admission="deadline")) as server:
        assert server.infer("m", ROWS)[0] == 200
        status, found, headers = server.infer("m", ROWS)
    assert status == 429
    pattern = (
        r"model 'm': the latency objective cannot be met: "
        r"the model itself takes too long: expected [\d.]+ (us|ms|s), objective 1\.00 us"
    )
    assert re.fullmatch(pattern, found["error"])
    assert 1 <= int(headers["retry-after"]) <= 10


def test_a_model_shrinks_to_its_smaller_file_before_another_is_evicted(tmp_path: Path) -> None:
    """Under pressure an idle model is replaced by its smaller file, which serves it from then on; none is evicted."""
    two = "[variants.large]\nhost_mb = 60\n[variants.small]\nmodel = 'small.onnx'\nhost_mb = 30\n"
    for name, toml in (("a", two), ("b", two), ("c", "[variants.only]\nhost_mb = 30\n")):
        file = put(tmp_path, name, product(), toml=toml)
        (file.parent / "small.onnx").write_bytes(product().SerializeToString())

    def variants(server: LocalServer) -> dict[str, str]:
        return {
            name: variant
            for name in "abc"
            for variant in ("large", "small", "only")
            if server.metric("chrion_model_resident_bytes", model=name, variant=variant, device="host", missing_ok=True)
        }

    with local_server(tmp_path, memory_mb=90.0) as server:
        assert server.infer("a", ROWS)[0] == 200
        assert variants(server) == {"a": "large"}
        assert server.infer("b", ROWS)[0] == 200
        wait_until(lambda: variants(server) == {"a": "small", "b": "large"})
        assert server.infer("c", ROWS)[0] == 200
        wait_until(lambda: variants(server) == {"a": "small", "b": "small", "c": "only"})
        assert [server.metric("chrion_model_shrinks_total", model=name) for name in "abc"] == [1, 1, 0]
        assert server.metric("chrion_model_evictions_total") == 0
        assert server.infer("a", ROWS)[0] == 200
        assert server.metric("chrion_model_loads_total") == 5


def test_polling_adds_replaces_and_removes(tmp_path: Path) -> None:
    """Models follow the repository while the server runs; a bad file is reported, and what worked is served on."""
    put(tmp_path, "a", product(seed=1))
    with local_server(tmp_path, control="poll", poll_s=0.02) as server:
        assert server.get("/v2/health")[1]["models"] == 1
        first = server.infer("a", ROWS)[1]["outputs"][0]["data"]
        put(tmp_path, "b", product(seed=2))
        wait_until(lambda: server.infer("b", ROWS)[0] == 200)
        put(tmp_path, "a", product(seed=3))
        wait_until(
            lambda: server.infer("a", ROWS)[0] == 200 and server.infer("a", ROWS)[1]["outputs"][0]["data"] != first
        )
        put(tmp_path, "b", b"broken")
        wait_until(lambda: "not an ONNX model" in index(server)["b"]["reason"])
        assert (index(server)["b"]["state"], server.infer("b", ROWS)[0]) == ("READY", 200)
        file = put(tmp_path, "b", product(seed=2))
        wait_until(lambda: not index(server)["b"]["reason"])
        assert server.infer("b", ROWS)[0] == 200
        file.unlink()
        file.parent.rmdir()
        file.parents[1].rmdir()
        wait_until(lambda: server.infer("b", ROWS)[0] == 404)
        assert server.get("/v2/repository/models/a/unload", b"")[0] == 503  # control is not explicit


def index(server: LocalServer) -> dict[str, Any]:
    """Return the entries of the repository index by name, of the highest version."""
    return {entry["name"]: entry for entry in server.get("/v2/repository/index", b"")[1]}


def test_a_version_that_is_removed_is_no_longer_served(tmp_path: Path) -> None:
    """While requests run: those without a version go to the highest one that is left, and none of them fails."""
    files = [put(tmp_path, "a", product(seed=seed), version=seed) for seed in (1, 2)]
    with local_server(tmp_path, control="poll", poll_s=0.02) as server:
        by_version = [server.infer(f"a/versions/{version}", ROWS)[1]["outputs"][0]["data"] for version in (1, 2)]
        assert server.infer("a", ROWS)[1]["outputs"][0]["data"] == by_version[1]
        stop = threading.Event()
        with ThreadPoolExecutor(2) as clients:
            running = [clients.submit(infer_until, server, stop) for _ in range(2)]
            files[1].unlink()
            files[1].parent.rmdir()
            wait_until(lambda: server.infer("a/versions/2", ROWS)[0] == 404)
            wait_until(lambda: server.infer("a", ROWS)[1]["outputs"][0]["data"] == by_version[0])
            stop.set()
            for answers in running:
                assert all(status == 200 and data in by_version for status, data in answers.result())
        assert server.infer("a/versions/1", ROWS)[1]["outputs"][0]["data"] == by_version[0]


def test_requests_without_a_version_go_to_the_highest_that_works(tmp_path: Path) -> None:
    """A higher version that onnxruntime refuses, or that is too large, does not take the model offline."""
    refused = product(seed=2)
    refused.graph.node.append(node("NoSuchOperator", [refused.graph.output[0].name], ["unused"]))
    for name, bad in (("a", refused), ("b", product(1300))):
        put(tmp_path, name, product(seed=1))
        with local_server(tmp_path, control="poll", poll_s=0.02, memory_mb=10.0) as server:
            put(tmp_path, name, bad, version=2)
            wait_until(lambda n=name: (index(server)[n]["version"], index(server)[n]["state"]) == ("2", "UNAVAILABLE"))
            assert server.infer(name, ROWS)[:2] == server.infer(f"{name}/versions/1", ROWS)[:2]
            assert server.get(f"/v2/models/{name}/ready")[0] == 200
            put(tmp_path, name, product(seed=3), version=2)
            wait_until(lambda n=name: server.infer(f"{n}/versions/2", ROWS)[0] == 200)
            assert server.infer(name, ROWS)[1]["outputs"] == server.infer(f"{name}/versions/2", ROWS)[1]["outputs"]


def infer_until(server: LocalServer, stop: threading.Event) -> list[tuple[int, Any]]:
    """Send requests for the model a until an event; return their statuses and outputs."""
    answers = []
    while not stop.is_set():
        status, body, _ = server.infer("a", ROWS)
        answers.append((status, body["outputs"][0]["data"] if status == 200 else body))
    return answers


def test_a_file_replaced_after_the_start_is_not_loaded(tmp_path: Path) -> None:
    """Without polling, a changed file is an error that says what to do; the server and other models go on."""
    put(tmp_path, "a", product(seed=1))
    put(tmp_path, "b", product(seed=1))
    with local_server(tmp_path) as server:
        put(tmp_path, "a", product(8, seed=9))
        status, body, headers = server.infer("a", ROWS)
        assert status == 503
        assert "changed since" in body["error"]
        assert int(headers["retry-after"]) >= 1
        assert server.infer("b", ROWS)[0] == 200
        assert server.get("/v2/models/a/ready")[0] == 503


def test_a_file_replaced_while_it_is_polled_and_requested(tmp_path: Path) -> None:
    """While whole and damaged files take its place all the time, each answer is that of a whole file."""
    contents = [product(seed=seed).SerializeToString() for seed in range(3)]
    valid = [ort.InferenceSession(content).run(None, {"x": ROWS})[0].ravel().tolist() for content in contents]
    root = tmp_path / "root"
    file = put(root, "m", contents[0])
    stop = threading.Event()

    def replace() -> None:
        number = 0
        while not stop.wait(0.01):
            content = contents[number % 3]
            put(tmp_path / "new", "m", content[: len(content) // (1 + number % 2)]).rename(file)
            number += 1

    with local_server(root, control="poll", poll_s=0.01) as server:
        writer = threading.Thread(target=replace)
        writer.start()
        seen = set()
        try:
            end = time.monotonic() + 60
            while len(seen) < 3 and time.monotonic() < end:
                status, found, _ = server.infer("m", ROWS)
                assert status == 200, found
                seen |= {at for at, v in enumerate(valid) if np.allclose(found["outputs"][0]["data"], v)}
        finally:
            stop.set()
            writer.join()
        assert seen == {0, 1, 2}


def test_a_model_that_raises_fails_its_own_requests(tmp_path: Path) -> None:
    """A model that cannot compute is an error of that request, and the model is served on."""
    nodes = [
        node("Reshape", ["x", "shape"], ["s"]),
        node("ReduceSum", ["s"], ["t"], keepdims=0),
        node("Expand", ["t", "one"], ["y"]),
    ]
    weights = {"shape": np.array([2, 2], np.int64), "one": np.array([1], np.int64)}
    put(tmp_path, "m", make_model(nodes, [value("x", FLOAT, ["n"])], [value("y", FLOAT, ["n"])], weights))
    with local_server(tmp_path) as server:
        for _ in range(3):
            status, found, _ = server.infer("m", np.ones(3, np.float32))
            assert status == 500
            assert "Reshape" in found["error"]
            assert server.infer("m", np.ones(4, np.float32))[1]["outputs"][0]["data"] == [4.0]


def test_a_model_without_kernels_is_reported_at_its_first_request(tmp_path: Path) -> None:
    """A model that parses but cannot be opened is 503 with the reason and a time to retry; others are served."""
    infos = [value(name, FLOAT, ["n"]) for name in ("x", "y")]
    put(tmp_path, "m", make_model([node("NoSuchOperator", ["x"], ["y"])], infos[:1], infos[1:]))
    put(tmp_path, "good", product())
    with local_server(tmp_path) as server:
        status, found, headers = server.infer("m", np.ones(3, np.float32))
        assert status == 503
        assert "NoSuchOperator" in found["error"]
        assert int(headers["retry-after"]) >= 1
        assert server.infer("good", ROWS)[0] == 200
        assert server.metric("chrion_model_load_failures_total", model="m") == 1
        (entry,) = [e for e in server.get("/v2/repository/index", b"")[1] if e["name"] == "m"]
        assert entry["state"] == "UNAVAILABLE"


def test_external_data_is_served(tmp_path: Path) -> None:
    """A model whose weights are in another file of its folder is served; one that leaves its folder is refused."""
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    onnx.save(product(64), folder / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    escaped = onnx.load(folder / "model.onnx", load_external_data=False)
    escaped.graph.initializer[0].external_data[0].value = "../../m/1/weights"
    put(tmp_path, "out", escaped)
    put(tmp_path, "text", identity("BYTES"))
    with local_server(tmp_path) as server:
        assert server.infer("m", np.ones((1, 64), np.float32))[0] == 200
        reasons = {e["name"]: e["reason"] for e in server.get("/v2/repository/index", b"")[1]}
        assert "outside the model's folder" in reasons["out"]
        assert server.infer("text", [["é"]], "BYTES")[1]["outputs"][0]["data"] == ["é"]


def test_scores_in_maps_are_refused_with_the_option_for_a_tensor(tmp_path: Path) -> None:
    """A classifier as converters write it by default has a sequence of maps as output, which the protocol lacks."""
    model = columns()
    zipped = node("ZipMap", ["probabilities"], ["maps"], domain="ai.onnx.ml", classlabels_strings=["in time", "late"])
    model.graph.node.append(zipped)
    kind = onnx.helper.make_map_type_proto(onnx.TensorProto.STRING, onnx.helper.make_tensor_type_proto(FLOAT, []))
    maps = onnx.helper.make_value_info("maps", onnx.helper.make_sequence_type_proto(kind))
    model.graph.output[1].CopyFrom(maps)
    put(tmp_path, "m", model)
    with local_server(tmp_path) as server:
        (entry,) = server.get("/v2/repository/index", b"")[1]
        assert "output 'maps'" in entry["reason"]
        assert "zipmap=False" in entry["reason"]


def test_a_plan_of_the_folder_serves(tmp_path: Path) -> None:
    """A plan beside the model is its first variant, and has the answers of a plain session under many clients."""
    file = put(tmp_path, "m", branches())
    graph = load(str(file))
    fixed_plan(graph, alternating_lanes(graph)).save(file.parent / "lanes.plan.json")
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    expected = ort.InferenceSession(file).run(None, {"x": x})
    with local_server(tmp_path) as server, ThreadPoolExecutor(8) as pool:
        for status, found, _ in pool.map(lambda _: server.infer("m", x), range(60)):
            assert status == 200
            for output, array in zip(found["outputs"], expected, strict=True):
                assert np.allclose(np.array(output["data"]).reshape(2, 4), array, rtol=1e-5)
        assert server.metric("chrion_model_resident_bytes", model="m", variant="lanes", device="host") > 0


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_the_server_loads_and_evicts_as_the_simulation_predicts(tmp_path: Path, eviction: str) -> None:
    """For the same requests, one after another, every model is loaded and evicted as often as in the simulator."""
    count, fitting = 9, 4
    for number in range(count):
        put(tmp_path, f"m{number}", product(seed=number), toml="[variants.cpu]\nhost_mb = 10\n")
    rng = np.random.default_rng(5)
    share = 1 / np.arange(1, count + 1)
    order = rng.choice(count, 120, p=share / share.sum())
    journal: list[tuple[str, int]] = []
    config = EngineConfig(
        [ServerSpec(1, fitting * 0.01 + 0.005, 0.0, 1, 1, 12.0, 1.0)],
        [Variant("gpu", 10.0, 1.0, 1.0, (), 10.0)] * count,
        ServerPolicies(
            EVICTION[eviction], LOAD_ORDER["demand"], deadlines=False,
            slo_ms=[math.inf] * count, weights=[1.0] * count, pinned=[False] * count,
        ),
        ROUTING["random"],
        1,
    )  # fmt: skip
    engine = ClusterEngine(config, lambda _, event, __, model: journal.append((event, model)))
    engine.run([(np.arange(120.0) * 1000, order)])  # each ends long before the next
    policies = PolicySpec(eviction=eviction, prefetch=True)
    with local_server(tmp_path, memory_mb=fitting * 10 + 5, policies=policies) as server:
        for number in order:
            assert server.infer(f"m{number}", ROWS)[0] == 200
        for number in range(count):
            for event, metric in (("load", "loads"), ("evict", "evictions")):
                found = server.metric(f"chrion_model_{metric}_total", model=f"m{number}")
                assert found == journal.count((event, number)), (number, event)
        assert server.metric("chrion_model_evictions_total") > 20
