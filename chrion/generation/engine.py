"""Engines: one iteration of a decoder for a batch of requests.

The selective engine runs a split decoder (:mod:`chrion.graph.selective`): the token-wise parts once on the tokens of
all requests, the attention parts once for each request, or for each block of a long prompt
(:mod:`chrion.generation.query_blocks`). On the CPU, all requests, or those of one token each, may run in one call
instead (:mod:`chrion.generation.pooled_session`). The plain engine serves a model that cannot be split, one request
after another.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.devices.providers import CPU_PROVIDER
from chrion.errors import GenerationError, ModelError
from chrion.generation.attention import AttentionPart, Rows, sized
from chrion.generation.cache import RequestCache
from chrion.generation.device_session import open_for_threads, run_options
from chrion.generation.equivalence import Run
from chrion.generation.iteration import Outcome, Work
from chrion.generation.pooled_session import PooledSession, open_pooled_session
from chrion.generation.query_blocks import BLOCK, PASS, split_passes, split_queries, supports_query_blocks
from chrion.generation.session_threads import SPINNING_BETWEEN_CALLS, SessionThreads
from chrion.graph.decoder import LOGITS, DecoderSignature
from chrion.graph.model import Graph
from chrion.graph.ort_sessions import first_line, weights_folder_option
from chrion.graph.position_reductions import reduces_positions
from chrion.graph.rewrite import has_bodies
from chrion.graph.selective import SplitDecoder
from chrion.graph.selective_parts import Part
from chrion.graph.trimmed_caches import find_trimmed_caches

Array = np.ndarray[Any, Any]
#: The fewest requests of one token that run in a call of their own beside others. That reads all weights once more, but
#: saves a call for each layer and request.
_FEWEST_BESIDE_OTHERS = 6


class _OpenPart:
    """A part with its session.

    Args:
        part: The part.
        session: Its session.
        attention: What runs it for every request, or None if it is token-wise.
        options: The options of its runs.
    """

    def __init__(
        self, part: Part, session: ort.InferenceSession, attention: AttentionPart | None, options: ort.RunOptions
    ) -> None:
        self.part, self.attention = part, attention
        self._session, self._options = session, options
        self._results = [result.name for result in session.get_outputs()]
        self._arguments = list(zip(session.get_inputs(), part.inputs, strict=True))
        self._names = [argument.name for argument in session.get_inputs()]

    def run(self, tokens: Mapping[str, Array], count: int) -> list[Array]:
        """Run a token-wise part on a number of tokens."""
        values = [
            sized(self.part.sizes[name], argument, count, 0) if name in self.part.sizes else tokens[name]
            for argument, name in self._arguments
        ]
        feed = dict(zip(self._names, values, strict=True))
        found: list[Array] = self._session.run(self._results, feed, self._options)
        return found


class _Sessions:
    """The sessions of parts. Equal parts of several layers share one.

    Args:
        name: The name of the model.
        threads: The threads of a session of several threads.
        providers: The execution providers of the token-wise parts.
    """

    def __init__(self, name: str, threads: SessionThreads, providers: Sequence[str]) -> None:
        self._name, self._threads, self._providers = name, threads, list(providers)
        self._opened: dict[tuple[bytes, bool, int], ort.InferenceSession] = {}

    def of_tokens(self, part: Part) -> ort.InferenceSession:
        """Return the session of a token-wise part."""
        return self._get(part, self._threads, self._providers)

    def of_attention(self, part: Part) -> tuple[ort.InferenceSession, ort.InferenceSession]:
        """Return the sessions of an attention part: of one thread, and of as many as there are."""
        one = SessionThreads(1)
        return self._get(part, one, [CPU_PROVIDER]), self._get(part, self._threads, [CPU_PROVIDER])

    def _get(self, part: Part, threads: SessionThreads, providers: Sequence[str]) -> ort.InferenceSession:
        key = (part.model, part.by_request, threads.count)
        if key not in self._opened:
            self._opened[key] = _open(self._name, part.model, part.options, threads, providers)
        return self._opened[key]


class SelectiveEngine:
    """An engine of token-wise parts and attention parts. Several threads may run batches at a time.

    Args:
        split: The decoder in parts.
        threads: The threads of a token-wise part, and of the attention of a prompt.
        providers: The execution providers of the token-wise parts; attention runs on the CPU.

    Raises:
        ModelError: onnxruntime refuses a part.
    """

    def __init__(self, split: SplitDecoder, threads: SessionThreads, providers: Sequence[str]) -> None:
        self.signature, self.refused = split.signature, ""
        self.by_token = bool(split.appended)
        self._axes = split.axes
        self._graph = split.graph  # its weights file is removed with it
        sessions = _Sessions(split.graph.name, threads, providers)
        self._run_options = run_options()
        self._parts: list[_OpenPart] = []
        for part in split.parts:
            light = replace(part, model=b"")  # the session has the weights
            if part.by_request:
                session, parallel = sessions.of_attention(part)
                attention = AttentionPart(split, light, session, parallel, self._run_options)
                self._parts.append(_OpenPart(light, session, attention, self._run_options))
            else:
                self._parts.append(_OpenPart(light, sessions.of_tokens(part), None, self._run_options))
        reads = [{*part.inputs} for part in split.parts]
        #: For each part, the values that later parts read.
        self._later = [set(split.appended.values()).union(*reads[at + 1 :]) for at in range(len(reads))]
        self._pooled: PooledSession | None = None
        if split.whole is not None and list(providers) == [CPU_PROVIDER]:
            folder = split.graph.weights_folder
            configuration = {**weights_folder_option(folder), **SPINNING_BETWEEN_CALLS}
            self._pooled = open_pooled_session(
                split.whole,
                split.signature,
                folder,
                lambda: threads.options(configuration),
                self._run_options,
                self._run_blocks,
            )
        #: Whether prompts in blocks have the same results; None if that has not been tried.
        self._divisible: bool | None = None if split.divisible else False
        # Without positions for more than a block, there are no prompts of several ones.
        blocks = not 0 < split.signature.context <= BLOCK and self.supports_chunks()
        #: The most tokens of a block of a prompt, and of a pass.
        self._block, self._pass = (BLOCK, PASS) if blocks else (sys.maxsize, sys.maxsize)

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
        if self._divisible is None:
            self._divisible = supports_query_blocks(self.signature, self._run_blocks, by_token=self.by_token)
        return self._divisible

    def _run(self, batch: Sequence[Work]) -> list[Outcome]:
        """Run all requests in one call if possible, else those of one token, unless there are few of them."""
        if self._pooled is not None and self._pooled.serves(batch):
            return self._run_passes(batch, self._pooled.run)
        single = [at for at, work in enumerate(batch) if len(work.ids) == 1]
        others = [at for at, work in enumerate(batch) if len(work.ids) > 1]
        increments = [batch[at] for at in single]
        few = not others or len(single) < _FEWEST_BESIDE_OTHERS
        if self._pooled is None or few or not self._pooled.serves(increments):
            return self._run_parts(batch)
        outcomes: list[Outcome] = [None] * len(batch)
        for positions, found in (
            (single, self._pooled.run(increments)),
            (others, self._run_parts([batch[at] for at in others])),
        ):
            for at, outcome in zip(positions, found, strict=True):
                outcomes[at] = outcome
        return outcomes

    def _run_parts(self, batch: Sequence[Work]) -> list[Outcome]:
        return self._run_passes(batch, self._run_queries)

    def _run_passes(self, batch: Sequence[Work], run: Run) -> list[Outcome]:
        """Run long prompts in several passes."""
        if all(len(work.ids) <= self._pass for work in batch):
            return run(batch)
        outcomes: list[Outcome] = [None] * len(batch)
        for works, numbers in split_passes(batch, self._pass):
            for number, outcome in zip(numbers, run(works), strict=True):
                outcomes[number] = outcome
        return outcomes

    def _run_queries(self, batch: Sequence[Work]) -> list[Outcome]:
        """Run by parts, with the attention of prompts in blocks."""
        blocks, last = split_queries(batch, self._block)
        found = self._run_blocks(blocks)
        return [found[at] for at in last]

    def _run_blocks(self, batch: Sequence[Work]) -> list[Outcome]:
        """Run requests, or consecutive blocks of them, by parts."""
        counts = [len(work.ids) for work in batch]
        starts = [0, *(int(n) for n in np.cumsum(counts))]
        feeds = [self.signature.feed(work.ids, work.past) for work in batch]
        tokens: dict[str, Array] = {
            name: np.concatenate([feed[name] for feed in feeds], axis=1) for name in self._axes if name in feeds[0]
        }
        own: list[dict[str, Array]] = [dict(feed) for feed in feeds]
        rows = Rows(tokens, self._axes, starts)
        for at, opened in enumerate(self._parts[:-1]):
            if opened.attention is not None:
                opened.attention.run(batch, rows, own)
            else:
                tokens.update(zip(opened.part.outputs, opened.run(tokens, starts[-1]), strict=True))
            for name in tokens.keys() - self._later[at]:
                del tokens[name]
        return self._finish(batch, tokens, starts)

    def _finish(self, batch: Sequence[Work], tokens: Mapping[str, Array], starts: Sequence[int]) -> list[Outcome]:
        """Run the last part on the last token of every request whose scores are wanted."""
        final = self._parts[-1]
        wanted = [at for at, work in enumerate(batch) if work.wanted]
        if not wanted:
            return [None] * len(batch)
        last = [starts[at + 1] - 1 for at in wanted]
        chosen = {name: np.take(tokens[name], last, self._axes[name]) for name in final.part.inputs if name in tokens}
        logits = final.run(chosen, len(last))[0]
        scores = np.asarray(logits, np.float32).reshape(len(last), -1)
        outcomes: list[Outcome] = [None] * len(batch)
        for row, at in enumerate(wanted):
            outcomes[at] = scores[row]
        return outcomes


class PlainEngine:
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
        source = graph.source if isinstance(graph.source, bytes) else str(graph.source)
        self._session = _open(graph.name, source, {}, threads, list(providers))
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


def _open(
    name: str, model: str | bytes, configuration: Mapping[str, str], threads: SessionThreads, providers: Sequence[str]
) -> ort.InferenceSession:
    """Open a session of a model or of a part of it.

    Raises:
        ModelError: onnxruntime refuses it.
    """
    try:
        return open_for_threads(model, threads.options(configuration), providers)
    except Exception as error:  # onnxruntime raises many types
        raise ModelError(f"{name}: onnxruntime refuses the model: {first_line(error)}") from error
