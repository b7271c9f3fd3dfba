"""The readiness of models: they have opened and run once, by loading on request, at the start, and when replaced."""

from __future__ import annotations

import io
import json
import logging
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

from chrion.graph import load as load_graph
from chrion.scheduler import fixed_plan
from chrion.serving.server.grpc_codec import SERVICE, message
from chrion.serving.server.logs import JsonFormatter
from helpers import FLOAT, INT64, alternating_lanes, branches, make_model, node, value
from local_server import LocalServer, local_server
from model_repository import counting, product, put
from seams.serving import limit_trials
from server_client import wait_until

ROWS = np.ones((1, 4), np.float32)
SIZE_MB = 4.1  # of a product in memory


def without_kernel() -> onnx.ModelProto:
    """Build a model that no session can be opened for."""
    return make_model([node("NoSuchOperator", ["x"], ["y"])], [value("x", FLOAT, ["n"])], [value("y", FLOAT, ["n"])])


def raising(size: Any) -> onnx.ModelProto:
    """Build a model that opens and raises for inputs that have not four elements."""
    nodes = [node("Reshape", ["x", "shape"], ["s"]), node("ReduceSum", ["s"], ["y"], keepdims=0)]
    # The shape is computed, so that it is not checked when the model is opened.
    nodes.insert(0, node("Add", ["two", "none"], ["shape"]))
    nodes.insert(0, node("Cast", ["zero"], ["none"], to=TensorProto.INT64))
    nodes.insert(0, node("Sub", ["first", "first"], ["zero"]))
    nodes.insert(0, node("Slice", ["x", "start", "end"], ["first"]))
    weights = {"two": np.array([2, 2], np.int64), "start": np.array([0], np.int64), "end": np.array([1], np.int64)}
    return make_model(nodes, [value("x", FLOAT, [size])], [value("y", FLOAT, [])], weights)


def indexing() -> onnx.ModelProto:
    """Build ``y = table[x - 50]`` with ten rows, which raises for most numbers, 0 and 1 among them."""
    weights = {"table": np.arange(10, dtype=np.float32), "least": np.array([50], np.int64)}
    nodes = [node("Sub", ["x", "least"], ["at"]), node("Gather", ["table", "at"], ["y"])]
    return make_model(nodes, [value("x", INT64, [1])], [value("y", FLOAT, [1])], weights)


def by_rest(server: LocalServer, name: str) -> str:
    """Load a model; return the error, empty without one."""
    status, found, _ = server.get(f"/v2/repository/models/{name}/load", b"")
    assert status in (200, 400), found
    return "" if status == 200 else found["error"]


