"""The arena that sessions of a process share: whose it is, and its limit."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from chrion.runtime.shared_arena import SharedArena, missing_bytes, use_shared_arena
from chrion.serving.multi.session import MultiSession
from model_repository import product

#: 16 MB of inputs, and as much of outputs.
ROWS = np.ones((1_000_000, 4), np.float32)


def run() -> None:
    """Run a model, for whose output there has to be memory, in a session that is opened now."""
    options = ort.SessionOptions()
    use_shared_arena(options)
    session = ort.InferenceSession(product().SerializeToString(), options, providers=["CPUExecutionProvider"])
    session.run(None, {"x": ROWS})


def test_the_limit_holds_for_sessions_until_the_arena_is_closed() -> None:
    """Sessions that are opened later have no limit, and an arena that is not the last one cannot take it from them."""
    small = SharedArena(4_000_000)
    with pytest.raises(Exception, match="Available memory") as missing:
        run()
    assert missing_bytes(missing.value) == ROWS.nbytes
    large = SharedArena(40_000_000)
    run()
    small.close()
    with pytest.raises(Exception, match="Available memory"), MultiSession({"m": product()}) as session:
        session.submit("m", {"x": np.ones((3_000_000, 4), np.float32)}).result(60)
    large.close()
    with MultiSession({"m": product()}) as session:
        assert session.submit("m", {"x": np.ones((3_000_000, 4), np.float32)}).result(60)["y"].shape == (3_000_000, 4)
