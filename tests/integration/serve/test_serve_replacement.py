"""Models that are replaced or removed while requests wait for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.serving.manager import LiveManager
from chrion.serving.manager.records import HOST, Reason
from chrion.serving.server.core import ServingCore
from chrion.serving.server.failures import Status
from chrion.serving.server.grace import Grace
from chrion.serving.server.repository import scan
from model_repository import counting, product, put

ROWS = {"x": ("FP32", np.ones((1, 4), np.float32))}


def waiting_request(root: Path, then: Any) -> tuple[Any, int]:
    """Return the result of a request that waits for memory while ``then(core)`` changes its model.

    The second value is the number of requests that counted as refused since their model was removed.
    """
    put(root, "slow", counting())
    put(root, "m", product(seed=1))

    async def run() -> tuple[Any, int]:
        core = ServingCore(LiveManager({HOST: 6_000_000}, [0]), [0])
        core.start()
        for version in scan(root, accelerator=False).values():
            core.add(version)
        slow = asyncio.create_task(core.infer(core.models["slow", "1"], {"x": ("FP32", np.array([1e15], np.float32))}))
        async with asyncio.timeout(60):
            while not core.manager.running:  # noqa: ASYNC110 - the manager has no event for it
                await asyncio.sleep(0.01)
            waiting = asyncio.create_task(core.infer(core.models["m", "1"], ROWS))
            while core.in_flight < 2:  # noqa: ASYNC110 - the core has no event for it
                await asyncio.sleep(0.01)
            then(core)
            await asyncio.sleep(0.1)
            slow.cancel()
            result = await asyncio.gather(waiting, return_exceptions=True)
        await core.close(Grace(10.0))
        return result[0], core.refused[Reason.REMOVED]

    return asyncio.run(run())


def test_a_request_that_waits_is_answered_by_the_replacement_of_its_model(tmp_path: Path) -> None:
    """A model that is replaced does not fail the requests that wait for its load."""

    def replace(core: Any) -> None:
        put(tmp_path, "m", product(seed=2))
        core.add(scan(tmp_path, accelerator=False)["m", "1"])

    result, refused = waiting_request(tmp_path, replace)
    assert refused == 0
    (expected,) = ort.InferenceSession(tmp_path / "m" / "1" / "model.onnx").run(None, {"x": ROWS["x"][1]})
    assert np.array_equal(result.outputs[0][1], expected)
    with result.counted():
        pass
    assert result.served.statistics.success.count == 1


def test_a_replacement_with_other_inputs_refuses_the_request(tmp_path: Path) -> None:
    """The request is checked against the model that would answer it."""

    def replace(core: Any) -> None:
        put(tmp_path, "m", product(5, seed=2))
        core.add(scan(tmp_path, accelerator=False)["m", "1"])

    failure, refused = waiting_request(tmp_path, replace)
    assert refused == 0
    assert failure.status is Status.INVALID
    assert "expected shape [-1, 5]" in failure.message


def test_a_request_whose_model_is_removed_fails(tmp_path: Path) -> None:
    """Without a replacement the request is refused at once."""
    failure, refused = waiting_request(tmp_path, lambda core: core.remove(("m", "1")))
    assert refused == 1
    assert failure.status is Status.UNAVAILABLE
    assert "the model was unloaded" in failure.message
