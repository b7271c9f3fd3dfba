"""The time that requests in flight have at the end of a server."""

from __future__ import annotations

import asyncio

import pytest

from chrion.serving.server.grace import Grace, StopSignals


def test_an_event_ends_the_wait() -> None:
    """It may have occurred before."""

    async def wait(*, before: bool) -> bool:
        event = asyncio.Event()
        if before:
            event.set()
        else:
            asyncio.get_running_loop().call_later(0.01, event.set)
        return await Grace(1000.0).wait_for(event)

    assert asyncio.run(wait(before=True))
    assert asyncio.run(wait(before=False))


@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_the_wait_ends_without_the_event(seconds: float) -> None:
    """After its time, or earlier if it is ended."""

    async def wait() -> bool:
        granted = Grace(seconds)
        if seconds:
            assert not granted.is_over
            asyncio.get_running_loop().call_later(0.01, granted.end)
        found = await granted.wait_for(asyncio.Event())
        assert granted.is_over
        return found

    assert not asyncio.run(wait())


def test_signals() -> None:
    """The first one stops, one at the same time is the same, and a later one ends the grace if there is one."""
    now = [100.0]
    signals = StopSignals(lambda: now[0])
    signals.receive()
    assert signals.stopped.is_set()
    now[0] += 10.0
    signals.receive()  # the server has not begun to end
    granted = signals.grant(1000.0)
    assert not granted.is_over
    signals = StopSignals(lambda: now[0])
    signals.receive()
    granted = signals.grant(1000.0)
    for later, over in ((0.1, False), (0.3, False), (0.2, True), (0.0, True)):
        now[0] += later
        signals.receive()
        assert granted.is_over is over