def by_grpc(server: LocalServer, name: str) -> str:
    """Load a model; return the error, empty without one."""
    request = message("RepositoryModelLoadRequest")(model_name=name).SerializeToString()
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        call = channel.unary_unary(f"/{SERVICE}/RepositoryModelLoad").future(request, timeout=60)
        assert call.code() in {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
        return str(call.details() or "")


def is_ready(server: LocalServer, name: str) -> bool:
    """Return whether a model is ready, which its state in the index has to say, too."""
    ready = server.get(f"/v2/models/{name}/ready")[0] == 200
    states = {entry["name"]: entry["state"] for entry in server.get("/v2/repository/index", b"")[1]}
    assert (states[name] == "READY") == ready
    return ready


@pytest.mark.parametrize("load", [by_rest, by_grpc])
def test_a_load_answers_after_the_model_has_run(tmp_path: Path, load: Callable[[LocalServer, str], str]) -> None:
    """What cannot be opened, does not run, or does not fit fails with its reason in one line, and is not ready."""
    put(tmp_path, "good", product())
    put(tmp_path, "no-kernel", without_kernel())
    put(tmp_path, "raises", raising(3))
    put(tmp_path, "large", product(1300))
    graph = load_graph(branches())
    fixed_plan(graph, alternating_lanes(graph)).save(put(tmp_path, "other", product()).parent / "lanes.plan.json")
    with local_server(tmp_path, control="explicit", memory_mb=10.0) as server:
        assert load(server, "good") == ""
        assert is_ready(server, "good")
        assert server.metric("chrion_model_loads_total", model="good") == 1
        for name, reason in (
            ("no-kernel", "NoSuchOperator"),
            ("raises", "Reshape"),
            ("large", "budget: it needs 11.4 MB of 10.0 MB"),
            ("other", "lanes.plan.json: plan of "),
        ):
            found = load(server, name)
            assert (reason in found, "\n" in found) == (True, False), found
            assert not is_ready(server, name)
        assert server.infer("good", ROWS)[0] == 200


def test_a_model_that_may_need_other_inputs_is_ready(tmp_path: Path) -> None:
    """A failure with synthetic inputs is none of the model if its sizes are free or it looks values up."""
    put(tmp_path, "sizes", raising("n"))
    put(tmp_path, "indices", indexing())
    with local_server(tmp_path) as server:
        assert is_ready(server, "sizes")
        assert server.infer("sizes", np.ones(4, np.float32))[1]["outputs"][0]["data"] == [4.0]
        assert is_ready(server, "indices")
        assert server.infer("indices", [53], "INT64")[1]["outputs"][0]["data"] == [3.0]


def test_a_trial_takes_little_memory(tmp_path: Path) -> None:
    """A model with large inputs is ready once it has opened: this one would not run."""
    put(tmp_path, "m", raising(10**9))
    with local_server(tmp_path) as server:
        assert is_ready(server, "m")


def test_a_load_that_fails_leaves_what_worked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model that is loaded again, and cannot be, is answered with the reason and served on, as the log says."""
    caplog.set_level(logging.WARNING, "chrion.server")
    file = put(tmp_path, "m", product(seed=1))
    with local_server(tmp_path, control="explicit", memory_mb=10.0) as server:
        assert by_rest(server, "m") == ""
        before = server.infer("m", ROWS)[1]["outputs"]
        for bad in (b"broken", without_kernel(), product(1300)):
            put(tmp_path / "new", "m", bad).rename(file)
            assert by_rest(server, "m")
            assert (is_ready(server, "m"), server.infer("m", ROWS)[1]["outputs"]) == (True, before)
        put(tmp_path / "new", "m", product(seed=2)).rename(file)
        assert by_rest(server, "m") == ""
        assert server.infer("m", ROWS)[1]["outputs"] != before
    refused = [record.message for record in caplog.records if "cannot be served" in record.message]
    assert refused == ["replacement cannot be served: the version before is served on"] * 3


def test_other_inputs_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A replacement that old requests do not fit is served, and the log says what has changed."""
    caplog.set_level(logging.WARNING, "chrion.server")
    file = put(tmp_path, "m", raising(3))
    with local_server(tmp_path, control="explicit") as server:
        assert "Reshape" in by_rest(server, "m")
        for side, seed in ((4, 0), (4, 1), (5, 1)):
            put(tmp_path / "new", "m", product(side, seed)).rename(file)
            assert by_rest(server, "m") == ""
    changes = [record.__dict__["fields"] for record in caplog.records if record.message.startswith("inputs or outputs")]
    failed, first, second = "x FP32 [3] -> y FP32 []", *(f"x FP32 [-1, {n}] -> y FP32 [-1, {n}]" for n in (4, 5))
    assert changes == [
        {"model": "m", "version": "1", "before": failed, "now": first},
        {"model": "m", "version": "1", "before": first, "now": second},
    ]


def test_loads_of_many_clients_agree(tmp_path: Path) -> None:
    """Clients that load one model at the same time get the same answer, and it is loaded once."""
    put(tmp_path, "good", product())
    put(tmp_path, "bad", without_kernel())
    with local_server(tmp_path, control="explicit") as server, ThreadPoolExecutor(8) as clients:
        assert set(clients.map(lambda _: by_rest(server, "good"), range(16))) == {""}
        assert server.metric("chrion_model_loads_total", model="good") == 1
        assert all("NoSuchOperator" in found for found in clients.map(lambda _: by_rest(server, "bad"), range(8)))
        loads = [clients.submit(by_rest, server, "good") for _ in range(20)]
        unloads = [clients.submit(server.get, "/v2/repository/models/good/unload", b"") for _ in range(20)]
        assert all(one.result() == "" or "unloaded" in one.result() for one in loads)
        assert all(one.result()[0] in (200, 404) for one in unloads)


@pytest.mark.parametrize("control", ["none", "poll"])
def test_a_server_is_ready_when_all_models_have_been_tried(
    tmp_path: Path, control: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is opened and run once in memory for two, and closed; a bad one is not ready, and the server is.

    The line at the start is written before, so that the log then has the numbers of versions.
    """
    caplog.set_level(logging.INFO, "chrion.server")
    for number in range(6):
        put(tmp_path, f"m{number}", product(seed=number))
    put(tmp_path, "bad", without_kernel())
    put(tmp_path, "large", product(2000))
    with local_server(tmp_path, control=control, memory_mb=2.5 * SIZE_MB, wait=False) as server:
        assert server.infer("m5", ROWS)[0] == 200  # it need not wait for the trials of the others
        assert server.begun == "7 models (not served, see the log: large version 1)"
        wait_until(lambda: server.get("/v2/health/ready")[0] == 200)
        wait_until(lambda: "ready" in caplog.messages)
        (counts,) = [record.__dict__["fields"] for record in caplog.records if record.message == "ready"]
        assert counts == {"models": 6, "versions": 6, "unserved": 2}
        assert [is_ready(server, f"m{number}") for number in range(6)] == [True] * 6
        assert not is_ready(server, "bad")
        assert "NoSuchOperator" in server.get("/v2/models/bad/ready")[1]["error"]
        assert "does not fit" in server.get("/v2/models/large/ready")[1]["error"]
        assert server.metric("chrion_model_loads_total") == 1  # trials are no loads
        assert server.metric("chrion_memory_used_bytes", device="host") < 1.5 * SIZE_MB * 1e6
        for number in range(6):
            assert server.infer(f"m{number}", ROWS)[0] == 200
        assert [is_ready(server, f"m{number}") for number in range(6)] == [True] * 6  # also those evicted since


def test_what_does_not_fit_beside_a_pinned_model_is_not_served(tmp_path: Path) -> None:
    """Each has the reason and is counted, whether its name precedes that of the pinned model or not."""
    put(tmp_path, "m", product(), toml="pinned = true\n")
    for name in "az":
        put(tmp_path, name, product())
    with local_server(tmp_path, memory_mb=1.5 * SIZE_MB) as server:
        assert is_ready(server, "m")
        assert counts(server) == {"models": 1, "versions": 1, "unserved": 2}
        for name in "az":
            assert not is_ready(server, name)
            answer = server.get(f"/v2/models/{name}/ready")[1]["error"]
            assert "4.0 MB of 6.2 MB of host memory, part of which pinned models take" in answer
        assert server.metric("chrion_model_loads_total") == 1


def counts(server: LocalServer) -> dict[str, int]:
    """Return the numbers of what is served and what is not, from the server's health."""
    health = server.get("/v2/health")[1]
    return {name: health[name] for name in ("models", "versions", "unserved")}


def test_models_are_not_served_while_another_one_is_pinned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One pinned later ends what does not fit beside it, with the reason, until it is removed."""
    root = tmp_path / "root"
    for name in "abc":
        put(root, name, product())
    with local_server(root, control="poll", poll_s=0.02, memory_mb=1.5 * SIZE_MB) as server:
        assert [server.infer(name, ROWS)[0] for name in "abc"] == [200] * 3
        put(tmp_path / "new", "m", product(), toml="pinned = true\n")
        (tmp_path / "new" / "m").rename(root / "m")
        wait_until(lambda: counts(server) == {"models": 1, "versions": 1, "unserved": 3})
        for name in "abc":
            assert "part of which pinned models take" in reason(server, name)
            assert not is_ready(server, name)
            assert server.infer(name, ROWS)[0] == 503
        assert [record.getMessage() for record in caplog.records].count("model cannot be served") == 3
        shutil.rmtree(root / "m")
        wait_until(lambda: all(is_ready(server, name) for name in "abc"))
        assert [server.infer(name, ROWS)[0] for name in "abc"] == [200] * 3
        assert counts(server) == {"models": 3, "versions": 3, "unserved": 0}


def test_trials_do_not_wait_for_a_model_in_use(tmp_path: Path) -> None:
    """While a request keeps one model in memory, the others are tried in what is left of it."""
    put(tmp_path, "a", counting())
    for name in "bcd":
        put(tmp_path, name, product())
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1e15]}]}
    with (
        local_server(tmp_path, memory_mb=2.5 * SIZE_MB, wait=False) as server,
        server.in_flight("/v2/models/a/infer", body),
    ):
        wait_until(lambda: server.get("/v2/health/ready")[0] == 200)
        assert all(is_ready(server, name) for name in "abcd")


def test_a_trial_is_bounded_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that does not end with synthetic inputs is ended, and says nothing about the model."""
    limit_trials(monkeypatch, 0.2)
    endless = counting()
    endless.graph.node[0].input[0] = "many"
    endless.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1e15], np.float32), "many"))
    put(tmp_path, "endless", endless)
    put(tmp_path, "good", product())
    with local_server(tmp_path) as server:
        assert is_ready(server, "endless")
        assert is_ready(server, "good")


