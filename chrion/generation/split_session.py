"""Sessions of a decoder in parts (``rewrites.selective``): selective batching with calls by request.

The token-wise parts run once on the tokens of all requests, the attention parts once for each request, or for each
block of a long prompt (:mod:`chrion.generation.query_blocks`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.devices.providers import CPU_PROVIDER
from chrion.generation.attention import AttentionPart, Rows, sized
from chrion.generation.iteration import Outcome, Work
from chrion.generation.query_blocks import BLOCK, split_queries, supports_query_blocks
from chrion.generation.rewrites.selective import SplitDecoder
from chrion.generation.rewrites.selective_parts import Part
from chrion.generation.session_threads import SessionThreads, open_for_threads
from chrion.graph.ort_sessions import weights_folder_option

Array = np.ndarray[Any, Any]


class _TokenPart:
    """A token-wise part with its session.

    Args:
        part: The part.
        session: Its session.
        options: The options of its runs.
    """

    def __init__(self, part: Part, session: ort.InferenceSession, options: ort.RunOptions) -> None:
        self._session, self._options, self._sizes = session, options, part.sizes
        self._results = [result.name for result in session.get_outputs()]
        arguments = zip(session.get_inputs(), part.inputs, strict=True)
        self._arguments = [(argument.name, argument, name) for argument, name in arguments]

    def run(self, tokens: Mapping[str, Array], count: int) -> list[Array]:
        """Run the part on a number of tokens."""
        feed = {
            label: sized(self._sizes[name], argument, count, 0) if name in self._sizes else tokens[name]
            for label, argument, name in self._arguments
        }
        results: list[Array] = self._session.run(self._results, feed, self._options)
        return results


class SplitSession:
    """The sessions of a decoder in parts. Several threads may run batches at a time while they are open.

    Args:
        split: The decoder.
        threads: The threads of a token-wise part, and of the attention of a prompt.
        providers: The execution providers of the token-wise parts; attention runs on the CPU.
        options: The options of its runs.

    Raises:
        ModelError: onnxruntime refuses a part.
    """

    def __init__(
        self, split: SplitDecoder, threads: SessionThreads, providers: Sequence[str], options: ort.RunOptions
    ) -> None:
        decoder = split.decoder
        self._signature, self._axes = decoder.signature, split.axes
        self._split, self._threads, self._providers, self._options = split, threads, providers, options
        self._parts: list[_TokenPart | AttentionPart] = []
        self.open()
        reads = [{*part.inputs} for part in split.parts]
        #: For each part, the values that later parts read.
        self._later = [set(decoder.appended.values()).union(*reads[at + 1 :]) for at in range(len(reads))]
        #: Whether prompts in blocks have the same results.
        self.divisible = split.divisible and supports_query_blocks(
            decoder.signature, self.run_whole, by_token=bool(decoder.appended)
        )
        # Without positions for more than a block, there are no prompts of several ones.
        blocks = self.divisible and not 0 < decoder.signature.context <= BLOCK
        #: The most tokens of a block of a prompt.
        self.block = BLOCK if blocks else sys.maxsize

    def open(self) -> None:
        """Open the sessions, unless they are open.

        Raises:
            ModelError: onnxruntime refuses a part.
        """
        if self._parts:
            return
        split, options, one = self._split, self._options, SessionThreads(1)
        sessions: dict[tuple[bytes, bool, int], ort.InferenceSession] = {}  # equal parts of several layers share one

        def session(part: Part, threads: SessionThreads, providers: Sequence[str]) -> ort.InferenceSession:
            key, graph = (part.model, part.by_request, threads.count), split.decoder.graph
            if key not in sessions:
                own = threads.options(weights_folder_option(graph.weights_folder))
                sessions[key] = open_for_threads(graph.name, part.model, own, providers)
            return sessions[key]

        def attention(part: Part) -> AttentionPart:
            single, parallel = (session(part, threads, [CPU_PROVIDER]) for threads in (one, self._threads))
            return AttentionPart(split, part, single, parallel, options)

        self._parts = [
            attention(part)
            if part.by_request
            else _TokenPart(part, session(part, self._threads, self._providers), options)
            for part in split.parts
        ]

    def release(self) -> None:
        """Close the sessions and free their copy of the weights. The next iteration opens them again."""
        self._parts = []

    def run(self, batch: Sequence[Work]) -> list[Outcome]:
        """Run one iteration, with the attention of long prompts in blocks if the results are the same."""
        blocks, last = split_queries(batch, self.block)
        outcomes = self.run_whole(blocks)
        return [outcomes[at] for at in last]

    def run_whole(self, batch: Sequence[Work]) -> list[Outcome]:
        """Run one iteration of requests, or of consecutive blocks of them."""
        self.open()
        counts = [len(work.ids) for work in batch]
        starts = [0, *(int(n) for n in np.cumsum(counts))]
        feeds = [self._signature.feed(work.ids, work.past) for work in batch]
        tokens: dict[str, Array] = {
            name: np.concatenate([feed[name] for feed in feeds], axis=1) for name in self._axes if name in feeds[0]
        }
        own: list[dict[str, Array]] = [dict(feed) for feed in feeds]
        rows = Rows(tokens, self._axes, starts)
        for at, opened in enumerate(self._parts[:-1]):
            if isinstance(opened, _TokenPart):
                tokens.update(zip(self._split.parts[at].outputs, opened.run(tokens, starts[-1]), strict=True))
            else:
                opened.run(batch, rows, own)
            for name in tokens.keys() - self._later[at]:
                del tokens[name]
        return self._finish(batch, tokens, starts)

    def _finish(self, batch: Sequence[Work], tokens: Mapping[str, Array], starts: Sequence[int]) -> list[Outcome]:
        """Run the last part on the last token of every request whose scores are wanted."""
        final, part = self._parts[-1], self._split.parts[-1]
        assert isinstance(final, _TokenPart)  # noqa: S101 - the logits are token-wise
        wanted = [at for at, work in enumerate(batch) if work.wanted]
        if not wanted:
            return [None] * len(batch)
        last = [starts[at + 1] - 1 for at in wanted]
        chosen = {name: np.take(tokens[name], last, self._axes[name]) for name in part.inputs if name in tokens}
        logits = final.run(chosen, len(last))[0]
        scores = np.asarray(logits, np.float32).reshape(len(last), -1)
        outcomes: list[Outcome] = [None] * len(batch)
        for row, at in enumerate(wanted):
            outcomes[at] = scores[row]
        return outcomes
