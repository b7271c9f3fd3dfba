"""The choice of an engine for a decoder."""

from __future__ import annotations

from collections.abc import Sequence

from chrion.devices.providers import CPU_PROVIDER
from chrion.errors import ModelError
from chrion.generation.engine import PlainEngine, SelectiveEngine
from chrion.generation.iteration import Engine
from chrion.generation.merged import open_merged
from chrion.graph.decoder import BRANCH, decoder_signature
from chrion.graph.model import Graph
from chrion.graph.selective import split_decoder


def open_engine(graph: Graph, threads: int, providers: Sequence[str] = (CPU_PROVIDER,)) -> Engine:
    """Return the selective engine of a decoder, or the plain engine if the decoder cannot be split.

    Args:
        graph: The model.
        threads: The threads of a session.
        providers: The execution providers, as in the engines.

    Raises:
        ModelError: The model is not a decoder with a cache, or onnxruntime cannot run it.
    """
    signature = decoder_signature(graph)
    if BRANCH in signature.inputs:
        return open_merged(graph, signature, threads, providers)
    try:
        split = split_decoder(graph, signature)
    except ModelError as error:
        return PlainEngine(graph, signature, threads, providers, error.message)
    return SelectiveEngine(split, threads, providers)
