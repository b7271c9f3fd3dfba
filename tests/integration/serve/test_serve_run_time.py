"""The time that a run may take: an endless model is terminated, its clients are told, and its cores serve others."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import onnx
import pytest

from chrion import HybridSession, load
from chrion.native import available
from chrion.scheduler import fixed_plan
from chrion.serving.server.grpc_codec import SERVICE, message
from helpers import alternating_lanes
from local_server import local_server
from model_repository import counting, product, put
from server_client import infer_body, wait_until

ROWS = np.ones((1, 4), np.float32)
#: Counts that take years.
ENDLESS = [1e15]
FOREVER = infer_body(ENDLESS)


def put_both(root: Path, toml: str = "") -> Path:
    """Put a model that counts on all cores, and a quick one, into a repository; return it."""
    put(root, "slow", counting(), toml=f"cores = 64\n{toml}")
    put(root, "quick", product(), toml="cores = 64\n")
    return root


def plan_counting(root: Path) -> None:
    """Add a plan on two lanes, which has fixed shapes, to the model that counts."""
    model = counting()
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.shape.dim[0].dim_value = 1
    graph = load(put(root, "slow", onnx.shape_inference.infer_shapes(model)))
    plan = fixed_plan(graph, alternating_lanes(graph))
    plan.save(root / "slow" / "1" / "lanes.plan.json")
    with HybridSession(graph, plan=plan, tune="never") as session:
        assert "native lanes" in session.explain() or not available()


@pytest.mark.parametrize("toml", ["", 'max_run = "200ms"\n'], ids=["server", "model"])
def test_a_run_that_takes_too_long_is_terminated(tmp_path: Path, toml: str) -> None:
    """Its request fails with the limit of the server or of the model, and other models get its cores."""
    limit_s = 3600.0 if toml else 0.2
    with local_server(put_both(tmp_path, toml), max_run_s=limit_s) as server:
        status, body, _ = server.infer("slow", ENDLESS, parameters={"timeout": 60_000_000})
        assert (status, body["error"]) == (504, "model 'slow': a run took longer than its max_run of 200 ms")
        assert server.infer("quick", ROWS)[0] == 200
        assert server.infer("slow", [3.0])[1]["outputs"][0]["data"] == [3.0]
        assert server.metric("nv_inference_request_failure", model="slow") == 1


def test_a_run_is_not_terminated_before_its_own_limit(tmp_path: Path) -> None:
    """Runs with different limits end at their own ones, in whatever order they began."""
    for name, limit in (("patient", "2s"), ("hasty", "200ms")):
        put(tmp_path, name, counting(), toml=f'max_run = "{limit}"\n')
    ended: list[str] = []
    with local_server(tmp_path) as server, ThreadPoolExecutor(2) as pool:

        def ask(name: str) -> str:
            error = str(server.infer(name, ENDLESS)[1]["error"])
            ended.append(name)
            return error

        first = pool.submit(ask, "patient")
        wait_until(server.computes)
        second = pool.submit(ask, "hasty")
        assert "max_run of 200 ms" in second.result(60)
        assert "max_run of 2.00 s" in first.result(60)
    assert ended == ["hasty", "patient"]


def test_grpc_clients_see_that_the_time_is_over(tmp_path: Path) -> None:
    """The call ends with DEADLINE_EXCEEDED and the same text."""
    entry = {"name": "x", "datatype": "FP32", "shape": [1], "contents": {"fp32_contents": ENDLESS}}
    request = message("ModelInferRequest")(model_name="slow", inputs=[entry]).SerializeToString()
    with (
        local_server(put_both(tmp_path), max_run_s=0.2) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel,
    ):
        with pytest.raises(grpc.RpcError) as late:
            channel.unary_unary(f"/{SERVICE}/ModelInfer")(request)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "max_run of 200 ms" in late.value.details()
        assert server.infer("quick", ROWS)[0] == 200


def test_a_run_on_a_plan_is_terminated(tmp_path: Path) -> None:
    """All lanes of a plan stop, and serve the next request."""
    put_both(tmp_path, 'max_run = "200ms"\n')
    plan_counting(tmp_path)
    with local_server(tmp_path) as server:
        for _ in range(3):
            status, body, _ = server.infer("slow", ENDLESS)
            assert (status, "max_run" in body["error"]) == (504, True)
            assert server.infer("quick", ROWS)[0] == 200
        assert server.metric("chrion_model_resident_bytes", model="slow", variant="lanes") > 0
        assert server.infer("slow", [7.0])[1]["outputs"][0]["data"] == [7.0]


@pytest.mark.parametrize("planned", [False, True], ids=["plain", "plan"])
def test_the_run_of_clients_that_leave_is_terminated(tmp_path: Path, *, planned: bool) -> None:
    """A batch, or a plan, whose clients have all left frees its cores; while one of them waits it goes on."""
    put_both(tmp_path, "" if planned else '[batching]\nmax_size = 2\nmax_delay = "60s"\n')
    if planned:
        plan_counting(tmp_path)
    with local_server(tmp_path) as server:
        with server.in_flight("/v2/models/slow/infer", FOREVER):
            if not planned:
                with server.in_flight("/v2/models/slow/infer", FOREVER):
                    wait_until(server.computes)
            wait_until(server.computes)
            assert server.infer("quick", ROWS, parameters={"timeout": 100_000})[0] == 504
        assert server.infer("quick", ROWS)[0] == 200


def test_the_end_of_a_server_terminates_endless_runs(tmp_path: Path) -> None:
    """After the time for requests in flight, their runs end, and those that waited do not begin."""
    before = {*threading.enumerate()}

    def workers() -> list[str]:
        return [t.name for t in threading.enumerate() if t not in before and t.name.startswith("chrion-worker")]

    with ThreadPoolExecutor(3) as pool:
        with local_server(put_both(tmp_path), drain_s=0.2) as server:
            asked = [pool.submit(server.infer, "slow", ENDLESS) for _ in range(3)]
            wait_until(workers)
            wait_until(lambda: server.metric("nv_inference_pending_request_count", model="slow") == 2)
        assert [future.result(60)[0] for future in asked] == [503] * 3
    wait_until(lambda: not workers(), 30)
