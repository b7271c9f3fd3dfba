"""Decoders for tests, and what plain onnxruntime generates with them: the whole text again for every token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from chrion import zoo

Array = np.ndarray[Any, Any]
SMALL = {"layers": 2, "hidden": 32, "heads": 2, "inner": 48, "vocabulary": 61, "context": 64}
FORMS = [f"{family}-decoder{form}" for family in ("gpt2", "llama") for form in ("", "-onnx", "-grouped")]


def small_decoder(name: str, **parameters: int) -> onnx.ModelProto:
    """Return a decoder of the zoo with a few thousand weights."""
    own = {"kv_heads": 1} if name.startswith("llama") else {}
    return zoo.build(name, {**SMALL, **own, **parameters})


class PlainDecoder:
    """A decoder in one session of plain onnxruntime, without a cache between tokens.

    Args:
        model: The model as a proto or a file.
        heads: The heads and their width of the cache, if the model does not declare them.
    """

    def __init__(self, model: onnx.ModelProto | Path, heads: tuple[int, int] | None = None) -> None:
        source = str(model) if isinstance(model, Path) else model.SerializeToString()
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        self._inputs = {i.name for i in self._session.get_inputs()}
        caches = [i for i in self._session.get_inputs() if i.name.startswith("past_key_values")]
        self._empty = {
            i.name: np.zeros(
                (1, i.shape[1], 0, i.shape[3]) if heads is None else (1, heads[0], 0, heads[1]), np.float32
            )
            for i in caches
        }

    def scores(self, ids: Sequence[int]) -> Array:
        """Return the logits of all tokens, [tokens, vocabulary]."""
        feed = {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": np.ones((1, len(ids)), np.int64),
            "position_ids": np.arange(len(ids))[None],
        }
        known = {name: value for name, value in feed.items() if name in self._inputs}
        logits: Array = self._session.run(["logits"], {**known, **self._empty})[0]
        return logits[0]

    def generate(self, prompt: Iterable[int], count: int) -> list[int]:
        """Return the most probable tokens after a prompt."""
        ids = list(prompt)
        start = len(ids)
        for _ in range(count):
            ids.append(int(np.argmax(self.scores(ids)[-1])))
        return ids[start:]
