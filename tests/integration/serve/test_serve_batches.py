"""Batches of requests: one that fails does not fail the others, and a batch may be what has already come."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from chrion.serving.server.batching import Batch
from chrion.serving.server.tensors import TensorSpec
from helpers import FLOAT, INT64, make_model, node, value
from local_server import LocalServer, local_server
from model_repository import product, put

OFFERED = (TensorSpec("y", "FP32", (-1,)),)
TOML = "cores = 64\n[batching]\nmax_size = 16\nmax_delay = '50ms'\n"


def table() -> onnx.ModelProto:
    """Build ``y = table[x]`` with ten rows, which raises for other indices."""
    weights = {"table": np.arange(10, dtype=np.float32) * 2}
    nodes = [node("Gather", ["table", "x"], ["y"])]
    return make_model(nodes, [value("x", INT64, ["n"])], [value("y", FLOAT, ["n"])], weights)


def ask_all(server: LocalServer, indices: list[int]) -> list[tuple[int, Any]]:
    """Send a request for each index at the same time; return the statuses and the documents."""
    with ThreadPoolExecutor(len(indices)) as clients:
        found = clients.map(lambda index: server.infer("m", [index], "INT64"), indices)
        return [(status, document) for status, document, _ in found]


def test_a_request_that_raises_fails_alone(tmp_path: Path) -> None:
    """The others of its batch get their answers, and it gets a message of its own."""
    put(tmp_path, "m", table(), toml=TOML)
    with local_server(tmp_path) as server:
        for bad in (99, 77):
            indices = [0, 1, 2, bad, 4, 5, 6, 7]
            for index, (status, document) in zip(indices, ask_all(server, indices), strict=True):
                if index == bad:
                    assert (status >= 400, f"idx={bad}" in document["error"]) == (True, True), document
                else:
                    assert (status, document["outputs"][0]["data"]) == (200, [2.0 * index]), document
        sizes = server.get("/v2/models/m/stats")[1]["model_stats"][0]["batch_stats"]
        assert max(entry["batch_size"] for entry in sizes) > 1
        assert server.metric("nv_inference_request_success") == 14
        assert server.metric("nv_inference_request_failure") == 2


class CountingSession:
    """Adds one, raises for rows that are negative, and for batches that are too large; counts its runs."""

    def __init__(self, most: int = 1 << 20) -> None:
        self.runs = 0
        self.most = most

    def run(self, outputs: Any, feeds: Any, options: Any) -> list[Any]:
        del outputs, options
        self.runs += 1
        x = feeds["x"][1]
        if len(x) > self.most:
            raise MemoryError("failed to allocate memory")
        if x.min() < 0:
            raise RuntimeError(f"row {x.min():g}")
        return [x + 1]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 64])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_the_runs_of_a_batch_are_bounded(count: int, share: float) -> None:
    """Without failures there is one run; with failures at most two for each request, and few if one of them fails."""
    rng = np.random.default_rng(count)
    bad = set(rng.choice(count, round(share * count), replace=False).tolist())
    feeds = [{"x": ("FP32", np.array([-i - 1 if i in bad else i], np.float32))} for i in range(count)]
    session: Any = CountingSession()
    result = Batch(feeds, [OFFERED] * count, OFFERED).run(session, None)
    for i, found in enumerate(result.outputs):
        if i in bad:
            assert str(found) == f"row {-i - 1}"
        else:
            assert not isinstance(found, Exception)
            assert found[0].tolist() == [i + 1]
    assert result.failed == bool(bad)
    assert session.runs <= 2 * count - 1
    if len(bad) <= 1:
        assert session.runs <= 2 * int(np.ceil(np.log2(count))) * len(bad) + 1


def test_a_batch_without_memory_runs_in_parts() -> None:
    """A lack of memory for all of them at once is none for a part of them, and fails no request."""
    feeds = [{"x": ("FP32", np.array([i], np.float32))} for i in range(16)]
    session: Any = CountingSession(most=4)
    result = Batch(feeds, [OFFERED] * 16, OFFERED).run(session, None)
    assert [found[0].tolist() for found in result.outputs if not isinstance(found, Exception)] == [
        [i + 1] for i in range(16)
    ]
    assert session.runs == 7


def test_a_delay_of_zero_does_not_wait(tmp_path: Path) -> None:
    """``max_delay = "0ms"`` joins what waits for cores, and lets no request wait for others."""
    put(tmp_path, "m", product(), toml="[batching]\nmax_delay = '0ms'\n")
    put(tmp_path, "negative", product(), toml="[batching]\nmax_delay = '-1ms'\n")
    with local_server(tmp_path) as server:
        assert server.infer("m", np.ones((1, 4), np.float32))[0] == 200
        reasons = {entry["name"]: entry["reason"] for entry in server.get("/v2/repository/index", b"")[1]}
        assert reasons["m"] == ""
        assert "batching.max_delay" in reasons["negative"]
