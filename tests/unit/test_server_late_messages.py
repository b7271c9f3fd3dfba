"""Tests of the time limit for messages of gRPC calls."""

from __future__ import annotations

import asyncio

import pytest

from chrion.serving.server.grpc_service import MessageReceiver


class Call:
    """A call whose message arrives when the test wants.

    Args:
        message: The message; None if it never arrives.
        delay_s: When it arrives.
    """

    def __init__(self, message: bytes | None, delay_s: float = 0.0) -> None:
        self._message = message
        self._delay_s = delay_s

    async def read(self) -> bytes | None:
        await asyncio.sleep(self._delay_s if self._message is not None else 1e6)
        return self._message


def test_only_late_messages_end_their_calls() -> None:
    """Each call whose message is late gets an error, time after time, and its task goes on; the others get theirs."""

    async def receive() -> None:
        receiver = MessageReceiver(0.2)
        for _ in range(3):
            found = await asyncio.gather(
                *(receiver.receive(Call(content)) for content in (b"a", None, b"b", None)), return_exceptions=True
            )
            assert [found[0], found[2]] == [b"a", b"b"]
            assert [type(error) for error in (found[1], found[3])] == [TimeoutError, TimeoutError]
        with pytest.raises(TimeoutError):
            await receiver.receive(Call(None))
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0.3)  # the next call needs a new timer
        with pytest.raises(TimeoutError):
            await receiver.receive(Call(None))

    asyncio.run(receive())


def test_a_call_whose_client_leaves_is_cancelled() -> None:
    """Its end is no late message."""

    async def leave() -> None:
        task = asyncio.create_task(MessageReceiver(60.0).receive(Call(None)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