@pytest.mark.parametrize(
    "bad", [b"broken", without_kernel().SerializeToString(), None], ids=["bytes", "kernel", "gone"]
)
def test_what_worked_is_served_until_its_replacement_has_run(tmp_path: Path, bad: bytes | None) -> None:
    """Also after it has been evicted: it is opened again from the file that it had."""
    root = tmp_path / "root"
    file = put(root, "m", product(seed=1))
    put(root, "other", product(seed=3))
    with local_server(root, control="poll", poll_s=0.02, memory_mb=1.5 * SIZE_MB) as server:
        before = server.infer("m", ROWS)[1]["outputs"]
        if bad is None:
            file.unlink()
        else:
            put(tmp_path / "new", "m", bad).rename(file)
        wait_until(lambda: reason(server, "m"))
        assert is_ready(server, "m")
        for _ in range(3):
            assert server.infer("other", ROWS)[0] == 200
            status, found, _ = server.infer("m", ROWS)
            assert (status, found.get("outputs")) == (200, before)
        assert server.metric("chrion_model_evictions_total", model="m") >= 2
        put(tmp_path / "new", "m", product(seed=2)).rename(file)
        wait_until(lambda: server.infer("m", ROWS)[1]["outputs"] != before)
        (expected,) = ort.InferenceSession(file).run(None, {"x": ROWS})
        assert np.allclose(server.infer("m", ROWS)[1]["outputs"][0]["data"], expected)
        assert not reason(server, "m")


