"""The state that a replica reports to the router."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from chrion.serving.manager import LiveManager, PolicySpec
from chrion.serving.manager.records import HOST
from chrion.serving.server.core import ServingCore
from chrion.serving.server.grace import Grace
from chrion.serving.server.replica_state import StateReports
from chrion.serving.server.repository import ServedVersion, scan
from model_repository import product, put


def start_core(root: Path) -> ServingCore:
    """Return a core that serves a repository within 10 MB and loads nothing in advance; called in an event loop."""
    manager = LiveManager({HOST: 10_000_000}, [0], slots=0, policies=PolicySpec(prefetch=False))
    core = ServingCore(manager, [0])
    core.start()
    for entry in scan(root, accelerator=False).values():
        assert isinstance(entry, ServedVersion)
        core.add(entry)
    return core


def test_the_state_names_what_is_in_memory(tmp_path: Path) -> None:
    """A pinned model is a home from the start of its load, and a model above the budget is unfit."""
    put(tmp_path, "a", product(seed=1), toml="pinned = true")
    put(tmp_path, "a", product(seed=2), version=2)
    put(tmp_path, "b", product())
    put(tmp_path, "large", product(side=2000))

    async def report() -> None:
        core = start_core(tmp_path)
        state = StateReports(core, "node").latest(0.0)
        assert state.homes == {"a/1", "a/2", "a/"}
        assert state.unfit == {"b/1", "b/", "large/1", "large/"}  # beside the pinned ones
        assert state.free_bytes < 10_000_000
        assert (state.number, state.node) == (0, "node")
        await core.close(Grace(0.0))

    asyncio.run(report())


def test_the_report_after_a_load_is_new(tmp_path: Path) -> None:
    """The report with the answer to a model's first request shows its memory, however short the load was."""
    put(tmp_path, "a", product())

    async def report() -> None:
        core = start_core(tmp_path)
        reports = StateReports(core, "node")
        before = reports.latest(1000.0)
        assert before.homes == set()
        feeds = {"x": ("FP32", np.ones((1, 4), np.float32))}
        await core.infer(core.models["a", "1"], feeds)
        after = reports.latest(1000.0)
        assert after.homes == {"a/1", "a/"}
        assert after.free_bytes < before.free_bytes
        await core.infer(core.models["a", "1"], feeds)
        assert reports.latest(1001.0) is after  # nothing was loaded since
        assert reports.latest(1100.0).number == after.number + 1
        core.remove(("a", "1"))
        assert reports.latest(1100.0).free_bytes == before.free_bytes
        await core.close(Grace(0.0))

    asyncio.run(report())
