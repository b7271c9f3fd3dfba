"""Streams of tokens: what readers and callbacks see, whoever ends them."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest

from chrion.errors import GenerationError
from chrion.generation import Stream, Token


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
    assert not stream._waiting_for_end


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
    assert not stream._waiting
