"""Engines: one iteration of a decoder for a batch of requests.

The selective engine runs all requests, or those of one token each, in one call on the CPU if the decoder allows it
(:mod:`chrion.generation.pooled_session`), and else by parts (:mod:`chrion.generation.split_session`). The plain engine
serves a model that cannot be split, one request after another.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from chrion.devices.providers import CPU_PROVIDER
from chrion.errors import GenerationError, ModelError
from chrion.generation.cache import RequestCache
from chrion.generation.equivalence import Run
from chrion.generation.iteration import Outcome, Work
from chrion.generation.pooled_session import PooledSession, open_pooled_session
from chrion.generation.query_blocks import BLOCK, PASS, split_passes, supports_query_blocks
from chrion.generation.rewrites.decoder import LOGITS, DecoderSignature
from chrion.generation.rewrites.long_texts import find_trimmed_caches, reduces_positions
from chrion.generation.rewrites.selective import SplitDecoder
from chrion.generation.session_threads import SPINNING_BETWEEN_CALLS, SessionThreads, open_for_threads, run_options
from chrion.generation.split_session import SplitSession
from chrion.graph.model import Graph
from chrion.graph.ort_sessions import first_line, weights_folder_option
from chrion.graph.rewrite import has_bodies

Array = np.ndarray[Any, Any]
#: The fewest requests of one token that run in a call of their own beside others. That reads all weights once more, but
#: saves a call for each layer and request.
FEWEST_BESIDE_OTHERS = 6


class SelectiveEngine:
    """An engine for decoders with selective batching. Several threads may run batches at a time.

    The parts, which have a second copy of the weights, are closed if calls of the whole model serve all requests.

    Args:
        split: The decoder in parts.
        threads: The threads of a session of several threads.
        providers: The execution providers of the token-wise parts; attention runs on the CPU.
        most_tokens: The most tokens of a request; 0 for as many as the model has positions for.

    Raises:
        ModelError: onnxruntime refuses a part.
    """

    def __init__(
        self, split: SplitDecoder, threads: SessionThreads, providers: Sequence[str], most_tokens: int = 0
    ) -> None:
        decoder = split.decoder
        self.signature, self.refused = decoder.signature, ""
        self.by_token = bool(decoder.appended)
        self._graph = decoder.graph  # its weights file is removed with it
        self._run_options = run_options()
        parts = SplitSession(split, threads, providers, self._run_options)
        self._divisible = parts.divisible
        #: The most tokens of a prompt in one pass.
        self._pass = PASS if parts.block == BLOCK else sys.maxsize
        most_tokens = min((limit for limit in (most_tokens, decoder.signature.context) if limit), default=0)
        #: The session of the whole model for batches that one call serves; None if there is none.
        self.pooled: PooledSession | None = None
        if decoder.appended and split.divisible and list(providers) == [CPU_PROVIDER]:
            configuration = {**weights_folder_option(decoder.graph.weights_folder), **SPINNING_BETWEEN_CALLS}
            self.pooled = open_pooled_session(
                decoder, lambda: threads.options(configuration), self._run_options, parts, most_tokens
            )
        #: Whether batches that one call of the whole model does not serve run by parts.
        self._by_parts = self.pooled is None or not self.pooled.serves_all(most_tokens)
        #: What runs these batches.
        self._fallback: Run = parts.run
        if self.pooled is not None and not self._by_parts:
            self._fallback = self.pooled.run_by_pool
        else:
            parts.open()  # the session with the native operator may have been refused after they were released
        self.weight_copies = 2 if self.pooled is not None and self._by_parts else 1

    def run(self, batch: Sequence[Work]) -> list[Outcome]:
        """Run one iteration.

        If it fails, every request is run again by itself, so that only those at fault fail. That is possible because
        an iteration writes nothing but the keys and values of its own tokens.
        """
        try:
            return self._run(batch)
        except Exception as error:  # noqa: BLE001 - onnxruntime raises many types
            if len(batch) == 1:
                return [GenerationError(f"the iteration failed: {first_line(error)}")]
            return [outcome for work in batch for outcome in self.run([work])]

    def stop(self) -> None:
        """End the iteration that runs, and all later ones, with errors."""
        self._run_options.terminate = True

    def supports_chunks(self) -> bool:
        """Return whether a prompt in several iterations has the results of a whole one."""
        return self._divisible

    def _run(self, batch: Sequence[Work]) -> list[Outcome]:
        """Run all requests in one call if possible, else those of one token, unless there are few of them."""
        if self.pooled is not None and self.pooled.serves(batch):
            return self._run_passes(batch, self.pooled.run)
        single = [at for at, work in enumerate(batch) if len(work.ids) == 1]
        others = [at for at, work in enumerate(batch) if len(work.ids) > 1]
        increments = [batch[at] for at in single]
        few = not others or len(single) < FEWEST_BESIDE_OTHERS
        if self.pooled is None or not self._by_parts or few or not self.pooled.serves(increments):
            return self._run_passes(batch, self._fallback)
        outcomes: list[Outcome] = [None] * len(batch)
        for positions, partial in (
            (single, self.pooled.run(increments)),
            (others, self._run_passes([batch[at] for at in others], self._fallback)),
        ):
            for at, outcome in zip(positions, partial, strict=True):
                outcomes[at] = outcome
        return outcomes

    def _run_passes(self, batch: Sequence[Work], run: Run) -> list[Outcome]:
        """Run long prompts in several passes."""
        if all(len(work.ids) <= self._pass for work in batch):
            return run(batch)
        outcomes: list[Outcome] = [None] * len(batch)
        for works, numbers in split_passes(batch, self._pass):
            for number, outcome in zip(numbers, run(works), strict=True):
                outcomes[number] = outcome
        return outcomes


class PlainDecoderEngine:
    """An engine of one session of the whole model, which runs the requests of a batch one by one.

    Args:
        graph: The model.
        signature: Its inputs and outputs.
        threads: The threads of the session.
        providers: Its execution providers.
        refused: Why the model cannot be split.
        analysed: The model without branches, if it is another graph.

    Raises:
        ModelError: onnxruntime refuses the model, or cannot run it.
    """

    by_token = False
    weight_copies = 1

    def __init__(  # noqa: PLR0913, PLR0917 - what describes the model, and how it runs
        self,
        graph: Graph,
        signature: DecoderSignature,
        threads: SessionThreads,
        providers: Sequence[str],
        refused: str,
        analysed: Graph | None = None,
    ) -> None:
        self.signature, self.refused = signature, refused
        self._session = graph.source.use(
            lambda source: open_for_threads(graph.name, source, threads.options({}), providers)
        )
        self._run_options = run_options()
        analysed = analysed or graph
        #: True if results may depend on the number of tokens beyond what a trial has.
        self._by_length = has_bodies(analysed.model.graph.node) or reduces_positions(analysed.model)
        trimmed = find_trimmed_caches(analysed, signature)
        #: The numbers of the caches that may have fewer rows than there are tokens.
        self._trimmed = {at for at, name in enumerate(signature.present) if name in trimmed}
        self._try(graph.name)

    def run(self, batch: Sequence[Work]) -> list[Outcome]:
        """Run one iteration of each request."""
        return [self._run(work) for work in batch]

    def stop(self) -> None:
        """End the iteration that runs, and all later ones, with errors."""
        self._run_options.terminate = True

    def supports_chunks(self) -> bool:
        """Return whether a prompt in several iterations has the results of a whole one.

        A model with branches or with a sliding window may differ beyond the tokens of a trial: its prompts stay whole.
        """
        if self._by_length or self._trimmed:
            return False
        return supports_query_blocks(self.signature, self.run, by_token=False)

    def _run(self, work: Work) -> Outcome:
        try:
            return self._step(work)
        except Exception as error:  # noqa: BLE001 - onnxruntime raises many types
            return GenerationError(f"the iteration failed: {first_line(error)}")

    def _step(self, work: Work) -> Array | None:
        feed = self.signature.feed(work.ids, work.past)
        filled = [min(work.cache.rows.get(at, work.past), work.past) for at in range(len(self.signature.past))]
        for name, array, rows in zip(self.signature.past, work.cache.arrays, filled, strict=True):
            feed[name] = np.ascontiguousarray(array[None, :, :rows])
        logits, *present = self._session.run([LOGITS, *self.signature.present], feed, self._run_options)
        for at, (value, rows) in enumerate(zip(present, filled, strict=True)):
            self._keep(work.cache, at, value[0], rows, rows + len(work.ids))
        return np.asarray(logits[0, -1], np.float32) if work.wanted else None

    def _keep(self, cache: RequestCache, at: int, present: Array, before: int, total: int) -> None:
        """Keep a present output, of [heads, rows, width]; a layer with a sliding window may have trimmed it.

        Args:
            cache: The cache of the request.
            at: The number of the output.
            present: Its rows.
            before: The rows that were the input.
            total: Those and the new tokens.
        """
        rows = present.shape[1]
        if rows != total and not (rows < total and at in self._trimmed):
            raise GenerationError(f"{self.signature.present[at]!r} has {rows} rows, expected {total}")
        first = before
        if at in self._trimmed:
            first, cache.rows[at] = 0, rows
        cache.arrays[at][:, first:rows] = present[:, first:rows]

    def _try(self, name: str) -> None:
        """Run a prompt of two tokens and another token, or as many as the model has positions for.

        Raises:
            ModelError: It fails.
        """
        cache = RequestCache(self.signature, 3, by_token=False)
        past = 0
        for count in {1: (1,), 2: (1, 1)}.get(self.signature.context, (2, 1)):
            try:
                self._step(Work(cache, np.zeros(count, np.int64), past))
            except Exception as error:
                message = f"{name}: onnxruntime cannot run {count} new and {past} past tokens: {first_line(error)}"
                raise ModelError(message) from error
            past += count
