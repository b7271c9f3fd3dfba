"""Decoders for tests, what plain onnxruntime generates with them, and the end of what a generator serves."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from chrion import Generator, load, zoo
from chrion.generation.engine import SelectiveEngine
from chrion.generation.iteration import Outcome
from chrion.generation.open_engine import open_engine
from seams.generation import without_native_operators

Array = np.ndarray[Any, Any]
SMALL = {"layers": 2, "hidden": 32, "heads": 2, "inner": 48, "vocabulary": 61, "context": 64}
FORMS = [f"{family}-decoder{form}" for family in ("gpt2", "llama") for form in ("", "-onnx", "-grouped")]


def small_decoder(name: str, **parameters: int) -> onnx.ModelProto:
    """Return a decoder of the zoo with a few thousand weights."""
    own = {"kv_heads": 1} if name.startswith("llama") else {}
    return zoo.build(name, {**SMALL, **own, **parameters})


def with_window(model: onnx.ModelProto, window: int = 8) -> onnx.ModelProto:
    """Let GroupQueryAttention see the last tokens only, which keeps it one operator; the model is changed."""
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            node.attribute.append(helper.make_attribute("local_window_size", window))
    return model


def with_hidden_context(model: onnx.ModelProto) -> onnx.ModelProto:
    """Read the tables of positions with an offset, so that nothing states their length; the model is changed."""
    model.graph.initializer.append(numpy_helper.from_array(np.array(1), "offset"))
    for node in model.graph.node:
        node.input[:] = ["shifted" if name == "position_ids" else name for name in node.input]
    model.graph.node.insert(0, helper.make_node("Add", ["position_ids", "offset"], ["shifted"]))
    return model


def engine_of(model: onnx.ModelProto, threads: int = 1) -> SelectiveEngine:
    """Return the selective engine of a decoder."""
    engine = open_engine(load(model), threads)
    assert isinstance(engine, SelectiveEngine)
    return engine


@functools.cache
def shared_engine(name: str, *, native: bool, context: int = 64) -> SelectiveEngine:
    """Return an engine of a small decoder that tests share: they do not stop it.

    Args:
        name: The decoder.
        native: Use the native operators.
        context: The most tokens.
    """
    with nullcontext() if native else without_native_operators():
        return engine_of(small_decoder(name, context=context))


def is_native(engine: SelectiveEngine) -> bool:
    """Return whether attention is the native operator."""
    return engine.pooled is not None and engine.pooled.decoder.longest > 0


def check_scores(
    outcomes: Sequence[Outcome], texts: Iterable[Sequence[int]], plain: PlainDecoder, atol: float = 2e-5
) -> None:
    """Assert that the outcomes of an iteration are the scores of plain onnxruntime after the whole texts.

    Args:
        outcomes: The outcomes.
        texts: The text of each request.
        plain: The decoder.
        atol: The tolerance of small scores, which is that of larger ones in proportion: products of other sizes add
            in another order.
    """
    for outcome, text in zip(outcomes, texts, strict=True):
        assert isinstance(outcome, np.ndarray), outcome
        expected = plain.scores(text)[-1]
        np.testing.assert_allclose(outcome, expected, atol=atol * max(1, np.abs(expected).max()), rtol=0)
        assert np.argmax(outcome) == np.argmax(expected)


def log_softmax(scores: Array) -> Array:
    """Return the logarithms of the probabilities of tokens by their definition."""
    exact = scores.astype(np.float64)
    logarithms: Array = exact - np.log(np.sum(np.exp(exact)))
    return logarithms


def wait_until_idle(generator: Generator, limit_s: float = 60.0) -> None:
    """Wait until a generator has no requests."""
    end = time.monotonic() + limit_s
    while generator.statistics().requests:
        assert time.monotonic() < end, "requests do not end"
        time.sleep(0.001)


class PlainDecoder:
    """A decoder in one session of plain onnxruntime.

    Args:
        model: The model as a proto or a file.
        heads: The heads and their width of the cache, if the model does not declare them.
    """

    def __init__(self, model: onnx.ModelProto | Path, heads: tuple[int, int] | None = None) -> None:
        source = str(model) if isinstance(model, Path) else model.SerializeToString()
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        self._inputs = {i.name: i for i in self._session.get_inputs()}
        self._outputs = [output.name for output in self._session.get_outputs()]
        caches = [i for i in self._session.get_inputs() if i.name.startswith("past_key_values")]
        self._empty = {
            i.name: np.zeros(
                (1, i.shape[1], 0, i.shape[3]) if heads is None else (1, heads[0], 0, heads[1]),
                np.float16 if "float16" in i.type else np.float32,
            )
            for i in caches
        }

    def scores(self, ids: Sequence[int]) -> Array:
        """Return the logits of all tokens, [tokens, vocabulary]."""
        logits: Array = self._run(ids, 0, self._empty)["logits"]
        return logits[0]

    def _run(self, ids: Sequence[int], past: int, caches: dict[str, Array]) -> dict[str, Array]:
        """Return the outputs for new tokens after others."""
        total = past + len(ids)
        feed = {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(past, total)[None],
        }
        if (kept := self._inputs.get("num_logits_to_keep")) is not None:
            feed[kept.name] = np.zeros([1] * len(kept.shape))  # all of them
        known = {
            name: value.astype(np.int32 if "int32" in self._inputs[name].type else np.int64)
            for name, value in feed.items()
            if name in self._inputs
        }
        return dict(zip(self._outputs, self._session.run(self._outputs, {**known, **caches}), strict=True))

    def generate(self, prompt: Iterable[int], count: int) -> list[int]:
        """Return the most probable tokens after a prompt, computed from the whole text for every token."""
        ids = list(prompt)
        start = len(ids)
        for _ in range(count):
            ids.append(int(np.argmax(self.scores(ids)[-1])))
        return ids[start:]

    def generate_with_cache(self, prompt: Iterable[int], count: int) -> list[int]:
        """Return the most probable tokens after a prompt that is read at once, each computed after the one before."""
        ids, past, caches = list(prompt), 0, self._empty
        found: list[int] = []
        for _ in range(count):
            outputs = self._run(ids, past, caches)
            past += len(ids)
            caches = {name: outputs[name.replace("past_key_values", "present")] for name in caches}
            ids = [int(np.argmax(outputs["logits"][0, -1]))]
            found += ids
        return found
