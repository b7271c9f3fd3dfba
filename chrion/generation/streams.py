"""The tokens of a request as they come."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)

#: Why requests end.
FINISH_REASONS = ("length", "stop", "cancelled", "error")


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a stream."""

    #: The token's number; None for text that was held back until the end of the stream.
    id: int | None
    #: The text that became certain with the token; empty without a tokenizer.
    text: str = ""
    #: The logarithm of the token's probability by the model, before penalties, temperature and filters; None unless the
    #: request asks for it.
    logprob: float | None = None
    #: The most probable tokens with the logarithms of their probabilities, the most probable first.
    top: tuple[tuple[int, float], ...] = ()
    #: The time at which the token was generated, in seconds of ``time.perf_counter``.
    time: float = field(default_factory=time.perf_counter, compare=False)


class Stream:
    """The tokens of one request. Any number of threads may read it, each from the beginning.

    Iteration yields token ids; :meth:`events` yields them with their text. Both work with ``for`` and ``async for``. An
    iteration ends with the request and raises its error. Used as a context manager, the request is cancelled at the
    end of the block if it still runs.
    """

    def __init__(self, prompt: int, cancel: Callable[[], None]) -> None:
        #: The tokens of the prompt.
        self.prompt_tokens = prompt
        #: Why the request ended, one of :data:`FINISH_REASONS`; empty while it runs.
        self.finish_reason = ""
        #: The exception of a request that failed.
        self.error: Exception | None = None
        self._cancel = cancel
        self._tokens: list[Token] = []
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._ended = threading.Condition(lock)  # result() does not wake up for every token
        self._callbacks: list[Callable[[Stream], None]] = []
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def cancel(self) -> None:
        """End the request. Its slots are free after the iteration that runs now."""
        self._cancel()

    def result(self, timeout: float | None = None) -> list[int]:
        """Wait for the end of the request and return all of its tokens.

        Args:
            timeout: The longest wait in seconds.

        Raises:
            TimeoutError: The request still runs.
            Exception: The request failed.
        """
        with self._ended:
            if not self._ended.wait_for(lambda: self.finish_reason, timeout):
                raise TimeoutError(f"the request still runs after {timeout} s")
            if self.error is not None:
                raise self.error
            return [token.id for token in self._tokens if token.id is not None]

    @property
    def text(self) -> str:
        """The text so far; empty without a tokenizer."""
        with self._changed:
            return "".join(token.text for token in self._tokens)

    def events(self) -> Events:
        """Return the tokens with their text."""
        return Events(self)

    def __iter__(self) -> Iterator[int]:
        return (token.id for token in self.events() if token.id is not None)

    async def __aiter__(self) -> AsyncIterator[int]:
        async for token in self.events():
            if token.id is not None:
                yield token.id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def add_done_callback(self, callback: Callable[[Stream], None]) -> None:
        """Call a function with the stream when it ends, or at once if it has ended.

        The function runs in the generator's thread and must return soon.
        """
        with self._changed:
            if not self.finish_reason:
                self._callbacks.append(callback)
                return
        callback(self)

    def put(self, token: Token) -> None:
        """Add a token."""
        with self._changed:
            if not self.finish_reason:
                self._tokens.append(token)
                self._notify()

    def finish(self, reason: str, error: Exception | None = None, text: str = "") -> None:
        """End the stream, unless it has ended.

        Args:
            reason: As in ``finish_reason``.
            error: The error of the request.
            text: Text that was held back.
        """
        with self._changed:
            if self.finish_reason:
                return
            if text:
                self._tokens.append(Token(None, text))
            self.finish_reason, self.error = reason, error
            callbacks, self._callbacks = self._callbacks, []
            self._notify()
            self._ended.notify_all()
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                log.exception("a callback of a stream failed")

    def after_fork(self, error: Exception) -> None:
        """Fail in a forked child; those who wait in the parent are not the child's."""
        lock = threading.RLock()  # the other one may be held forever
        self._changed, self._ended = threading.Condition(lock), threading.Condition(lock)
        self._callbacks, self._waiting = [], []
        self.finish("error", error)

    def at(self, index: int) -> Token | None:
        """Return a token, or None at the end. The caller holds the lock and knows that the stream is that far."""
        if index < len(self._tokens):
            return self._tokens[index]
        if self.error is not None:
            raise self.error
        return None

    def ready(self, index: int) -> bool:
        """Return whether the stream has a token or has ended before it. The caller holds the lock."""
        return index < len(self._tokens) or bool(self.finish_reason)

    def wait(self, index: int) -> Token | None:
        """Wait for a token; return None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self.ready(index))
            return self.at(index)

    async def wait_async(self, index: int) -> Token | None:
        """Wait for a token without blocking the event loop; return None at the end."""
        while True:
            with self._changed:
                if self.ready(index):
                    return self.at(index)
                loop = asyncio.get_running_loop()
                waiter = loop, loop.create_future()
                self._waiting.append(waiter)
            try:
                await waiter[1]
            except asyncio.CancelledError:
                with self._changed:
                    if waiter in self._waiting:
                        self._waiting.remove(waiter)
                raise

    def _notify(self) -> None:
        self._changed.notify_all()
        waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            with contextlib.suppress(RuntimeError):  # the loop is closed, maybe in this moment
                loop.call_soon_threadsafe(_wake, future)


class Events:
    """The tokens of a stream with their text, for ``for`` and ``async for``."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Token]:
        at = 0
        while (token := self._stream.wait(at)) is not None:
            yield token
            at += 1

    async def __aiter__(self) -> AsyncIterator[Token]:
        at = 0
        while (token := await self._stream.wait_async(at)) is not None:
            yield token
            at += 1


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
