"""Selective batching: a decoder as token-wise parts and attention parts.

Yu et al., *Orca: a distributed serving system for transformer-based generative models* (OSDI 2022), section 3.2. The
token-wise parts run once on the concatenated tokens of all requests of a batch, [1, sum of L, hidden]. The attention
parts run once for each request on its own keys and values. The stages, in the order of :func:`split_decoder`:

1. Replace fused attention by plain operators (``plain_attention``).
2. Observe the sizes of all values, and replace those that depend on sizes only (``observation``).
3. Rewrite the model: compute the logits of all tokens (``last_logits``), read positions in place of computing them
   (``computed_positions``), and let caches grow in place where they are plain concatenations (``cache_append``).
4. Find each layer's attention output: the earliest value with one row per token that every path from the layer's past
   keys and values to the logits passes.
5. Follow the tokens (``token_axis``). An operator that mixes tokens belongs to the requests, with all that follows, up
   to the next attention output.
6. Number the parts by the attention outputs before them, and extract them (``selective_parts``).

A model is refused if its logits do not become token-wise again, for example because an operator outside attention
mixes tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from chrion.generation.rewrites.cache_append import append_caches
from chrion.generation.rewrites.computed_positions import read_positions
from chrion.generation.rewrites.decoder import IDS, LOGITS, MASK, POSITIONS, DecoderSignature
from chrion.generation.rewrites.last_logits import keep_all_logits, select_no_token
from chrion.generation.rewrites.long_texts import find_trimmed_caches, reduces_positions
from chrion.generation.rewrites.observation import Decoder, Size, fold_sizes
from chrion.generation.rewrites.plain_attention import expand_attention
from chrion.generation.rewrites.selective_parts import Part, PartBuilder
from chrion.generation.rewrites.token_axis import leading, token_axes, tokens_axis
from chrion.graph.assemble import node_reads
from chrion.graph.model import Graph
from chrion.graph.rewrite import RewriteError, describe, has_bodies, nodes_before, refusals_of, standard_opset

log = logging.getLogger(__name__)

#: Operators that only arrange elements; the cut is made where the tokens are contiguous.
_ARRANGING = frozenset({"Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_MIN_OPSET = 13  # before, Softmax and others work on flattened axes


@dataclass(frozen=True)
class SplitDecoder:
    """A decoder in parts, in the order in which they run."""

    #: The decoder. Its caches are inputs if the attention parts have no past and present keys and values.
    decoder: Decoder
    parts: tuple[Part, ...]
    #: The token axes of the values that token-wise parts compute, and of attention outputs, by name.
    axes: Mapping[str, int]
    #: The values that are computed by request and concatenated along the token axis: element type and shape, by name.
    merged: Mapping[str, tuple[np.dtype[Any], tuple[Size, ...]]]
    #: False if the length of a text may change what its first tokens are, so that prompts have to stay whole.
    divisible: bool = True


def split_decoder(graph: Graph, signature: DecoderSignature) -> SplitDecoder:
    """Split a decoder into token-wise parts and attention parts.

    Args:
        graph: A decoder with free dimensions.
        signature: Its inputs and outputs.

    Raises:
        RewriteError: The model cannot be split; the message names the place.
        ModelError: onnxruntime refuses the model, or cannot run it.
    """
    decoder = Decoder(graph, signature, graph.model)
    with refusals_of(f"{graph.name}: no selective batching"):
        _check_structure(graph, signature)
        for rewrite in (keep_all_logits, expand_attention, select_no_token, read_positions):
            decoder = _tried(rewrite, decoder)
        for name in signature.present:
            if decoder.seen.shapes[name][2:3] != (Size(1, 1, 0),):
                raise RewriteError(f"{name!r} has other rows than one for each past and new token")
        appended = _tried(append_caches, decoder)
        kinds = _Kinds(_Flow(appended))
        if not all(name in kinds.axes for name in appended.appended.values()):
            kinds = _Kinds(_Flow(decoder))
    return _parts(kinds)


def _tried(rewrite: Callable[[Decoder], Decoder], decoder: Decoder) -> Decoder:
    """Return a rewritten decoder, or the decoder itself if it is refused."""
    try:
        return rewrite(decoder)
    except RewriteError as refusal:
        log.info("%s: %s: %s", decoder.graph.name, rewrite.__name__, refusal)
        return decoder


def _check_structure(graph: Graph, signature: DecoderSignature) -> None:
    """Raise a refusal for a model whose operators show that it cannot be split."""
    if standard_opset(graph.model) < _MIN_OPSET:
        raise RewriteError(f"expected opset {_MIN_OPSET} or later, found {standard_opset(graph.model)}")
    if has_bodies(graph.model.graph.node):
        raise RewriteError("the model has control flow")
    for name, place in find_trimmed_caches(graph, signature).items():
        raise RewriteError(f"{place} may drop rows of {name!r}")


def _parts(kinds: _Kinds) -> SplitDecoder:
    """Return the parts of a classified decoder."""
    kinds.move_arrangements()
    flow, decoder = kinds.flow, kinds.flow.decoder
    parts = PartBuilder(decoder, flow.folded).build(kinds.assignment(), kinds.order, flow.results, kinds.constant)
    shapes = {name: tuple(size for size in decoder.seen.shapes[name] if size is not None) for name in kinds.merged}
    merged = {name: (decoder.seen.types[name], shape) for name, shape in sorted(shapes.items())}
    return SplitDecoder(decoder, tuple(parts), kinds.axes, merged, not reduces_positions(decoder.model))


class _Flow:
    """The nodes that compute the logits and the cache, without those whose results depend on sizes only.

    Args:
        decoder: The decoder. What is wanted of it are the logits, and the new or all keys and values.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.seen = decoder, decoder.seen
        self.caches = [*decoder.appended] or [*decoder.signature.past]
        self.results = [LOGITS, *(decoder.appended.values() or decoder.signature.present)]
        self.nodes = list(decoder.model.graph.node)
        weights = {t.name for t in decoder.model.graph.initializer}
        self.folded = fold_sizes(decoder.model, self.seen)
        self.producer = {name: at for at, node in enumerate(self.nodes) for name in node.output if name}
        self.reads = [
            [name for name in names if name not in weights and name not in self.folded]
            for names in node_reads(decoder.model)
        ]
        self.needed = nodes_before(self.results, self.producer, self.reads)
        self.for_logits = nodes_before([LOGITS], self.producer, self.reads)
        self.readers: dict[str, list[int]] = {}
        for at in sorted(self.needed):
            for read in self.reads[at]:
                self.readers.setdefault(read, []).append(at)

    def attention_output(self, at: int) -> str:
        """Return the attention output of the layer whose past keys and values are the inputs ``at`` and ``at + 1``.

        The nodes are visited in topological order with the set of values that are still to be read. Where the set has
        one value, all paths pass through it.
        """
        names, label = self.caches[at : at + 2], self.decoder.signature.past[at]
        missing = {
            name: count for name in names if (count := sum(r in self.for_logits for r in self.readers.get(name, ())))
        }
        if not missing:
            raise RewriteError(f"the logits do not depend on {label!r}")
        reached = set(missing)
        for index in sorted(self.for_logits):
            read = [name for name in self.reads[index] if name in reached]
            if not read:
                continue
            for name in read:
                missing[name] -= 1
            missing = {name: count for name, count in missing.items() if count}
            for name in self.nodes[index].output:
                count = sum(reader in self.for_logits for reader in self.readers.get(name, ()))
                reached.add(name)
                if count:
                    missing[name] = count
            if len(missing) == 1 and self._mergeable(only := next(iter(missing))):
                return self._arranged(only)
        raise RewriteError(
            f"found no attention output of {label!r}, a value with one row per token that all paths to the logits pass"
        )

    def _mergeable(self, name: str) -> bool:
        kind = self.seen.types.get(name)
        return kind is not None and kind.kind == "f" and tokens_axis(self.seen.shapes[name]) is not None

    def _arranged(self, name: str) -> str:
        """Return a value, or the one after operators that arrange it with contiguous tokens."""
        best = name
        while len(self.readers[name]) == 1 and not self._contiguous(best):
            node = self.nodes[self.readers[name][0]]
            if node.op_type not in _ARRANGING or not self._mergeable(node.output[0]):
                break
            name = node.output[0]
            best = name if self._contiguous(name) else best
        return best

    def _contiguous(self, name: str) -> bool:
        axis = tokens_axis(self.seen.shapes[name])
        return axis is not None and leading(self.seen.shapes[name], axis)


