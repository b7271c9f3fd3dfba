"""What the server is compared with: Starlette on uvicorn, and plain sessions, opened on request and evicted by LRU.

    python scripts/model_serving/plain_server.py REPOSITORY PORT BUDGET_MB

It has the parts of the protocol that ``chrion replay`` uses: metadata, inference with binary tensors, and metrics.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from chrion.serving.server.settings import read_settings
from chrion.serving.server.tensors import DTYPES

LENGTH = "Inference-Header-Content-Length"


class PlainSessions:
    """Sessions of a repository within a budget; the least recently used one is closed for another.

    Args:
        root: The repository.
        budget_mb: Memory for models, as their ``model.toml`` states it for the first variant.
    """

    def __init__(self, root: Path, budget_mb: float) -> None:
        self.budget_mb = budget_mb
        self.loads: Counter[str] = Counter()
        self.sizes_mb = {path.name: self._size(path) for path in root.iterdir()}
        self._root = root
        self._open: OrderedDict[str, ort.InferenceSession] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str) -> ort.InferenceSession:
        """Return a model's session; open it, one at a time, if it is not in memory."""
        with self._lock:
            if name in self._open:
                self._open.move_to_end(name)
                return self._open[name]
            while self._open and self.used_mb() + self.sizes_mb[name] > self.budget_mb:
                self._open.popitem(last=False)
            session = ort.InferenceSession(self._root / name / "1" / "model.onnx", providers=["CPUExecutionProvider"])
            self._open[name] = session
            self.loads[name] += 1
            return session

    def used_mb(self) -> float:
        """Return the memory of the open sessions."""
        return sum(self.sizes_mb[name] for name in self._open)

    def _size(self, folder: Path) -> float:
        variants = list(read_settings(folder / "model.toml").variants.values())
        return variants[0].host_mb if variants else 1.0


def build_app(sessions: PlainSessions) -> Starlette:
    """Return the application."""
    threads = ThreadPoolExecutor(8)

    async def infer(request: Request) -> Response:
        body = await request.body()
        name = request.path_params["name"]
        if name not in sessions.sizes_mb:
            return JSONResponse({"error": "unknown model"}, 404)
        size = int(request.headers.get(LENGTH, len(body)))
        feeds = _feeds(json.loads(body[:size]), body[size:])
        loop = asyncio.get_running_loop()
        return JSONResponse(await loop.run_in_executor(threads, _run, sessions, name, feeds))

    async def metadata(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in sessions.sizes_mb:
            return JSONResponse({"error": "unknown model"}, 404)
        inputs = [{"name": "x", "datatype": "FP32", "shape": [1]}]  # as all models of the benchmark have it
        return JSONResponse({"name": name, "inputs": inputs})

    async def metrics(request: Request) -> Response:
        del request
        lines = [f'chrion_model_loads_total{{model="{n}"}} {sessions.loads[n]}' for n in sessions.sizes_mb]
        lines.append(f'chrion_memory_used_bytes{{device="host"}} {sessions.used_mb() * 1e6}')
        lines.append(f'chrion_memory_budget_bytes{{device="host"}} {sessions.budget_mb * 1e6}')
        return Response("\n".join(lines) + "\n", media_type="text/plain")

    return Starlette(
        routes=[
            Route("/v2/models/{name}/infer", infer, methods=["POST"]),
            Route("/v2/models/{name}", metadata),
            Route("/metrics", metrics),
        ]
    )


def _feeds(document: dict[str, Any], binary: bytes) -> dict[str, Any]:
    feeds, at = {}, 0
    for entry in document["inputs"]:
        kind = DTYPES[entry["datatype"]]
        if "data" in entry:
            array = np.array(entry["data"], kind)
        else:
            size = entry["parameters"]["binary_data_size"]
            array = np.frombuffer(binary[at : at + size], kind)
            at += size
        feeds[entry["name"]] = array.reshape(entry["shape"])
    return feeds


def _run(sessions: PlainSessions, name: str, feeds: dict[str, Any]) -> dict[str, Any]:
    session = sessions.get(name)
    names = [info.name for info in session.get_outputs()]
    found = session.run(names, feeds)
    outputs = [
        {"name": n, "datatype": "FP32", "shape": list(np.shape(a)), "data": np.ravel(a).tolist()}
        for n, a in zip(names, found, strict=True)
    ]
    return {"model_name": name, "outputs": outputs}


if __name__ == "__main__":
    _, repository, port, budget = sys.argv
    application = build_app(PlainSessions(Path(repository), float(budget)))
    uvicorn.run(application, host="127.0.0.1", port=int(port), log_level="error", http="h11")
