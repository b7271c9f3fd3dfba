"""Requests for generation, whatever their API: admission, submission, and their tokens as they come."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from chrion.errors import ChrionError, InputError
from chrion.generation import Sampling, Stream, Token
from chrion.serving.server.failures import RequestFailure, Status, without_folders
from chrion.serving.server.generation_metrics import GenerationMetrics
from chrion.serving.server.generators import Prompt, ServedGenerator, drain_generators
from chrion.serving.server.grace import Grace
from chrion.serving.server.repository import Key
from chrion.serving.server.statistics import ModelStatistics

_LATE = "the text did not begin within its timeout"


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options of the texts of a request, beside their lengths and the choice of their tokens."""

    #: Strings that end a text.
    stop: tuple[str, ...] = ()
    #: Tokens that end a text, beside those of the model.
    end_tokens: tuple[int, ...] = ()
    #: True if the model's own end tokens do not end a text.
    ignore_eos: bool = False
    #: The number of tokens before which no token ends a text.
    min_tokens: int = 0
    #: As in :meth:`chrion.Generator.submit`.
    logprobs: int | None = None


class GenerationService:
    """The generators of a server.

    Args:
        served: The models by name.
        max_waiting: The maximum number of requests that wait at the same time, of all models.
        failed: Why models with a table ``[generation]`` do not generate, by name.
        refused: Why no model generates, if none does.
        statistics: Returns the statistics of a version, in which its requests are counted; None without them.
    """

    def __init__(
        self,
        served: Mapping[str, ServedGenerator],
        max_waiting: int,
        failed: Mapping[str, str] = MappingProxyType({}),
        *,
        refused: str = "",
        statistics: Callable[[Key], ModelStatistics | None] = lambda _: None,
    ) -> None:
        #: The models by name.
        self.served = served
        #: Why models with a table ``[generation]`` do not generate, by name.
        self.failed = failed
        #: Why no model generates; empty if models do.
        self.refused = refused
        self._max_waiting = max_waiting
        self._draining = False
        #: The texts that have been admitted and are not queued yet.
        self._admitted = 0
        self._metrics = GenerationMetrics(served)
        self._statistics = statistics

    @property
    def draining(self) -> bool:
        """True if new requests are refused."""
        return self._draining

    @property
    def pending(self) -> int:
        """The number of texts that are generated or wait."""
        return sum(served.generator.statistics().requests for served in self.served.values())

    def states(self) -> list[dict[str, Any]]:
        """Return the states of the generators for the web page."""
        return [{"name": name} | asdict(served.generator.statistics()) for name, served in self.served.items()]

    def metrics(self) -> bytes:
        """Return metrics in Prometheus's text format."""
        return self._metrics.render() if self.served else b""

    def unknown(self, name: str, where: str = "") -> RequestFailure:
        """Return the failure of a request for a text of a model that does not generate.

        Args:
            name: The name in the request.
            where: What else the request says of the model, in words.
        """
        if self.refused:
            return RequestFailure(Status.UNSUPPORTED, self.refused)
        if name in self.failed:
            reason = without_folders(self.failed[name])
            return RequestFailure(Status.UNSUPPORTED, f"model {name!r} does not generate: {reason}", param="model")
        text = f"model {name[:200]!r} does not exist{where}, has no table [generation], or was not opened at the start"
        return RequestFailure(Status.NOT_FOUND, text, param="model", code="model_not_found")

    async def close(self, grace: Grace) -> None:
        """Refuse new requests, wait for those in flight as long as the grace lasts, and close the generators."""
        self._draining = True
        await asyncio.to_thread(drain_generators, list(self.served.values()), grace)

    @contextlib.contextmanager
    def counted(self, model: str, arrival_s: float) -> Iterator[Callable[[int], None]]:
        """Count a request that is refused or fails within this context, or whose client leaves.

        Args:
            model: The name of the model.
            arrival_s: The time of the arrival of the request, in seconds of ``time.perf_counter``.

        Yields:
            The function to call when it has succeeded, with the number of its texts.
        """
        served = self.served[model]
        statistics = self._statistics((served.name, served.version)) or ModelStatistics()

        def elapsed_ms() -> float:
            return (time.perf_counter() - arrival_s) * 1000

        def succeed(texts: int) -> None:
            total_ms = elapsed_ms()
            statistics.add_success(texts, total_ms, 0.0, (0.0, total_ms, 0.0))

        with statistics.failures_counted(elapsed_ms):
            yield succeed

    def admit(self, count: int) -> None:
        """Raise a failure unless a number of texts may be queued now."""
        if count > self._max_waiting:
            text = f"n, prompt: expected at most {self._max_waiting} choices (--max-waiting), found {count}"
            raise RequestFailure(Status.INVALID, text, param="n")
        if self._draining:
            raise RequestFailure(Status.UNAVAILABLE, "the server is shutting down", retry_s=1.0)
        queued = sum(served.generator.statistics().waiting_requests for served in self.served.values())
        if queued + self._admitted + count > self._max_waiting:
            raise RequestFailure(Status.OVERLOADED, "too many requests wait", retry_s=1.0)

    async def submit(
        self,
        served: ServedGenerator,
        prompts: Sequence[Prompt],
        samplings: Sequence[Sampling],
        options: TextOptions,
        limit: Callable[[int], int],
    ) -> list[Stream]:
        """Queue a text for each prompt and each sampling, or none of them.

        Args:
            served: The model.
            prompts: Texts or token ids.
            samplings: How the tokens of each text of a prompt are chosen.
            options: What else the request says of its texts.
            limit: Returns the maximum new tokens after a prompt of a number of tokens.

        Raises:
            RequestFailure: The texts may not be queued now.
            OptionError: A prompt or a number is out of range.
        """
        with self.counted(served.name, time.perf_counter()):
            count = len(prompts) * len(samplings)
            self.admit(count)
            encoded = await asyncio.to_thread(lambda: [served.encode(prompt) for prompt in prompts])
            self.admit(count)  # others may have come
            self._admitted += count
            streams: list[Stream] = []
            try:
                for ids, sampling in itertools.product(encoded, samplings):
                    streams.append(_queue(served, ids, limit(len(ids)), sampling, options))
                    self._admitted -= 1
                    await asyncio.sleep(0)  # the checks of a long prompt take milliseconds for each of its texts
            except BaseException as error:
                cancel(streams)
                if isinstance(error, RuntimeError) and not isinstance(error, ChrionError):
                    raise RequestFailure(Status.UNAVAILABLE, "the generator is closed") from error
                raise
            finally:
                self._admitted -= count - len(streams)
            return streams

    async def events(
        self, model: str, streams: Sequence[Stream], arrival_s: float, timeout_ms: float = math.inf
    ) -> AsyncGenerator[tuple[int, Token | None], None]:
        """Yield the tokens of several streams as they come, with the index of each; None ends a stream.

        The queue has no limit, so that no stream waits for another or for the client. It holds no more than the
        streams themselves.

        Args:
            model: The name of the model.
            streams: The streams, which the caller cancels at the end.
            arrival_s: The time of the arrival of the request, in seconds of ``time.perf_counter``.
            timeout_ms: Time within which each text must begin; the model may have a shorter one.

        Raises:
            RequestFailure: A text does not begin in time, or the server ends it.
            Exception: A text fails.
        """
        limit_ms = min(timeout_ms, self.served[model].timeout_ms)
        queue: asyncio.Queue[tuple[int, Token | BaseException | None]] = asyncio.Queue()

        async def forward(index: int, stream: Stream) -> None:
            try:
                async with asyncio.timeout(None if math.isinf(limit_ms) else limit_ms / 1000) as beginning:
                    async for token in self._metrics.timed(model, stream.events(), arrival_s):
                        beginning.reschedule(None)
                        queue.put_nowait((index, token))
                if stream.finish_reason == "cancelled":  # not by this service, which then reads no more
                    raise RequestFailure(Status.UNAVAILABLE, "the server ended the request", retry_s=1.0)  # noqa: TRY301
            except TimeoutError:
                queue.put_nowait((index, RequestFailure(Status.EXPIRED, _LATE)))
            except Exception as error:  # noqa: BLE001 - raised where the events are read
                queue.put_nowait((index, error))
            else:
                queue.put_nowait((index, None))

        tasks = [asyncio.create_task(forward(at, stream)) for at, stream in enumerate(streams)]
        try:
            with self.counted(model, arrival_s) as succeed:
                running = len(tasks)
                while running:
                    index, event = await queue.get()
                    if isinstance(event, BaseException):
                        raise event
                    running -= event is None
                    yield index, event
                succeed(len(streams))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _queue(
    served: ServedGenerator, ids: Sequence[int], max_new_tokens: int, sampling: Sampling, options: TextOptions
) -> Stream:
    """Queue one text of at most a number of new tokens."""
    generator = served.generator
    own = frozenset() if options.ignore_eos else generator.stop_tokens
    return generator.submit(
        ids,
        max_new_tokens,
        sampling=sampling,
        stop=options.stop,
        stop_tokens=[*own.union(options.end_tokens)],
        min_new_tokens=min(options.min_tokens, max_new_tokens),
        logprobs=options.logprobs,
    )


def cancel(streams: Sequence[Stream]) -> None:
    """End the requests of streams."""
    for stream in streams:
        stream.cancel()


def failure_of(error: ChrionError | RequestFailure) -> RequestFailure:
    """Return the failure of a request whose generation raised."""
    if isinstance(error, RequestFailure):
        return error
    return RequestFailure(Status.INVALID if isinstance(error, InputError) else Status.INTERNAL, str(error))
