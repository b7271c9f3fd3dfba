"""Generation of text by a decoder for many callers at a time."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import onnx

from chrion.cores import physical_cores
from chrion.devices.providers import CPU_PROVIDER, provider_name, require_working
from chrion.errors import ChrionError, GenerationError, ModelError, OptionError
from chrion.generation.cache import CacheManager, RequestCache, slots_of_bytes
from chrion.generation.iteration import Outcome, Work
from chrion.generation.open_engine import open_engine
from chrion.generation.sampling import Sampler, Sampling
from chrion.generation.scheduling import Batch, IterationScheduler, Share, whole_number
from chrion.generation.streams import Stream, Token
from chrion.generation.text import TextBuilder, find_stop_tokens, find_tokenizer, load_tokenizer, special_tokens
from chrion.graph import Graph, load
from chrion.graph.decoder import decoder_signature
from chrion.runtime import process_hooks

log = logging.getLogger(__name__)

_KV_BYTES = 1 << 30
_FORKED = (
    "the generator was opened before the process was forked, and nothing generates in the child: open one in the child"
)


@dataclass(slots=True)
class _Request:
    number: int
    stream: Stream
    sampler: Sampler
    prompt: list[int]
    max_new_tokens: int
    stop: frozenset[int]
    text: TextBuilder | None
    capacity: int
    #: Tokens in the cache.
    past: int = 0
    generated: list[int] = field(default_factory=list)
    reason: str = ""
    error: Exception | None = None

    def work(self, share: Share, cache: RequestCache) -> Work:
        """Return the share of the request in an iteration; one that has ended repeats its last token."""
        past = self.past if share.active else max(self.past - 1, 0)
        after = past - len(self.prompt)
        known = self.prompt[past : past + share.tokens] if after < 0 else self.generated[after : after + 1]
        return Work(cache, np.array(known, np.int64), past, share.last or not share.active)


@dataclass(frozen=True, slots=True)
class GeneratorStatistics:
    """Numbers of a generator since it was opened, and of this moment."""

    #: Iterations that have returned, and the requests in them.
    iterations: int
    iteration_requests: int
    generated_tokens: int
    finished_requests: int
    #: Requests in the pool, and those of them that wait for slots.
    requests: int
    waiting_requests: int
    reserved_slots: int
    slots: int


class Generator:
    """A decoder that generates tokens for several requests at a time. Thread-safe; use it as a context manager.

    Args:
        model: A decoder with a cache of keys and values, as a file, bytes, proto or graph.
        max_batch: The most requests of an iteration.
        kv_slots: The tokens whose keys and values fit in memory; by default as many as fit in ``kv_bytes``.
        kv_bytes: The bytes of keys and values, one GiB by default.
        n_workers: The most batches in flight. Two are useful with an accelerator: one batch is there while the
            attention of the other one runs on the CPU.
        policy: ``iteration``, or ``request`` for fixed batches as those of FasterTransformer, the baseline of Orca
            (:mod:`chrion.generation.scheduling`).
        chunk: The most tokens of a prompt that one iteration processes; 0 for all. Prompts of models whose results that
            would change run as a whole.
        threads: The threads of the token-wise parts and of the attention of prompts; by default as many as physical
            cores may be busy at the same time, within the affinity and the quotas of the process.
        providers: The execution providers of the token-wise parts. Attention runs on the CPU.
        tokenizer: A ``tokenizer.json``; by default the one beside the model. If that one cannot be used, the generator
            takes token ids only.

    Raises:
        ModelError: The model is not a decoder with a cache, or the given tokenizer is damaged.
        OptionError: An argument is out of range.
        ProviderError: A provider does not exist, or does not work on this machine.
    """

    def __init__(  # noqa: PLR0913 - all options of a generator
        self,
        model: str | Path | bytes | onnx.ModelProto | Graph,
        *,
        max_batch: int = 8,
        kv_slots: int | None = None,
        kv_bytes: int = _KV_BYTES,
        n_workers: int = 1,
        policy: str = "iteration",
        chunk: int = 0,
        threads: int | None = None,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        tokenizer: str | Path | None = None,
    ) -> None:
        providers = [provider_name(name) for name in providers]
        for name in providers:
            if name != CPU_PROVIDER:  # without this, onnxruntime would use the CPU
                require_working(name, "providers")
        for option, value, least in (("threads", threads, 1), ("kv_slots", kv_slots, 1), ("kv_bytes", kv_bytes, 0)):
            if value is not None and whole_number(option, value) < least:
                raise OptionError(f"{option}: {value} is below {least}")
        graph = model if isinstance(model, Graph) else load(model)
        slots = slots_of_bytes(decoder_signature(graph), kv_bytes) if kv_slots is None else kv_slots
        self._scheduler = IterationScheduler(max_batch, slots, n_workers=n_workers, policy=policy, chunk=chunk)
        self._engine = open_engine(graph, threads or len(physical_cores()), providers)
        if chunk and not self._engine.supports_chunks():
            log.info("%s: prompts run as a whole: chunks would change their results", graph.name)
            self._scheduler.chunk = 0
        self.signature = self._engine.signature
        self._caches = CacheManager(self.signature, slots, by_token=self._engine.by_token)
        path = graph.source if isinstance(graph.source, Path) else None
        #: The most tokens that the model has positions for; 0 if neither the model nor its configuration states it.
        self.context = self.signature.context
        #: The tokenizer of the model, or None.
        self.tokenizer = load_tokenizer(tokenizer) if tokenizer else None
        self._no_tokenizer: ChrionError = OptionError("text needs a tokenizer", hint="give token ids, or a tokenizer")
        if found := find_tokenizer(path) if path and not tokenizer else None:
            try:
                self.tokenizer = load_tokenizer(found)
            except (ModelError, OptionError) as error:
                log.info("token ids only: %s", error)
                self._no_tokenizer = error
        self._special = special_tokens(self.tokenizer) if self.tokenizer else {}
        #: The tokens that end every text, from the model's configuration.
        self.stop_tokens = find_stop_tokens(path) if path else frozenset()
        self._numbers = itertools.count()
        self._requests: dict[int, _Request] = {}
        self._counts = {"iterations": 0, "iteration_requests": 0, "generated_tokens": 0, "finished_requests": 0}
        self._lock = threading.Condition()
        self._closed = False
        self._pool = ThreadPoolExecutor(n_workers, "chrion-generation") if n_workers > 1 else None
        self._thread = threading.Thread(target=self._loop, name="chrion-generator", daemon=True)
        self._forked = False
        self._thread.start()
        process_hooks.register(self, Generator._after_fork, Generator._at_exit)

    @property
    def refused(self) -> str:
        """Why the model has no selective batching, so that its requests run one by one; empty if it has."""
        return self._engine.refused

    def submit(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 64,
        *,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] | None = None,
    ) -> Stream:
        """Queue a request.

        Args:
            prompt: Token ids, or text if the model has a tokenizer.
            max_new_tokens: The most tokens to generate.
            sampling: How tokens are chosen; the most probable ones by default.
            stop: Strings that end the text and are not part of it. Special tokens, which texts omit, end it, too.
            stop_tokens: Tokens that end the text and are not part of it; by default those of the model.

        Returns:
            The tokens as they come.

        Raises:
            OptionError: The prompt is empty or has unknown tokens, the request does not fit in the slots, or an
                argument has another type.
            RuntimeError: The generator is closed, or its process was forked.
        """
        if self._forked:
            raise RuntimeError(_FORKED)
        ids = self.encode(prompt)
        max_new_tokens = whole_number("max_new_tokens", max_new_tokens)
        self._check_context(len(ids), max_new_tokens)
        stops = [stop] if isinstance(stop, str) else list(stop)
        for text in stops:
            if not isinstance(text, str):
                raise OptionError(f"stop: expected strings, found {text!r:.100}")
        if sampling is not None and not isinstance(sampling, Sampling):
            raise OptionError(f"sampling: expected a Sampling, found {sampling!r:.100}")
        if any(stops) and self.tokenizer is None:
            raise OptionError(f"stop: {self._no_tokenizer.message}", hint=self._no_tokenizer.hint)
        builder = TextBuilder(self.tokenizer, stops, ids) if self.tokenizer is not None else None
        ends = self.stop_tokens
        if stop_tokens is not None:
            ends = frozenset(whole_number("stop_tokens", token) for token in stop_tokens)
        ends |= {self._special[text] for text in stops if text in self._special}
        sampler = Sampler(sampling or Sampling(), ids)
        with self._lock:
            if self._closed:
                raise RuntimeError("the generator is closed")
            number = next(self._numbers)
            self._scheduler.submit(number, len(ids), max_new_tokens)
            stream = Stream(len(ids), lambda: self._cancel(number))
            capacity = self._scheduler.pool[number].max_tokens
            self._requests[number] = _Request(number, stream, sampler, ids, max_new_tokens, ends, builder, capacity)
            self._lock.notify_all()
        return stream

    def statistics(self) -> GeneratorStatistics:
        """Return the numbers of the generator."""
        with self._lock:
            reserved, slots = self._scheduler.reserved, self._scheduler.n_slots
            return GeneratorStatistics(
                **self._counts,
                requests=len(self._requests),
                waiting_requests=self._scheduler.waiting,
                reserved_slots=reserved,
                slots=slots,
            )

    def close(self) -> None:
        """Cancel all requests and end the generator."""
        self._cancel_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self._pool is not None:
            self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def most_new_tokens(self, prompt: int) -> int:
        """Return the most tokens that can follow a prompt of a number of tokens; at least one."""
        limits = [limit for limit in (self.context, self._scheduler.n_slots) if limit]
        return max(min(limits) - prompt + 1, 1)

    def default_new_tokens(self, prompt: int) -> int:
        """Return the most tokens that should follow a prompt if a request does not say; at least one.

        With an equal share of the slots for each request of a batch, it is what is left of the share after the prompt,
        or half a share after a longer prompt.
        """
        share = self._scheduler.n_slots // self._scheduler.max_batch
        return min(max(share - prompt + 1, share // 2, 1), self.most_new_tokens(prompt))

    def encode(self, prompt: str | Sequence[int], *, special: bool = True) -> list[int]:
        """Return the tokens of a prompt.

        Args:
            prompt: Text or tokens.
            special: Add the special tokens of the tokenizer to a text, such as one for its beginning.

        Raises:
            OptionError: The prompt is empty, has unknown tokens, is text without a tokenizer, or is no Unicode.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise OptionError(f"prompt: {self._no_tokenizer.message}", hint=self._no_tokenizer.hint)
            try:
                prompt.encode()
            except UnicodeEncodeError as error:  # bytes that are no text, on a command line for example
                raise OptionError(f"prompt: expected text that UTF-8 can represent: {error.reason}") from error
            ids = list(self.tokenizer.encode(prompt, add_special_tokens=special).ids)
        else:
            ids = [whole_number("prompt", token) for token in prompt]
        if not ids:
            raise OptionError("prompt: expected at least one token, found none")
        for token in ids:
            if not 0 <= token < self.signature.vocabulary:
                raise OptionError(f"prompt: expected tokens of 0 to {self.signature.vocabulary - 1}, found {token}")
        return ids

    def _check_context(self, prompt: int, new: int) -> None:
        context = self.context
        if context and prompt + new - 1 > context:  # the last token that is generated is never an input
            raise OptionError(
                f"the model has positions for {context} tokens, the request needs {prompt + new - 1}",
                hint=f"shorten the prompt of {prompt} tokens, or generate at most {max(context - prompt + 1, 0)}",
            )

    def _cancel_all(self) -> None:
        """End all requests, and refuse further ones."""
        with self._lock:
            self._closed = True
            for number in [*self._requests]:
                self._end(number)
            self._lock.notify_all()

    def _after_fork(self) -> None:
        """Fail the requests in a forked child, where no thread serves them, and the locks may be held forever."""
        self._lock, self._pool = threading.Condition(), None
        self._closed = self._forked = True
        for request in self._requests.values():
            request.stream.after_fork(GenerationError(_FORKED))
        self._requests = {}

    def _at_exit(self, until: float) -> None:
        """End an iteration before the interpreter ends, which would abort the process inside onnxruntime."""
        self._cancel_all()
        self._thread.join(max(until - time.monotonic(), 0))

    def _cancel(self, number: int) -> None:
        with self._lock:
            self._end(number)
            self._lock.notify_all()

    def _end(self, number: int) -> None:
        """Cancel a request; the caller holds the lock."""
        if number in self._requests:
            self._requests[number].stream.finish("cancelled")
            self._requests[number].reason = "cancelled"
            self._leave(self._scheduler.cancel(number))

    def _leave(self, numbers: Sequence[int]) -> None:
        """Release the slots of requests and end their streams; the caller holds the lock."""
        for number in numbers:
            self._caches.release(number)
            request = self._requests.pop(number)
            self._counts["finished_requests"] += 1
            held = ""
            try:
                held = request.text.finish() if request.text is not None else ""
            except Exception as error:  # noqa: BLE001 - a tokenizer may raise what it likes
                request.reason, request.error = "error", GenerationError(f"no end of the text: {error}")
            request.stream.finish(request.reason, request.error, held)

    def _loop(self) -> None:
        """Run iterations until the generator is closed. An unexpected error closes it and fails all requests."""
        try:
            self._iterate()
        except Exception as error:
            log.exception("the generator failed")
            with self._lock:
                self._closed = True
                for request in self._requests.values():
                    request.stream.finish("error", GenerationError(f"the generator failed: {error}"))
                self._requests.clear()

    def _iterate(self) -> None:
        """Select batches, run them, and return their tokens, until the generator is closed."""
        running: deque[tuple[Batch, Sequence[_Request], Callable[[], list[Outcome]]]] = deque()
        while True:
            with self._lock:
                while not (batch := self._scheduler.select()) and not running:
                    if self._closed:
                        return
                    self._lock.wait()
                requests = [self._requests[share.number] for share in batch]
            if batch:
                running.append((batch, requests, self._start(batch, requests)))
            if not batch or len(running) == self._scheduler.n_workers:
                done, those, outcomes = running.popleft()
                self._return(done, those, outcomes())

    def _start(self, batch: Batch, requests: Sequence[_Request]) -> Callable[[], list[Outcome]]:
        """Return a function that waits for the outcomes of an iteration, or runs it if there is one worker."""
        if self._pool is None:
            return lambda: self._run(batch, requests)
        try:
            return self._pool.submit(self._run, batch, requests).result
        except RuntimeError as error:
            if "shutdown" not in str(error):  # the system refuses a thread
                raise
            self._cancel_all()  # the interpreter exits
            return lambda: [None] * len(batch)

    def _run(self, batch: Batch, requests: Sequence[_Request]) -> list[Outcome]:
        """Run one iteration; an error of the whole batch is the error of each of its requests."""
        works: dict[int, Work] = {}
        outcomes: dict[int, Outcome] = {}
        for share, request in zip(batch, requests, strict=True):
            try:
                cache = self._caches.get(request.number, request.capacity)
            except Exception as error:  # noqa: BLE001 - the others have their caches
                message = f"no memory for the keys and values of {request.capacity} tokens: {error}"
                outcomes[request.number] = GenerationError(message)
            else:
                works[request.number] = request.work(share, cache)
        if works:
            try:
                found = self._engine.run([*works.values()])
            except Exception as error:  # noqa: BLE001 - the loop must go on for other requests
                found = [GenerationError(f"the iteration failed: {error}")] * len(works)
            outcomes |= zip(works, found, strict=True)
        return [outcomes[request.number] for request in requests]

    def _return(self, batch: Batch, requests: Sequence[_Request], outcomes: Sequence[Outcome]) -> None:
        """Give the requests of a batch their tokens, and take back the batch."""
        for share, request, outcome in zip(batch, requests, outcomes, strict=True):
            if not request.reason:
                self._advance(share, request, outcome)
        with self._lock:
            self._counts["iterations"] += 1
            self._counts["iteration_requests"] += len(batch)
            self._leave(self._scheduler.complete([request.number for request in requests if request.reason]))

    def _advance(self, share: Share, request: _Request, outcome: Outcome) -> None:
        if isinstance(outcome, Exception):
            request.reason, request.error = "error", outcome if self.context else _of_unknown_context(outcome, request)
            return
        request.past += share.tokens
        if outcome is not None:
            try:
                self._append(request, request.sampler.choose(outcome))
            except Exception as error:  # noqa: BLE001 - a tokenizer may raise what it likes
                request.reason, request.error = "error", GenerationError(f"no next token: {error}")

    def _append(self, request: _Request, token: int) -> None:
        """Add a token to a request and determine whether it ends."""
        if token in request.stop:
            request.reason = "stop"
            return
        request.generated.append(token)
        self._counts["generated_tokens"] += 1
        text = request.text.add(token) if request.text is not None else ""
        request.stream.put(Token(token, text))
        if request.text is not None and request.text.stopped:
            request.reason = "stop"
        elif len(request.generated) == request.max_new_tokens:
            request.reason = "length"


def _of_unknown_context(error: Exception, request: _Request) -> Exception:
    """Return an error of a model whose context length is unknown, which may have been exceeded.

    The error of a first iteration, or one that has a hint of its own, is left as it is.
    """
    message, hint = (error.message, error.hint) if isinstance(error, ChrionError) else (str(error), "")
    if not request.past or hint:
        return error
    return GenerationError(
        f"{message}, after {request.past} tokens",
        hint="the model does not state its context length; config.json beside it may, as max_position_embeddings",
    )