def test_messages_of_a_load_name_the_model(tmp_path: Path) -> None:
    """What a library logs while a model is loaded has its name, and a fixed text as its event."""
    file = put(tmp_path / "root", "m", product(seed=1))
    put(tmp_path / "root", "other", product(seed=3))
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter())
    logging.getLogger("chrion").addHandler(handler)
    try:
        with local_server(tmp_path / "root", memory_mb=1.5 * SIZE_MB) as server:
            put(tmp_path / "new", "m", product(seed=2)).rename(file)
            for name in ("other", "m"):
                assert server.infer(name, ROWS)[0] == 200
    finally:
        logging.getLogger("chrion").removeHandler(handler)
    entries = [json.loads(line) for line in written.getvalue().splitlines()]
    (entry,) = [entry for entry in entries if entry["logger"] != "chrion.server"]
    assert (entry["event"], entry["model"], entry["version"]) == ("message", "m", "1")
    assert "has changed since the model was opened" in entry["message"]


def reason(server: LocalServer, name: str) -> str:
    """Return the reason in a model's entry of the index."""
    return str({entry["name"]: entry["reason"] for entry in server.get("/v2/repository/index", b"")[1]}[name])


def test_a_pinned_model_is_replaced_in_memory_for_one(tmp_path: Path) -> None:
    """A pinned model that works is served on if its replacement does not, and gives its memory to one that does."""
    root = tmp_path / "root"
    file = put(root, "m", product(seed=1), toml="pinned = true\n")
    with local_server(root, control="poll", poll_s=0.02, memory_mb=1.5 * SIZE_MB) as server:
        before = server.infer("m", ROWS)[1]["outputs"]
        put(tmp_path / "new", "m", without_kernel()).rename(file)
        wait_until(lambda: reason(server, "m"))
        assert server.infer("m", ROWS)[1]["outputs"] == before
        put(tmp_path / "new", "m", product(seed=2)).rename(file)
        wait_until(lambda: server.infer("m", ROWS)[1]["outputs"] != before)


