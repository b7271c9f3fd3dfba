"""The choice of an engine for a decoder."""

from __future__ import annotations

from collections.abc import Sequence

from chrion.devices.providers import CPU_PROVIDER
from chrion.errors import ModelError
from chrion.generation.engine import PlainDecoderEngine, SelectiveEngine
from chrion.generation.iteration import DecoderEngine
from chrion.generation.merged import open_merged
from chrion.generation.rewrites.decoder import BRANCH, decoder_signature
from chrion.generation.rewrites.selective import split_decoder
from chrion.generation.session_threads import SessionThreads
from chrion.graph.model import Graph


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
        return open_merged(graph, signature, own, providers, most_tokens)
    try:
        split = split_decoder(graph, signature)
    except ModelError as error:
        return PlainDecoderEngine(graph, signature, own, providers, error.message)
    return SelectiveEngine(split, own, providers, most_tokens)
