"""Wrappers and requests shared by the families of transformers models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers as hf
from cases import Feed
from torch_export import Subject, integers, normal

#: Number of tokens of every text model.
VOCABULARY = 100
#: Dynamic axes of token ids.
TEXT = {0: "batch", 1: "sequence"}
#: Sizes that most configurations share.
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


class Positional(torch.nn.Module):
    """A model that takes its inputs by position and returns chosen outputs."""

    def __init__(self, model: torch.nn.Module, inputs: Sequence[str], outputs: Sequence[str], **fixed: Any) -> None:
        super().__init__()
        self.model = model
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)
        self._fixed = fixed

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model."""
        result = self.model(**dict(zip(self._inputs, values, strict=True)), **self._fixed)
        return tuple(result[name] for name in self._outputs)


class WithPast(torch.nn.Module):
    """A decoder that takes keys and values of past tokens and returns them with those of the new ones."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model on token ids, an attention mask, positions, and a key and a value for every layer."""
        input_ids, attention_mask, position_ids, *past = values
        pairs = tuple(zip(past[::2], past[1::2], strict=True))
        result = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=hf.DynamicCache.from_legacy_cache(pairs),
            use_cache=True,
        )
        present = result.past_key_values
        pairs = present if isinstance(present, tuple) else present.to_legacy_cache()
        return (result.logits, *(tensor for pair in pairs for tensor in pair))


def text_feed(batch: int, length: int, *extra: str) -> Feed:
    """Return token ids, a mask that hides the end of the last row, and ``extra`` inputs of zeros and ones."""
    mask = np.ones((batch, length), np.int64)
    mask[-1, length - length // 3 :] = 0
    feed = {"input_ids": integers(VOCABULARY, batch, length), "attention_mask": mask}
    return feed | {name: integers(2, batch, length) for name in extra}


def encoder(model: torch.nn.Module, outputs: Sequence[str], *extra: str) -> Subject:
    """Return a subject that takes text of any batch size and length."""
    feeds = [text_feed(*shape, *extra) for shape in ((2, 8), (1, 13), (3, 5))]
    axes = dict.fromkeys(feeds[0], TEXT) | {name: {0: "batch"} for name in outputs}
    return Subject(Positional(model, list(feeds[0]), outputs), feeds, outputs, axes)


def _past_feed(shape: tuple[int, int, int], layers: int, heads: int, width: int) -> Feed:
    batch, past, new = shape
    feed = {
        "input_ids": integers(VOCABULARY, batch, new),
        "attention_mask": np.ones((batch, past + new), np.int64),
        "position_ids": np.broadcast_to(np.arange(past, past + new, dtype=np.int64), (batch, new)).copy(),
    }
    for layer in range(layers):
        feed[f"past_key_values.{layer}.key"] = normal(batch, heads, past, width, seed=2 * layer)
        feed[f"past_key_values.{layer}.value"] = normal(batch, heads, past, width, seed=2 * layer + 1)
    return feed


def with_past(model: torch.nn.Module, heads: int, width: int, layers: int = 2) -> Subject:
    """Return a subject that takes and returns the keys and values of every layer."""
    feeds = [_past_feed(shape, layers, heads, width) for shape in ((2, 6, 3), (1, 9, 1), (3, 0, 4))]
    past = {0: "batch", 2: "past_sequence"}
    axes: dict[str, dict[int, str]] = {
        "input_ids": TEXT,
        "attention_mask": {0: "batch", 1: "total_sequence"},
        "position_ids": TEXT,
        "logits": TEXT,
    }
    axes |= {name: past for name in feeds[0] if name.startswith("past")}
    present = [f"present.{layer}.{part}" for layer in range(layers) for part in ("key", "value")]
    axes |= {name: {0: "batch", 2: "total_sequence"} for name in present}
    return Subject(WithPast(model), feeds, ["logits", *present], axes)
