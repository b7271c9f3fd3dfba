"""Merged decoders: one model with a branch for prompts, and one for tokens that follow others.

optimum writes them as ``decoder_model_merged.onnx``: an ``If`` on the input ``use_cache_branch`` whose first branch
reads past keys and values. Here that branch becomes a decoder of its own, without the ``If``. If it computes prompts as
the model does, it is all that generation needs. That is not certain: some branches were traced with one token, and let
each of several tokens attend to all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from chrion.generation.rewrites.decoder import BRANCH, LOGITS, DecoderSignature, equal_but_for_rounding, random_cache
from chrion.graph.loader import reassemble
from chrion.graph.model import Graph
from chrion.graph.ort_sessions import first_line, open_analysis
from chrion.graph.rewrite import RewriteError, Rewriter, defined_names, rename_reads

Array = np.ndarray[Any, Any]
#: The tokens of the prompt that both branches compute, and how many of them a first part has.
_TOKENS, _FIRST = 9, 4


def cached_branch(graph: Graph) -> Graph:
    """Return the branch of a merged decoder that reads past keys and values, as a decoder of its own.

    Raises:
        RewriteError: The model has another structure.
    """
    nodes = list(graph.model.graph.node)
    chosen = [node for node in nodes if node.op_type == "If" and node.input[0] == BRANCH]
    if len(chosen) != 1:
        raise RewriteError(f"expected one If on {BRANCH!r}, found {len(chosen)}")
    body = onnx.GraphProto()
    body.CopyFrom(next(attribute.g for attribute in chosen[0].attribute if attribute.name == "then_branch"))
    results = dict(zip((value.name for value in body.output), chosen[0].output, strict=True))
    own, others = defined_names(body), defined_names(graph.model.graph) - {*chosen[0].output}
    renamed = {inner: outer for inner, outer in results.items() if inner != outer}
    unclear = own & others or own & {*renamed.values()} or not {*results} <= own or len(results) < len(body.output)
    if unclear or body.sparse_initializer:
        raise RewriteError("has names that conflict with those of its branch", chosen[0])
    rename_reads(body.node, renamed)
    for node in body.node:
        node.output[:] = [renamed.get(name, name) for name in node.output]
    at = nodes.index(chosen[0])
    rewriter = Rewriter(graph.model)
    rewriter.nodes = [*nodes[:at], *body.node, *nodes[at + 1 :]]
    rewriter.added = {tensor.name: tensor for tensor in body.initializer}
    return reassemble(graph, rewriter.finish(value for value in graph.model.graph.input if value.name != BRANCH))


def check_prompts(graph: Graph, signature: DecoderSignature, branch: Graph, branch_signature: DecoderSignature) -> None:
    """Check that a branch computes a prompt as its model does, at once and in two parts.

    Args:
        graph: The merged decoder.
        signature: Its inputs and outputs.
        branch: Its branch with past keys and values.
        branch_signature: The inputs and outputs of the branch.

    Raises:
        RewriteError: It does not, or cannot run.
        ModelError: onnxruntime refuses one of them.
    """
    whole, cached = (open_analysis(one.model, one.weights_folder, one.name) for one in (graph, branch))
    ids = np.random.default_rng(0).integers(0, signature.vocabulary, _TOKENS)
    names = [LOGITS, *signature.present]
    empty = random_cache(signature, 0)

    def run(tokens: Array, past: Sequence[Array], count: int) -> list[Array]:
        caches = dict(zip(signature.past, past, strict=True))
        results: list[Array] = cached.run(names, branch_signature.feed(tokens, count) | caches)
        return results

    try:
        expected = whole.run([LOGITS], signature.feed(ids, 0) | empty)[0]
    except Exception as error:
        raise RewriteError(f"it cannot run a prompt of {_TOKENS} tokens: {first_line(error)}") from error
    try:
        at_once = run(ids, [*empty.values()], 0)[0]
        first, *past = run(ids[:_FIRST], [*empty.values()], 0)
        in_parts = np.concatenate([first, run(ids[_FIRST:], past, _FIRST)[0]], axis=1)
    except Exception as error:
        raise RewriteError(f"its branch with a cache cannot run a prompt: {first_line(error)}") from error
    if not all(equal_but_for_rounding(signature, logits, expected) for logits in (at_once, in_parts)):
        raise RewriteError("its branch with a cache computes prompts otherwise than the other branch")