class _Kinds:
    """The kind and the number of the part of every node and value.

    Raises:
        RewriteError: The logits are not token-wise.
    """

    def __init__(self, flow: _Flow) -> None:
        self.flow = flow
        self.merged = frozenset(flow.attention_output(at) for at in range(0, len(flow.caches), 2))
        self.order = sorted(flow.needed)
        #: The token axis of token-wise values.
        self.axes: dict[str, int] = {}
        #: True for values of a request, False for token-wise ones, by name. Weights have no entry.
        self.request: dict[str, bool] = {}
        #: The attention outputs on the longest path to a value; -1 for values of a request before any part.
        self.stage: dict[str, int] = {}
        #: True for nodes of a request.
        self.by_request: dict[int, bool] = {}
        #: Nodes that compute the same for all requests, from weights; every part that needs one has a copy of it.
        self.constant: set[int] = set()
        self.mixing: dict[int, str] = {}
        for name in (IDS, POSITIONS, MASK, *flow.caches):
            self.request[name] = name not in {IDS, POSITIONS}
            self.stage[name] = 0 if name in flow.caches else -1
            if not self.request[name]:
                self.axes[name] = 1
        for at in self.order:
            self._classify(at)
        if self.request.get(LOGITS, True):
            raise RewriteError(self._place())

    def _classify(self, at: int) -> None:
        node, flow = self.flow.nodes[at], self.flow
        reads = [n for n in flow.reads[at] if flow.producer.get(n, -1) not in self.constant]
        if not reads and not self._sizes(node):
            self.constant.add(at)
            return
        stage = max((self.stage[name] for name in reads if name in self.stage), default=-1)
        outputs = [name for name in node.output if name]
        axes = None
        # A shape may have the number of tokens; any other use of it gives each request something else.
        sizes = self._sizes(node)
        shaping = node.op_type in {"ConstantOfShape", "Expand", "Reshape"}
        alike = not sizes or (shaping and not any(size.past for size in sizes))
        if alike and not any(self.request.get(name, False) for name in reads):
            tokens = {name: self.axes[name] for name in reads if name in self.axes}
            axes = token_axes(node, tokens, flow.seen)
            if axes is None:
                self.mixing[at] = f"{describe(node)} may mix tokens"
        elif any(name in self.axes for name in reads):
            self.mixing[at] = f"{describe(node)} joins tokens with other values of a request"
        self.by_request[at] = axes is None
        for name in outputs:
            self.request[name] = axes is None
            self.stage[name] = stage if axes is None else max(stage, 0)
            if axes is not None:
                self.axes[name] = axes[0]
            elif name in self.merged:
                axis = tokens_axis(flow.seen.shapes[name])
                self.request[name], self.stage[name] = False, max(stage, 0) + 1
                self.axes[name] = -1 if axis is None else axis

    def _sizes(self, node: onnx.NodeProto) -> list[Size]:
        """Return the sizes that a node reads and that depend on the request."""
        read = [name for name in node.input if name in self.flow.folded and name not in self.flow.seen.constants]
        return [size for name in read for size in self.flow.seen.sizes[name] if not size.constant]

    def _place(self) -> str:
        """Return where tokens are mixed outside the attention of a layer: the first place on the ways to the logits."""
        first: dict[int, int] = {}  # the first mixing node that a value of a request stems from, by its producer
        for at in self.order:
            if not self.by_request.get(at):
                continue
            sources = [self.flow.producer.get(n, -1) for n in self.flow.reads[at] if self.request.get(n, False)]
            origins = {first[source] for source in sources if source in first} | ({at} & self.mixing.keys())
            if origins:
                first[at] = min(origins)
        origin = first.get(self.flow.producer.get(LOGITS, -1))
        if origin is None:
            return "the logits depend on the cache or the mask outside the attention of a layer"
        return f"{self.mixing[origin]} outside the attention of a layer"

    def move_arrangements(self) -> None:
        """Move operators that only arrange tokens for attention into the attention, where slices are contiguous."""
        flow = self.flow
        for at in reversed(self.order):
            node = flow.nodes[at]
            name = node.output[0]
            if self.by_request.get(at, True) or node.op_type not in _ARRANGING or name in flow.results:
                continue
            readers = flow.readers.get(name, [])
            stages = {self.stage[flow.nodes[r].output[0]] - (flow.nodes[r].output[0] in self.merged) for r in readers}
            if leading(flow.seen.shapes[name], self.axes[name]) or not all(self.by_request[r] for r in readers):
                continue
            if stages == {self.stage[name]}:
                self.by_request[at], self.request[name] = True, True
                del self.axes[name]

    def assignment(self) -> dict[int, tuple[int, bool]]:
        """Return the part of every node that is not constant: its number, and whether it is an attention part.

        A node of a request on the cache alone, such as its transposition, joins the part of its first reader.
        """
        parts: dict[int, tuple[int, bool]] = {}
        for at in reversed(self.order):
            if at in self.constant:
                continue
            names = [name for name in self.flow.nodes[at].output if name]
            stage = min(self.stage[name] - (name in self.merged) for name in names)
            later = [parts[reader][0] for name in names for reader in self.flow.readers.get(name, ())]
            wanted = any(name in self.merged or name in self.flow.results for name in names)
            if self.by_request[at] and stage >= 0 and later and not wanted:
                stage = max(stage, min(later))
            parts[at] = (stage, self.by_request[at])
        return parts
