"""Lanes of blocks: tasks that are stopped, and the end, with blocks that a test can hold."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import onnxruntime as ort
import pytest

from chrion.errors import DroppedError
from chrion.runtime.block_chain import BlockChain, BlockRun
from chrion.serving.multi.block_lanes import BlockLanes
from chrion.serving.multi.dispatcher import Dispatcher, ModelRules
from server_client import wait_until

BLOCKS = 3


class HeldRun(BlockRun):
    """A request whose blocks wait for an event, and note that they run."""

    def __init__(self, free: threading.Event, ran: list[int]) -> None:
        self._free, self._ran = free, ran

    def begin(self, feed: Mapping[str, Any]) -> None:
        pass

    def run(self, block: int, options: ort.RunOptions | None = None) -> None:
        del options
        self._ran.append(block)
        assert self._free.wait(60)

    def outputs(self) -> list[Any]:
        return [len(self._ran)]

    def clear(self) -> None:
        pass


class Held:
    """One lane, a model of three blocks, and the event that lets them end."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.ran: list[int] = []
        chain = BlockChain((), ["y"], lambda: HeldRun(self.free, self.ran), BLOCKS, "")
        rules = {"m": ModelRules((1.0,) * BLOCKS)}
        self.lanes = BlockLanes({"m": chain}, rules, 1, functools.partial(Dispatcher, rules, 1, "fifo"), cores=1)


@pytest.fixture
def held() -> Iterator[Held]:
    one = Held()
    yield one
    one.free.set()
    one.lanes.close()


def test_a_stopped_task_ends_with_the_block_that_runs(held: Held) -> None:
    """A task that waits is over at once; one that runs keeps its lane until its block ends, and runs no other."""
    first, second = (held.lanes.submit("m", {}) for _ in range(2))
    wait_until(lambda: held.ran == [0])
    second.stop()
    with pytest.raises(DroppedError, match="stopped"):
        second.result(0)
    first.stop()
    assert not first.done()
    held.free.set()
    with pytest.raises(DroppedError, match="stopped"):
        first.result(60)
    assert held.lanes.submit("m", {}).result(60) == {"y": 1 + BLOCKS}
    assert held.ran == [0, *range(BLOCKS)]
    assert held.lanes.counts() == {"m": {"cancelled": 2, "done": 1, "waiting": 0}}


def test_the_wait_for_the_end_can_be_limited(held: Held) -> None:
    """``close`` returns although a block runs; its task is served when it ends, and the lane stops then."""
    task = held.lanes.submit("m", {})
    wait_until(lambda: held.ran == [0])
    begin = time.monotonic()
    held.lanes.close(0.05)
    assert 0.05 <= time.monotonic() - begin < 30
    assert not task.done()
    with pytest.raises(RuntimeError, match="closed"):
        held.lanes.submit("m", {})
    held.free.set()
    assert task.result(60) == {"y": BLOCKS}
