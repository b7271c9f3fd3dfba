"""Overhead of the server: a trivial model in a plain session, and behind Chrion, Starlette alone and Ray Serve alone.

All servers get the same JSON body from the same client and run at the same time; they are measured in turns, in many
short rounds, so that the machine's moods are those of all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from chrion.common.files import write_atomically
from chrion.serving.replay.http_client import HttpClient
from model_serving.servers import chrion_server, free_port, plain_server, running

#: Least number of rounds, requests of a round one after another, connections and requests of a round with several.
ROUNDS, SINGLE, CONNECTIONS, TOGETHER = 5, 60, 8, 160
SERVERS = ("session", "chrion", "starlette", "ray serve")
PATH = "/v2/models/trivial/infer"
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]}).encode()


def measure(folder: Path, seconds: float, only: Sequence[str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the row of each server: quantiles of the time of a request in ms, and requests per second.

    Args:
        folder: Where the model is written.
        seconds: Time to measure.
        only: Names of servers; None for all that are installed.
    """
    root = folder / "trivial-repository"
    model = root / "trivial" / "1" / "model.onnx"
    if not model.exists():
        model.parent.mkdir(parents=True)
        write_atomically(model, _trivial().SerializeToString())
    names = [name for name in SERVERS if name in (only or SERVERS)]
    if find_spec("ray") is None and "ray serve" in names:
        names.remove("ray serve")
        print("ray serve: not installed, left out", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        urls = {name: stack.enter_context(_server(name, root)) for name in names if name != "session"}
        session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
        rows = asyncio.run(_rounds(names, urls, session, seconds))
    yield from rows.items()


def _trivial() -> onnx.ModelProto:
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "trivial", infos[:1], infos[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def _server(name: str, root: Path) -> contextlib.AbstractContextManager[str]:
    if name == "chrion":
        return chrion_server(root, 100.0, "lru")
    if name == "starlette":
        return plain_server(root, 100.0)
    port = free_port()
    script = Path(__file__).with_name("ray_server.py")
    model = root / "trivial" / "1" / "model.onnx"
    return running([sys.executable, str(script), str(model), str(port)], port, "/-/healthz")


async def _rounds(
    names: Sequence[str], urls: dict[str, str], session: ort.InferenceSession, seconds: float
) -> dict[str, dict[str, Any]]:
    clients = {name: HttpClient(url, {}) for name, url in urls.items()}
    single: dict[str, list[float]] = {name: [] for name in names}
    rates: dict[str, list[float]] = {name: [] for name in names}
    for client in clients.values():
        await _together(client)  # opens the connections
    end, done = time.monotonic() + seconds, 0
    while done < ROUNDS or time.monotonic() < end:
        done += 1
        for name in names:
            if name == "session":
                took = _in_process(session)
                rates[name].append(1000 / statistics.mean(took))
            else:
                took = [await _once(clients[name]) for _ in range(SINGLE)]
                rates[name].append(await _together(clients[name]))
            single[name] += took
    for client in clients.values():
        await client.close()
    return {
        name: {
            "p50_ms": float(np.quantile(single[name], 0.5)),
            "p99_ms": float(np.quantile(single[name], 0.99)),
            "per_s": statistics.median(rates[name]),
            "rounds": done,
        }
        for name in names
    }


def _in_process(session: ort.InferenceSession) -> list[float]:
    """Return the times of runs of a plain session."""
    feed, took = {"x": np.ones(1, np.float32)}, []
    for _ in range(SINGLE):
        began = time.perf_counter()
        session.run(None, feed)
        took.append((time.perf_counter() - began) * 1000)
    return took


async def _once(client: HttpClient) -> float:
    began = time.perf_counter()
    answer = await client.request("POST", PATH, BODY)
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {answer.body[:200]!r}")
    return (time.perf_counter() - began) * 1000


async def _together(client: HttpClient) -> float:
    """Return the requests per second of several connections."""

    async def several() -> None:
        for _ in range(TOGETHER // CONNECTIONS):
            await _once(client)

    began = time.perf_counter()
    await asyncio.gather(*(several() for _ in range(CONNECTIONS)))
    return TOGETHER / (time.perf_counter() - began)
