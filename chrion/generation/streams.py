"""The tokens of a request as they come.

A stream takes no lock. The generator's thread appends tokens to a list, and the first end that is appended to another
list counts; readers register how to wake them and then look again. So neither an interrupt of a reader, nor a signal
handler or a fork at any moment, nor a callback that uses the generator can block the thread that serves all requests.
It rests on operations of lists, dictionaries and deques that Python defines as atomic, also without the GIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)
#: Why requests end.
FINISH_REASONS = ("length", "stop", "cancelled", "error")
#: Functions that wake readers, by a key that is the reader's own.
Waiting = dict[object, Callable[[], object]]


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


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a stream."""

    reason: str
    error: BaseException | None
    #: The tokens before it; any that follow were too late.
    tokens: int


class Stream:
    """The tokens of one request. Any number of threads may read it, each from the beginning.

    Iteration yields token ids; :meth:`events` yields them with their text. Both work with ``for`` and ``async for``. An
    iteration ends with the request and raises its error. Used as a context manager, the request is cancelled at the
    end of the block if it still runs.
    """

    def __init__(self, prompt: int, cancel: Callable[[Stream], None]) -> None:
        #: The tokens of the prompt.
        self.prompt_tokens = prompt
        self._cancel = cancel
        self._tokens: list[Token] = []
        self._ends: list[_End] = []  # the first one counts
        self._callbacks: deque[Callable[[Stream], object]] = deque()
        self._waiting: Waiting = {}
        self._waiting_for_end: Waiting = {}  # result() does not wake up for every token

    @property
    def finish_reason(self) -> str:
        """Why the request ended, one of :data:`FINISH_REASONS`; empty while it runs."""
        return self._ends[0].reason if self._ends else ""

    @property
    def error(self) -> BaseException | None:
        """The exception of a request that failed."""
        return self._ends[0].error if self._ends else None

    def cancel(self) -> None:
        """End the request. Its slots are free after the iteration that runs now."""
        self._cancel(self)

    def result(self, timeout: float | None = None) -> list[int]:
        """Wait for the end of the request and return all of its tokens.

        Args:
            timeout: The longest wait in seconds.

        Raises:
            TimeoutError: The request still runs.
            Exception: The request failed.
        """
        if not _wait(self._waiting_for_end, lambda: bool(self._ends), timeout):
            raise TimeoutError(f"the request still runs after {timeout} s")
        self._raise_error()
        return [token.id for token in self._known() if token.id is not None]

    @property
    def text(self) -> str:
        """The text so far; empty without a tokenizer."""
        return "".join(token.text for token in self._known())

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

    def add_done_callback(self, callback: Callable[[Stream], object]) -> None:
        """Call a function with the stream when it ends, or at once if it has ended.

        It runs in the thread that ends the stream, which is the generator's unless the request is cancelled, and must
        return soon. It may use the stream and the generator.

        Raises:
            TypeError: It is not callable.
        """
        if not callable(callback):
            raise TypeError(f"expected a function, found {callback!r:.100}")
        self._callbacks.append(callback)
        if self._ends:
            self._call_back()

    def put(self, token: Token) -> None:
        """Add a token; for the generator."""
        if not self._ends:
            self._tokens.append(token)
            _wake(self._waiting)

    def finish(self, reason: str, error: BaseException | None = None, text: str = "") -> None:
        """End the stream, unless it has ended; for the generator. It may be repeated after an interruption.

        Args:
            reason: As in ``finish_reason``.
            error: The error of the request.
            text: Text that was held back.
        """
        if not self._ends:
            if text:
                self._tokens.append(Token(None, text))
            self._ends.append(_End(reason, error, len(self._tokens)))
        _wake(self._waiting)
        _wake(self._waiting_for_end)
        self._call_back()

    def after_fork(self, error: Exception) -> None:
        """Fail in a forked child; readers of the parent are not woken."""
        for those in (self._callbacks, self._waiting, self._waiting_for_end):
            those.clear()
        self.finish("error", error)

    def ready(self, index: int) -> bool:
        """Return whether the stream has a token or has ended before it."""
        return index < len(self._tokens) or bool(self._ends)

    def wait(self, index: int) -> Token | None:
        """Wait for a token; return None at the end.

        Raises:
            Exception: The request failed before it.
        """
        _wait(self._waiting, lambda: self.ready(index))
        return self._at(index)

    async def wait_async(self, index: int) -> Token | None:
        """Wait for a token without blocking the event loop; return None at the end.

        Raises:
            Exception: The request failed before it.
        """
        key = object()
        while not self.ready(index):
            loop = asyncio.get_running_loop()
            future = loop.create_future()

            def wake(loop: asyncio.AbstractEventLoop = loop, future: asyncio.Future[None] = future) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed, maybe in this moment
                    loop.call_soon_threadsafe(_resolve, future)

            self._waiting[key] = wake
            try:
                if not self.ready(index):
                    await future
            finally:
                self._waiting.pop(key, None)
        return self._at(index)

    def _known(self) -> list[Token]:
        return self._tokens[: self._ends[0].tokens] if self._ends else self._tokens[:]

    def _at(self, index: int) -> Token | None:
        """Return a token that is ready, or None at the end."""
        count = self._ends[0].tokens if self._ends else len(self._tokens)
        if index < count:
            return self._tokens[index]
        self._raise_error()
        return None

    def _raise_error(self) -> None:
        """Raise a copy of the request's error: its traceback is that of one reader."""
        error = self.error
        if error is not None:
            raise copy.copy(error).with_traceback(None) from error.__cause__

    def _call_back(self) -> None:
        """Call the callbacks that have not been called."""
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # another thread has taken the last one
                return
            try:
                callback(self)
            except BaseException as error:  # sys.exit(), for example: the thread serves other requests
                log.exception("a callback of a stream failed")
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    raise


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


def _wait(waiting: Waiting, ready: Callable[[], bool], timeout: float | None = None) -> bool:
    """Block the thread until a condition holds; return whether it does after a time in seconds at most."""
    if ready():
        return True
    signal, key = threading.Lock(), object()
    signal.acquire()
    waiting[key] = signal.release
    limit = -1.0 if timeout is None or timeout > threading.TIMEOUT_MAX else max(timeout, 0.0)
    try:
        while not ready():
            if not signal.acquire(timeout=limit):
                return ready()
            waiting[key] = signal.release  # for another token
    finally:
        waiting.pop(key, None)
    return True


def _wake(waiting: Waiting) -> None:
    """Wake the readers that wait now; one that begins to wait later sees what has changed."""
    for key in list(waiting):
        if (wake := waiting.pop(key, None)) is not None:  # another thread may have woken it
            wake()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
