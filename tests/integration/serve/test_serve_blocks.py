"""Models that are served in blocks: equal answers, the order of requests, limits, faults, and the end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from chrion.machine.cores import physical_cores
from chrion.runtime.block_chain import BlockChain
from chrion.serving.manager import PolicySpec
from chrion.serving.manager.records import HOST
from chrion.serving.server.repository import scan
from chrion.zoo import build
from helpers import FLOAT, make_model, node, value
from local_server import LocalServer, local_server
from model_repository import counting, identity, product, put
from server_client import infer_body, wait_until

BLOCKS = 'blocks = "5ms"\n'
ENDLESS = infer_body([1e15])
INFER = "/v2/models/slow/infer"
LANES = len(physical_cores())


def fixed(model: onnx.ModelProto, rows: int = 1) -> onnx.ModelProto:
    """Give the free first dimension of all inputs and outputs a size."""
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.shape.dim[0].dim_value = rows
    return model


@contextlib.contextmanager
def busy_lanes(server: LocalServer, count: int = LANES) -> Iterator[None]:
    """Keep all lanes busy with requests that do not end until their clients leave; both models are in memory."""
    for name, x in (("slow", [1.0]), ("quick", np.ones((1, 4)))):
        wait_until(lambda name=name, x=x: server.infer(name, x)[0] == 200)
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(server.in_flight(INFER, ENDLESS))
        wait_until(lambda: server.metric("chrion_request_bytes") > 0)
        wait_until(server.computes)
        yield


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Return an event without which the first block of a request does not end, and one that is set when one begins."""
    free, begun = threading.Event(), threading.Event()
    begin = BlockChain.begin

    def late(self: BlockChain, feed: Any) -> Any:
        begun.set()
        assert free.wait(200)
        return begin(self, feed)

    free.set()
    monkeypatch.setattr(BlockChain, "begin", late)
    yield free, begun
    free.set()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a repository of an endless model and a quick one, both in blocks."""
    put(tmp_path, "slow", counting(), toml=BLOCKS)
    put(tmp_path, "quick", fixed(product()), toml=BLOCKS)
    return tmp_path


def test_answers_are_those_of_onnxruntime(tmp_path: Path) -> None:
    """Answers of a model in blocks are bit for bit those of a plain session; the page and the metrics show it."""
    model = build("squeezenet", {"resolution": 64, "width": 0.25})
    put(tmp_path, "net", model, toml='blocks = "100us"\n')
    put(tmp_path, "whole", product())
    image = np.random.default_rng(0).random((1, 3, 64, 64), np.float32)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    plain = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    expected = plain.run(None, {"X": image})[0]
    body = {"inputs": [{**infer_body(image)["inputs"][0], "name": "X"}]}
    with local_server(tmp_path) as server:
        assert server.infer("whole", np.ones((1, 4)))[0] == 200
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: server.get("/v2/models/net/infer", body), range(8)))
        for status, found, headers in answers:
            assert status == 200, found
            np.testing.assert_array_equal(np.float32(found["outputs"][0]["data"]), expected.ravel())
            assert "compute" in headers["server-timing"]
        assert server.metric("nv_inference_request_success", model="net") == 8
        assert server.metric("chrion_model_blocks", model="net") > 1
        assert server.metric("chrion_model_blocks", model="whole") == 0
        assert server.metric("chrion_lane_busy_seconds_total") > 0


def test_weights_that_several_blocks_read_count_in_each(tmp_path: Path) -> None:
    """Each block packs them; a look-up does not, and a model with free dimensions is one block."""
    weights = {"w": np.eye(100, dtype=np.float32), "all": np.arange(100)}
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("MatMul", ["a", "w"], ["b"]), node("MatMul", ["b", "w"], ["y"])]
    nodes += [node("Gather", ["w", "all"], ["z"])]
    for name, rows in (("fixed", 1), ("free", "n")):
        ends = [value(own, FLOAT, [rows, 100]) for own in ("x", "y")]
        put(tmp_path, name, make_model(nodes, ends[:1], [ends[1], value("z", FLOAT, [100, 100])], weights), toml=BLOCKS)
    found = scan(tmp_path, accelerator=False)
    size = (tmp_path / "fixed" / "1" / "model.onnx").stat().st_size
    assert found["fixed", "1"].managed.variants[0].bytes[HOST] == round(1.1 * size) + 4_000_000 + 2 * 40_000
    size = (tmp_path / "free" / "1" / "model.onnx").stat().st_size
    assert found["free", "1"].managed.variants[0].bytes[HOST] == round(1.1 * size) + 4_000_000


def test_requests_in_blocks_do_not_wait_for_leased_cores(root: Path) -> None:
    """While a model that is served whole has leased all cores, and another request waits for them, they are served."""
    put(root, "all", counting(), toml="cores = 64\n")
    with local_server(root) as server, contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(server.in_flight("/v2/models/all/infer", ENDLESS))
        wait_until(lambda: server.metric("nv_inference_pending_request_count", model="all") == 1)
        assert server.infer("quick", np.ones((1, 4)))[0] == 200


def test_clients_that_leave_free_their_lanes(root: Path) -> None:
    """A request that runs ends, and one that waits is never begun, when its client has left."""
    with local_server(root) as server:
        with busy_lanes(server):
            with server.in_flight(INFER, ENDLESS):
                wait_until(lambda: server.metric("nv_inference_pending_request_count", model="slow") == 1)
            wait_until(lambda: server.metric("nv_inference_pending_request_count", model="slow") == 0)
        assert server.infer("quick", np.ones((1, 4)))[0] == 200
        assert server.infer("slow", [3.0])[1]["outputs"][0]["data"] == [3.0]
        wait_until(lambda: server.metric("chrion_request_cancelled_total", model="slow") == LANES + 1)
        assert server.metric("nv_inference_pending_request_count") == 0


def test_requests_that_wait_too_long_or_are_too_many_are_refused(root: Path) -> None:
    """A full queue is 429, and a timeout before the first block 504; both are counted, and others are served later."""
    (root / "quick" / "model.toml").write_text(f"{BLOCKS}max_queue = 1\n", encoding="utf-8")
    with local_server(root) as server, ThreadPoolExecutor(1) as pool:
        with busy_lanes(server):
            waits = pool.submit(server.infer, "quick", np.ones((1, 4)))
            wait_until(lambda: server.metric("nv_inference_pending_request_count", model="quick") == 1)
            status, found, headers = server.infer("quick", np.ones((1, 4)))
            assert (status, "too many requests" in found["error"]) == (429, True)
            assert float(headers["retry-after"]) > 0
            status, found, _ = server.infer("slow", [1.0], parameters={"timeout": 50_000})
            assert (status, "deadline passed" in found["error"]) == (504, True)
        assert waits.result(60)[0] == 200
        for reason in ("queue_full", "expired"):
            assert server.metric("chrion_requests_refused_total", reason=reason) == 1


def test_the_limit_of_all_waiting_requests_holds(root: Path) -> None:
    """``max_waiting`` counts the requests of all models in blocks."""
    policies = PolicySpec(max_waiting=1)
    with local_server(root, policies=policies) as server, busy_lanes(server), server.in_flight(INFER, ENDLESS):
        wait_until(lambda: server.metric("nv_inference_pending_request_count", model="slow") == 1)
        assert server.infer("quick", np.ones((1, 4)))[0] == 429


def test_requests_that_cannot_meet_their_objective_are_dropped_on_request(root: Path) -> None:
    """With the admission policy ``deadline``, a request that waits beyond the objective of its model is 429."""
    (root / "quick" / "model.toml").write_text(f'{BLOCKS}slo = "20ms"\n', encoding="utf-8")
    with local_server(root, policies=PolicySpec(admission="deadline")) as server, ThreadPoolExecutor(1) as pool:
        with busy_lanes(server):
            waits = pool.submit(server.infer, "quick", np.ones((1, 4)))
            wait_until(lambda: server.metric("nv_inference_pending_request_count", model="quick") == 1)
            threading.Event().wait(0.05)
        status, found, _ = waits.result(60)
        assert (status, "latency objective" in found["error"]) == (429, True)


def test_a_run_that_takes_too_long_is_terminated(root: Path) -> None:
    """Its request fails with its limit, also inside of a block, and its lane serves others."""
    (root / "slow" / "model.toml").write_text(f'{BLOCKS}max_run = "200ms"\n', encoding="utf-8")
    with local_server(root) as server:
        with ThreadPoolExecutor(LANES) as pool:
            for status, body, _ in pool.map(lambda _: server.infer("slow", [1e15]), range(LANES)):
                assert (status, "max_run of 200 ms" in body["error"]) == (504, True)
        assert server.infer("quick", np.ones((1, 4)))[0] == 200


def test_the_wait_for_a_lane_is_no_part_of_a_run(root: Path) -> None:
    """A request that waits for longer than ``max_run`` before its first block is served."""
    (root / "quick" / "model.toml").write_text(f'{BLOCKS}max_run = "50ms"\n', encoding="utf-8")
    with local_server(root) as server, ThreadPoolExecutor(1) as pool:
        with busy_lanes(server):
            waits = pool.submit(server.infer, "quick", np.ones((1, 4)))
            wait_until(lambda: server.metric("nv_inference_pending_request_count", model="quick") == 1)
            time.sleep(0.2)
            assert not waits.done()
        assert waits.result(60)[0] == 200


def test_a_model_stays_in_memory_while_a_block_of_it_runs(
    tmp_path: Path, held: tuple[threading.Event, threading.Event]
) -> None:
    """Also if the client has left: it is evicted for another model when the block has ended."""
    free, begun = held
    put(tmp_path, "a", fixed(product()), toml=BLOCKS)
    put(tmp_path, "b", product())
    with local_server(tmp_path, memory_mb=6.0) as server, ThreadPoolExecutor(1) as pool:
        assert server.infer("a", np.ones((1, 4)))[0] == 200
        before = server.metric("chrion_model_evictions_total", model="a")
        free.clear()
        begun.clear()
        with server.in_flight("/v2/models/a/infer", infer_body(np.ones((1, 4)))):
            wait_until(begun.is_set)
        wait_until(lambda: server.metric("chrion_request_cancelled_total", model="a") == 1)
        other = pool.submit(server.infer, "b", np.ones((1, 4)))
        wait_until(lambda: server.metric("nv_inference_pending_request_count", model="b") == 1)
        assert server.metric("chrion_model_evictions_total", model="a") == before
        free.set()
        assert other.result(60)[0] == 200
        assert server.metric("chrion_model_evictions_total", model="a") == before + 1


def test_a_block_that_raises_fails_its_own_request(tmp_path: Path) -> None:
    """The answer has the message of onnxruntime, and other requests are served."""
    indices = helper.make_tensor_value_info("x", TensorProto.INT64, [1])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    table = helper.make_tensor("t", TensorProto.FLOAT, [3], [5.0, 6.0, 7.0])
    graph = helper.make_graph([helper.make_node("Gather", ["t", "x"], ["y"])], "g", [indices], [out], [table])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    put(tmp_path, "table", model, toml=BLOCKS)
    with local_server(tmp_path) as server:
        status, found, _ = server.infer("table", [9], "INT64")
        assert status in (400, 500)
        assert "indices element out of data bounds" in found["error"]
        assert server.infer("table", [2], "INT64")[1]["outputs"][0]["data"] == [7.0]
        assert server.metric("nv_inference_request_failure", model="table") == 1


def test_a_model_can_be_removed_while_its_requests_run(root: Path) -> None:
    """They are served; further ones are refused until it is loaded again."""
    with local_server(root, control="explicit", load=("*",)) as server, ThreadPoolExecutor(1) as pool:
        with busy_lanes(server):
            waits = pool.submit(server.infer, "quick", np.ones((1, 4)))
            wait_until(lambda: server.metric("nv_inference_pending_request_count", model="quick") == 1)
            assert server.get("/v2/repository/models/quick/unload", b"")[0] == 200
            assert server.infer("quick", np.ones((1, 4)))[0] == 503
        assert waits.result(60)[0] == 200
        assert server.get("/v2/repository/models/quick/load", b"")[0] == 200
        assert server.infer("quick", np.ones((1, 4)))[0] == 200


def test_the_end_of_a_server_ends_endless_requests(root: Path) -> None:
    """After the time for requests in flight, those that run are terminated and those that wait never begin."""
    with ThreadPoolExecutor(LANES + 1) as pool:
        with local_server(root, drain_s=0.2) as server:
            asked = [pool.submit(server.infer, "slow", [1e15]) for _ in range(LANES + 1)]
            wait_until(lambda: server.metric("nv_inference_pending_request_count", model="slow") == 1)
        assert [future.result(60)[0] for future in asked] == [503] * (LANES + 1)


def test_the_end_of_a_server_does_not_wait_for_a_block(
    root: Path, held: tuple[threading.Event, threading.Event]
) -> None:
    """A block that cannot be terminated, such as a single long operator, does not keep the server from its end."""
    free, _ = held
    with ThreadPoolExecutor(LANES + 1) as pool:
        with local_server(root, drain_s=0.2) as server:
            assert server.infer("quick", np.ones((1, 4)))[0] == 200
            free.clear()
            asked = [pool.submit(server.infer, "quick", np.ones((1, 4))) for _ in range(LANES + 1)]
            wait_until(lambda: server.metric("nv_inference_pending_request_count", model="quick") == 1)
            begin = time.monotonic()
        assert time.monotonic() - begin < 60
        assert [future.result(60)[0] for future in asked] == [503] * (LANES + 1)


@pytest.mark.parametrize(
    ("model", "toml", "reason"),
    [
        (product(), 'blocks = "5ms"\n[batching]\n', "without [batching]"),
        (product(), 'blocks = "5ms"\ncores = 2\n', "one core"),
        (product(), 'blocks = "5ms"\n[variants.gpu]\ndevice = "accelerator"\n[variants.cpu]\ncores = 3\n', "one core"),
        (product(), 'blocks = "short"\n', "expected a duration"),
        (product(), 'blocks = "10us"\n', "at least 0.1 ms"),
        (identity("BF16"), 'blocks = "5ms"\n', "BF16"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, model: Any, toml: str, reason: str) -> None:
    """The index has the reason, and the other models are served."""
    put(tmp_path, "wrong", model, toml=toml)
    put(tmp_path, "right", product())
    with local_server(tmp_path) as server:
        found = {entry["name"]: entry for entry in server.get("/v2/repository/index", b"")[1]}
        assert found["wrong"]["state"] == "UNAVAILABLE"
        assert reason in found["wrong"]["reason"], found["wrong"]
        assert server.infer("right", np.ones((1, 4)))[0] == 200
