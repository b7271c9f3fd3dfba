"""The choice of an engine for a decoder, also for a merged one (``rewrites.merged_decoder``)."""

from __future__ import annotations

from collections.abc import Sequence

from chrion.devices.providers import CPU_PROVIDER
from chrion.errors import ModelError
from chrion.generation.engine import PlainDecoderEngine, SelectiveEngine
from chrion.generation.iteration import DecoderEngine, Outcome, Work
from chrion.generation.rewrites.decoder import BRANCH, DecoderSignature, decoder_signature
from chrion.generation.rewrites.merged_decoder import cached_branch, check_prompts
from chrion.generation.rewrites.selective import split_decoder
from chrion.generation.session_threads import SessionThreads
from chrion.graph.model import Graph
from chrion.graph.rewrite import refusals_of


class MergedEngine(PlainDecoderEngine):
    """An engine of a merged decoder that is not split: a prompt by one branch, each token after it by the other."""

    def run(self, batch: Sequence[Work]) -> list[Outcome]:
        """Run one iteration of each request. A part of a prompt that follows another runs token by token."""
        return [self._run_by_token(work) if work.past else self._run(work) for work in batch]

    def _run_by_token(self, work: Work) -> Outcome:
        outcome: Outcome = None
        for at in range(len(work.ids)):
            last = at + 1 == len(work.ids)
            outcome = self._run(Work(work.cache, work.ids[at : at + 1], work.past + at, work.wanted and last))
            if isinstance(outcome, Exception):
                break
        return outcome


def open_engine(
    graph: Graph,
    threads: int,
    providers: Sequence[str] = (CPU_PROVIDER,),
    cores: Sequence[int] = (),
    most_tokens: int = 0,
) -> DecoderEngine:
    """Return the selective engine of a decoder, or the plain engine if the decoder cannot be split.

    Args:
        graph: The model.
        threads: The threads of a session.
        providers: The execution providers, as in the engines.
        cores: The logical CPU of each thread but the caller; by default the system chooses.
        most_tokens: The most tokens of a request; 0 for as many as the model has positions for.

    Raises:
        ModelError: The model is not a decoder with a cache, or onnxruntime cannot run it.
    """
    signature, own = decoder_signature(graph), SessionThreads(threads, tuple(cores))
    if BRANCH in signature.inputs:
        return _open_merged(graph, signature, own, providers, most_tokens)
    try:
        split = split_decoder(graph, signature)
    except ModelError as error:
        return PlainDecoderEngine(graph, signature, own, providers, error.message)
    return SelectiveEngine(split, own, providers, most_tokens)


def _open_merged(
    graph: Graph, signature: DecoderSignature, threads: SessionThreads, providers: Sequence[str], most_tokens: int
) -> DecoderEngine:
    """Return the selective engine of the branch with a cache if it computes prompts, else that of both branches."""
    branch = None
    try:
        with refusals_of(f"{graph.name}: no selective batching"):
            branch = cached_branch(graph)
            own = decoder_signature(branch)
            check_prompts(graph, signature, branch, own)
        return SelectiveEngine(split_decoder(branch, own), threads, providers, most_tokens)
    except ModelError as error:
        return MergedEngine(graph, signature, threads, providers, error.message, branch)