@pytest.mark.parametrize("how", ["emptied", "missing", "no models", "models emptied"])
def test_a_repository_that_is_gone_unloads_nothing(tmp_path: Path, how: str) -> None:
    """All models at once vanish with a file system, and are served on until it is back with other files."""
    root, away = tmp_path / "root", tmp_path / "away"
    for number in range(3):
        put(root, f"m{number}", product(seed=number))
    with local_server(root, control="poll", poll_s=0.02, memory_mb=1.5 * SIZE_MB) as server:
        before = [server.infer(f"m{number}", ROWS)[1]["outputs"] for number in range(3)]
        root.rename(away)
        if how != "missing":
            root.mkdir()
        if how == "no models":
            put(root, "m0", b"broken")
        if how == "models emptied":
            for number in range(3):
                (root / f"m{number}").mkdir()
        await_polls()
        assert [server.infer(f"m{number}", ROWS)[1]["outputs"] for number in range(3)] == before
        assert all(is_ready(server, f"m{number}") for number in range(3))
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(away, root)
        put(root, "m3", product(seed=3))
        wait_until(lambda: server.infer("m3", ROWS)[0] == 200)
        assert [server.infer(f"m{number}", ROWS)[1]["outputs"] for number in range(3)] == before
        shutil.rmtree(root / "m1")
        wait_until(lambda: server.infer("m1", ROWS)[0] == 404)
        assert server.infer("m0", ROWS)[0] == 200


def await_polls() -> None:
    """Wait for several polls."""
    threading.Event().wait(0.3)


def test_a_version_stays_until_the_next_one_has_run(tmp_path: Path) -> None:
    """A version whose folder is renamed to that of the next one ends when the next one is ready."""
    put(tmp_path, "m", product(seed=1))
    put(tmp_path, "other", product())
    with local_server(tmp_path, control="poll", poll_s=0.02) as server:
        before = server.infer("m", ROWS)[1]["outputs"]
        shutil.rmtree(tmp_path / "m" / "1")
        put(tmp_path, "m", without_kernel(), version=2)
        wait_until(lambda: server.get("/v2/models/m/versions/2/ready")[0] == 503)
        await_polls()
        assert server.infer("m/versions/1", ROWS)[1]["outputs"] == before
        put(tmp_path, "m", product(seed=2), version=2)
        wait_until(lambda: server.infer("m/versions/1", ROWS)[0] == 404)
        assert server.infer("m", ROWS)[0] == 200
