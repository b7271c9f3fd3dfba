"""Ray Serve alone with one model, for comparison.

    python scripts/model_serving/ray_server.py MODEL PORT

The local cluster ends with this process.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import ray
from ray import serve
from starlette.requests import Request


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Model:
    """A plain session.

    Args:
        path: The model.
    """

    def __init__(self, path: str) -> None:
        self._session = ort.InferenceSession(Path(path), providers=["CPUExecutionProvider"])

    async def __call__(self, request: Request) -> dict[str, Any]:
        """Answer an inference request with JSON data."""
        document = await request.json()
        feeds = {e["name"]: np.array(e["data"], np.float32).reshape(e["shape"]) for e in document["inputs"]}
        names = [info.name for info in self._session.get_outputs()]
        outputs = [
            {"name": n, "datatype": "FP32", "shape": list(np.shape(a)), "data": np.ravel(a).tolist()}
            for n, a in zip(names, self._session.run(names, feeds), strict=True)
        ]
        return {"model_name": "trivial", "outputs": outputs}


def main() -> None:
    """Serve until SIGTERM."""
    _, model, port = sys.argv
    stop = threading.Event()
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(Model.bind(str(Path(model).absolute())), route_prefix="/")  # type: ignore[attr-defined] # from the decorator
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
