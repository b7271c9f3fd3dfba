"""The state that a replica reports to the router."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("grpc")

from chrion.manager import ManagerPolicies, ModelManager
from chrion.manager.records import HOST
from chrion.server.core import ServingCore
from chrion.server.grace import Grace
from chrion.server.replica_state import read_state
from chrion.server.repository import ServedVersion, scan
from server_process import product, put


def test_the_state_names_what_is_in_memory(tmp_path: Path) -> None:
    """A pinned model is a home from the start of its load, a model above the budget is unfit, and loads take time."""
    put(tmp_path, "a", product(seed=1), toml="pinned = true")
    put(tmp_path, "a", product(seed=2), version=2)
    put(tmp_path, "b", product())
    put(tmp_path, "large", product(side=2000))

    async def report() -> None:
        manager = ModelManager({HOST: 10_000_000}, [0], slots=0, policies=ManagerPolicies(prefetch=False))
        core = ServingCore(manager, [0])
        core.start()
        for entry in scan(tmp_path, accelerator=False).values():
            assert isinstance(entry, ServedVersion)
            core.add(entry)
        state = read_state(core, 0.0, 3, "node")
        assert state.homes == {"a/1", "a/2", "a/"}
        assert state.unfit == {"b/1", "b/", "large/1", "large/"}  # beside the pinned ones
        assert state.load_wait_ms > 0
        assert state.load_ms > 0
        assert state.free_bytes < 10_000_000
        assert (state.number, state.node) == (3, "node")
        await core.close(Grace(0.0))

    asyncio.run(report())
