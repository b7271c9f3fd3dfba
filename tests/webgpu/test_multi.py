"""Several models, one of them on a second device."""

from __future__ import annotations

import numpy as np

from chrion import MultiSession
from chrion.zoo import build

SMALL = {"resolution": 32, "width": 0.25}
FEED = {"X": np.random.default_rng(0).random((1, 3, 32, 32), np.float32)}


def test_a_model_on_the_device_runs_beside_blocks_on_the_cores() -> None:
    """Tasks of both are served at the same time, each on its own lanes, with the outputs of the CPU."""
    models = {"device": build("squeezenet", SMALL), "host": build("squeezenet", SMALL)}
    with (
        MultiSession(models, accelerators={"device": "webgpu"}, cores=1, deadlines="60s") as session,
        session.record() as spans,
    ):
        futures = {name: [session.submit(name, FEED) for _ in range(6)] for name in models}
        outputs = {name: [future.result(120)["Y"] for future in own] for name, own in futures.items()}
        assert "WebGpuExecutionProvider" in session.explain()
    for output in outputs["device"]:
        np.testing.assert_allclose(output, outputs["host"][0], rtol=1e-3, atol=1e-5)
    assert {span.lane for span in spans if span.model == "host"} == {0}
    assert {span.lane for span in spans if span.model == "device"} <= {1, 2}
