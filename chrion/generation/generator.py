"""Generation of text by a decoder for many callers at a time."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import onnx

from chrion.common.wrong_values import wrong_value
from chrion.devices.providers import CPU_PROVIDER, provider_name, require_working
from chrion.errors import ChrionError, ModelError, OptionError
from chrion.generation.arguments import at_least, length_error, whole_number
from chrion.generation.cache import CacheManager, slots_of_bytes
from chrion.generation.loop import IterationLoop
from chrion.generation.open_engine import open_engine
from chrion.generation.requests import GenerationRequest
from chrion.generation.rewrites.decoder import decoder_signature
from chrion.generation.sampling import Sampler, Sampling
from chrion.generation.scheduling import IterationScheduler
from chrion.generation.session_threads import lease_iteration_cores
from chrion.generation.special_tokens import find_end_token, find_stop_tokens, special_tokens
from chrion.generation.streams import Stream
from chrion.generation.text import TextBuilder, find_tokenizer, load_tokenizer
from chrion.graph import Graph, load
from chrion.machine.cores import physical_cores
from chrion.runtime import process_hooks

log = logging.getLogger(__name__)

#: What to do if there is no tokenizer.
TOKENIZER_HINT = "give token ids, or a tokenizer"
_KV_BYTES = 1 << 30
#: How tokens are chosen by default.
_GREEDY = Sampling()
#: The most threads of a session; each of several sessions starts as many.
_MOST_THREADS = 1024


@dataclass(frozen=True, slots=True)
class GeneratorStatistics:
    """Numbers of a generator since it was opened, and of this moment."""

    #: Iterations that have returned, and the requests in them.
    iterations: int
    iteration_requests: int
    generated_tokens: int
    finished_requests: int
    #: Requests in the pool, and those of them that have not begun: they wait for slots, or for a place in the batch.
    requests: int
    waiting_requests: int
    reserved_slots: int
    slots: int
    #: The requests that have ended by their ``finish_reason``.
    finish_reasons: Mapping[str, int]


class Generator:
    """A decoder that generates tokens for several requests at a time. Thread-safe; use it as a context manager.

    Args:
        model: A decoder with a cache of keys and values, as a file, bytes, proto or graph.
        max_batch: The most requests of an iteration.
        kv_slots: The tokens whose keys and values fit in memory; by default as many as fit in ``kv_bytes``.
        kv_bytes: The bytes of keys and values, one GiB by default.
        n_workers: The most batches in flight. Two are useful with an accelerator: one batch runs on the accelerator
            while the attention of the other one runs on the CPU.
        policy: ``iteration``, or ``request`` for fixed batches as those of FasterTransformer, the baseline of Orca
            (:mod:`chrion.generation.scheduling`).
        chunk: The most tokens of a prompt that one iteration processes; 0 for all. Prompts of models whose results that
            would change run as a whole.
        threads: The threads of the token-wise parts and of the attention of prompts; by default as many as physical
            cores may be busy at the same time, within the affinity and the quotas of the process.
        providers: The execution providers of the token-wise parts. Attention runs on the CPU.
        tokenizer: A ``tokenizer.json``, or a ``Tokenizer`` of the library tokenizers; by default the file beside the
            model. If that one cannot be used, the generator takes token ids only.

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
        tokenizer: Any = None,
    ) -> None:
        _check_model(model)
        names = _provider_names(providers)
        threads = len(physical_cores()) if threads is None else at_least("threads", threads, 1)
        if threads > _MOST_THREADS:
            raise wrong_value("threads", f"at most {_MOST_THREADS}", threads)
        kv_bytes = at_least("kv_bytes", kv_bytes, 0)
        graph = model if isinstance(model, Graph) else load(model)
        if kv_slots is not None:
            kv_slots = at_least("kv_slots", kv_slots, 1)
        slots = kv_slots or slots_of_bytes(decoder_signature(graph), kv_bytes)
        scheduler = IterationScheduler(max_batch, slots, n_workers=n_workers, policy=policy, chunk=chunk)
        path = graph.file
        #: The tokenizer of the model, or None.
        self.tokenizer: Any = None
        self._no_tokenizer: ChrionError = OptionError("text needs a tokenizer", hint=TOKENIZER_HINT)
        #: The tokens that end every text: those of the model's configuration, and the ``eos_token`` of the tokenizer.
        self.stop_tokens = find_stop_tokens(path) if path else frozenset()
        self._find_tokenizer(tokenizer, path)
        self._special: dict[str, int] = special_tokens(self.tokenizer) if self.tokenizer is not None else {}
        cores = lease_iteration_cores(threads) if scheduler.n_workers == 1 else None
        engine = open_engine(graph, threads, names, cores.others if cores else (), slots)
        if scheduler.chunk and not engine.supports_chunks():
            log.info("%s: prompts run as a whole: chunks would change their results", graph.name)
            scheduler.chunk = 0
        self.signature = engine.signature
        #: The most tokens that the model has positions for; 0 if neither the model nor its configuration states it.
        self.context = self.signature.context
        self._numbers = itertools.count()
        caches = CacheManager(self.signature, scheduler.n_slots, by_token=engine.by_token)
        self._loop = IterationLoop(engine, scheduler, caches, self.context, cores)
        process_hooks.register(self._loop, IterationLoop.after_fork, IterationLoop.close)
        # If nothing refers to the generator and its streams any more, its threads end.
        weakref.finalize(self, self._loop.request_close).atexit = False

    @property
    def refused(self) -> str:
        """Why the model has no selective batching, so that its requests run one by one; empty if it has."""
        return self._loop.engine.refused

    @property
    def weight_copies(self) -> int:
        """How many times the weights are in memory: twice if requests may need the model and its parts."""
        return self._loop.engine.weight_copies

    def submit(  # noqa: PLR0913 - all options of a request
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 64,
        *,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] | None = None,
        min_new_tokens: int = 0,
        logprobs: int | None = None,
    ) -> Stream:
        """Queue a request.

        Args:
            prompt: Token ids, or text if the model has a tokenizer.
            max_new_tokens: The most tokens to generate.
            sampling: How tokens are chosen; the most probable ones by default.
            stop: Strings that end the text and are not part of it. Special tokens, which texts omit, end it, too.
            stop_tokens: Tokens that end the text and are not part of it; by default those of the model.
            min_new_tokens: The number of tokens before which stop tokens are not chosen. Strings end the text before.
            logprobs: The number of most probable tokens that each token has beside the logarithm of its own
                probability; None for neither.

        Returns:
            The tokens as they come.

        Raises:
            ContextLengthError: The model has too few positions for the request, or the memory too few slots.
            OptionError: The prompt is empty or has unknown tokens, or an argument has another type or is out of range.
            RuntimeError: The generator is closed, or its process was forked.
        """
        if self._loop.refused:
            raise RuntimeError(self._loop.refused)
        ids = self.encode(prompt)
        max_new_tokens = whole_number("max_new_tokens", max_new_tokens)
        self._check_context(len(ids), max_new_tokens)
        if sampling is not None and not isinstance(sampling, Sampling):
            raise wrong_value("sampling", "a Sampling", sampling)
        if logprobs is not None:
            logprobs = at_least("logprobs", logprobs, 0)
        min_new_tokens = at_least("min_new_tokens", min_new_tokens, 0)
        if min_new_tokens > max_new_tokens:
            raise wrong_value("min_new_tokens", f"0 to {max_new_tokens}", min_new_tokens)
        self._check_tokens("logit_bias", sampling.logit_bias if sampling else ())
        stops, ends = self._read_stops(stop, stop_tokens)
        builder = self._text_builder(stops, ids) if self.tokenizer is not None else None
        late = [token for token in ends if 0 <= token < self.signature.vocabulary]
        sampler = Sampler(sampling or _GREEDY, ids, late, min_new_tokens)
        capacity = self._loop.scheduler.needed_slots(len(ids), max_new_tokens)
        number = next(self._numbers)
        stream = Stream(len(ids), functools.partial(self._cancel, number))  # which keeps the generator alive
        self._loop.submit(
            GenerationRequest(number, stream, sampler, ids, max_new_tokens, ends, builder, capacity, logprobs)
        )
        return stream

    def _cancel(self, number: int, stream: Stream) -> None:
        self._loop.cancel(number, stream)

    def statistics(self) -> GeneratorStatistics:
        """Return the numbers of the generator."""
        loop = self._loop
        return GeneratorStatistics(
            **asdict(loop.counts),
            requests=loop.requests,
            waiting_requests=loop.waiting,
            reserved_slots=loop.scheduler.reserved,
            slots=loop.scheduler.n_slots,
        )

    def close(self) -> None:
        """Cancel all requests, the iteration that runs included, and end the generator.

        It returns when the threads of the generator have ended, unless one of them calls it.
        """
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def most_new_tokens(self, prompt: int) -> int:
        """Return the most tokens that can follow a prompt of a number of tokens; at least one."""
        limits = [limit for limit in (self.context, self._loop.scheduler.n_slots) if limit]
        return max(min(limits) - prompt + 1, 1)

    def default_new_tokens(self, prompt: int) -> int:
        """Return the most tokens that should follow a prompt if a request does not say; at least one.

        With an equal share of the slots for each request of a batch, it is what is left of the share after the prompt,
        or half a share after a longer prompt.
        """
        share = self._loop.scheduler.n_slots // self._loop.scheduler.max_batch
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
            ids = [whole_number("prompt", token) for token in _listed("prompt", prompt, "token ids")]
        if not ids:
            raise OptionError("prompt: expected at least one token, found none")
        self._check_tokens("prompt", ids)
        return ids

    def _check_tokens(self, name: str, tokens: Iterable[int]) -> None:
        for token in tokens:
            if not 0 <= token < self.signature.vocabulary:
                raise wrong_value(name, f"tokens of 0 to {self.signature.vocabulary - 1}", token)

    def _read_stops(
        self, stop: str | Sequence[str], stop_tokens: Sequence[int] | None
    ) -> tuple[list[str], frozenset[int]]:
        """Return the strings and the tokens that end a text."""
        stops = [stop] if isinstance(stop, str) else _listed("stop", stop or (), "strings")
        for text in stops:
            if not isinstance(text, str):
                raise wrong_value("stop", "strings", text)
        if any(stops) and self.tokenizer is None:
            raise OptionError(f"stop: {self._no_tokenizer.message}", hint=self._no_tokenizer.hint)
        ends = self.stop_tokens
        if stop_tokens is not None:
            given = _listed("stop_tokens", stop_tokens, "token ids")
            ends = frozenset(whole_number("stop_tokens", token) for token in given)
        return stops, ends | {self._special[text] for text in stops if text in self._special}

    def _check_context(self, prompt: int, new: int) -> None:
        context = self.context
        if context and prompt + new - 1 > context:  # the last token that is generated is never an input
            limits = f"the model has positions for {context} tokens, the request needs {prompt + new - 1}"
            raise length_error(limits, context, prompt, new)

    def _text_builder(self, stops: Sequence[str], prompt: Sequence[int]) -> TextBuilder:
        try:
            return TextBuilder(self.tokenizer, stops, prompt)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the library is none of Exception
            raise OptionError(f"prompt: the tokenizer cannot decode it: {error}") from error

    def _find_tokenizer(self, given: Any, path: Path | None) -> None:
        """Load the given tokenizer, or the one beside the model if it can be used."""
        if given is not None:
            self.tokenizer = load_tokenizer(Path(given)) if isinstance(given, str | os.PathLike) else given
            if not all(hasattr(self.tokenizer, name) for name in ("encode", "decode", "get_added_tokens_decoder")):
                raise wrong_value("tokenizer", "a file or a Tokenizer", given)
        elif beside := find_tokenizer(path) if path else None:
            given = beside
            try:
                self.tokenizer = load_tokenizer(beside)
            except (ModelError, OptionError) as error:
                log.info("token ids only: %s", error)
                self._no_tokenizer = error
        if self.tokenizer is not None and isinstance(given, str | os.PathLike):
            self.stop_tokens |= find_end_token(Path(given).parent, self.tokenizer)


def _check_model(model: object) -> None:
    if not isinstance(model, str | os.PathLike | bytes | onnx.ModelProto | Graph):
        raise wrong_value("model", "a file, bytes, ModelProto or Graph", model)


def _provider_names(providers: object) -> list[str]:
    """Return the names of providers that work."""
    given = [providers] if isinstance(providers, str) else _listed("providers", providers, "names")
    for name in given:
        if not isinstance(name, str):
            raise wrong_value("providers", "names", name)
    names = [provider_name(name) for name in given] or [CPU_PROVIDER]
    for name in names:
        if name != CPU_PROVIDER:  # without this, onnxruntime would use the CPU
            require_working(name, "providers")
    return names


def _listed(name: str, values: object, kind: str) -> list[Any]:
    """Return the elements of an argument in their order.

    Raises:
        OptionError: It has no elements, or no order of them.
    """
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping | set | frozenset):
        raise wrong_value(name, f"a list of {kind}", values)
    try:
        return list(values)
    except TypeError:  # an array without dimensions
        raise wrong_value(name, f"a list of {kind}", values) from None
