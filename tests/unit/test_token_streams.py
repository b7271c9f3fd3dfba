"""Streams of tokens: what readers and callbacks see, whoever ends them."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest

from chrion.errors import GenerationError
from chrion.generation import Stream, Token
from seams.generation import waiting_readers


def new_stream() -> Stream:
    return Stream(1, lambda _: None)


def test_the_first_end_counts() -> None:
    """Tokens, text and ends after it are not part of the stream."""
    stream = new_stream()
    stream.put(Token(5, "a"))
    stream.finish("cancelled")
    stream.put(Token(6, "b"))
    stream.finish("length", GenerationError("late"), "c")
    assert stream.result() == list(stream) == [5]
    assert (stream.text, stream.finish_reason, stream.error) == ("a", "cancelled", None)


def test_text_that_was_held_back_is_the_last_token() -> None:
    """It has no number, so that ids are those of the tokens."""
    stream = new_stream()
    stream.put(Token(5, "a"))
    stream.finish("length", text="b")
    assert list(stream.events()) == [Token(5, "a"), Token(None, "b")]
    assert (list(stream), stream.text) == ([5], "ab")


def test_readers_get_what_came_before_an_error() -> None:
    """Tokens first, then the error; result() raises at once."""
    stream = new_stream()
    stream.put(Token(5))
    stream.finish("error", GenerationError("made up"))
    reader = iter(stream)
    assert next(reader) == 5
    with pytest.raises(GenerationError, match="made up"):
        next(reader)
    with pytest.raises(GenerationError, match="made up"):
        stream.result()


@pytest.mark.parametrize("timeout", [0, -1, 0.01])
def test_a_wait_ends_after_its_time(timeout: float) -> None:
    """A reader that gives up leaves nothing behind."""
    stream = new_stream()
    with pytest.raises(TimeoutError):
        stream.result(timeout)
    assert waiting_readers(stream) == 0


def test_tasks_that_give_up_leave_nothing_behind() -> None:
    """Reads with a timeout of a stream without tokens."""
    stream = new_stream()

    async def poll() -> None:
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(aiter(stream)), 0.001)

    asyncio.run(poll())
    assert waiting_readers(stream) == 0


def test_a_stream_outlives_the_event_loop_that_waited_for_it() -> None:
    """A loop that ends while a reader waits does not disturb what ends the stream; it can be read elsewhere."""
    stream, loop = new_stream(), asyncio.new_event_loop()
    waiting = loop.create_task(stream.wait_async(0))
    loop.run_until_complete(asyncio.sleep(0))
    waiting.cancel()
    loop.close()
    assert waiting_readers(stream) == 1  # the task could not end
    stream.put(Token(5))
    stream.finish("length")
    assert stream.result() == [5]


def test_a_forked_child_wakes_no_reader_of_its_parent() -> None:
    """The stream fails in the child, whose callbacks and readers are those that come later."""
    stream, called = new_stream(), list[str]()
    stream.add_done_callback(lambda _: called.append("parent"))

    async def fork() -> None:
        reading = asyncio.create_task(stream.wait_async(0))
        await asyncio.sleep(0)
        stream.after_fork(GenerationError("forked"))
        await asyncio.sleep(0)
        assert not reading.done()
        reading.cancel()

    asyncio.run(fork())
    stream.add_done_callback(lambda _: called.append("child"))
    assert (waiting_readers(stream), stream.finish_reason, called) == (0, "error", ["child"])
    with pytest.raises(GenerationError, match="forked"):
        stream.result()


@pytest.mark.parametrize("timeout", [None, math.inf, 1e10])
def test_a_wait_may_be_endless(timeout: float | None) -> None:
    """Any time that is longer than the system's longest is no limit."""
    stream = new_stream()
    threading.Timer(0.05, stream.finish, ("length",)).start()
    assert stream.result(timeout) == []


def test_callbacks_are_called_once() -> None:
    """Those added before the end and after it, in their order, with repeated ends."""
    stream, called = new_stream(), list[str]()
    stream.add_done_callback(lambda _: called.append("before"))
    stream.finish("length")
    stream.add_done_callback(lambda _: called.append("after"))
    stream.finish("length")
    assert called == ["before", "after"]
    with pytest.raises(TypeError, match="expected a function, found 5"):
        stream.add_done_callback(5)  # type: ignore[arg-type]


def test_readers_in_threads_and_loops_see_every_token() -> None:
    """Four threads and four tasks read 2000 tokens while they come."""
    stream, found = new_stream(), list[list[int]]()

    async def read() -> list[int]:
        return [token async for token in stream]

    async def read_all() -> list[list[int]]:
        return await asyncio.gather(*(read() for _ in range(4)))

    reading = [threading.Thread(target=lambda: found.append(list(stream))) for _ in range(4)]
    reading.append(threading.Thread(target=lambda: found.extend(asyncio.run(read_all()))))
    for thread in reading:
        thread.start()
    for at in range(2000):
        stream.put(Token(at))
    stream.finish("length")
    for thread in reading:
        thread.join(60)
    assert found == [list(range(2000))] * 8
    assert waiting_readers(stream) == 0
