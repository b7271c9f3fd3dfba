"""Decoders of optimum, transformers and the model builder of onnxruntime-genai, split or merged."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from sample import read_sample

import chrion
from chrion import Generator
from chrion.errors import ModelError, OptionError
from chrion.generation.engine import SelectiveEngine
from chrion.generation.open_engine import MergedEngine, open_engine
from chrion.generation.rewrites.decoder import decoder_signature
from decoder_support import PlainDecoder
from request_mixes import check_random_mixes
from seams.generation import loop_of, without_native_operators

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]


@pytest.mark.parametrize("native", [True, False], ids=["one operator", "several operators"])
@pytest.mark.parametrize(
    "stem",
    [
        "optimum_models-gpt2-past",
        "genai_models-llama",
        "transformer_models-gpt2-past",
        "transformer_models-gpt2-past-dynamo",
        "transformer_models-llama-past",
    ],
)
def test_exported_decoders_are_split(stem: str, tmp_path: Path, *, native: bool) -> None:
    """Any mix of requests has the scores of plain onnxruntime."""
    model = read_sample(stem, tmp_path).model
    with nullcontext() if native else without_native_operators():
        engine = open_engine(chrion.load(model), threads=1)
    assert engine.refused == ""
    check_random_mixes(engine, PlainDecoder(model, engine.signature.cache_shapes[0]), 20)


def by_the_first_branch(model: Path, count: int) -> list[list[int]]:
    """Return what plain onnxruntime generates with the branch for prompts: the whole text again for every token."""
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    inputs = {argument.name: argument.shape for argument in session.get_inputs()}
    caches = {name: shape for name, shape in inputs.items() if "past" in name}
    unused = {name: np.zeros((1, shape[1], 1, shape[3]), np.float32) for name, shape in caches.items()}
    texts = [[*ids] for ids in PROMPTS]
    for text, _ in itertools.product(texts, range(count)):
        known = {
            "input_ids": np.array([text]),
            "attention_mask": np.ones((1, len(text)), np.int64),
            "position_ids": np.arange(len(text))[None],
            "use_cache_branch": np.array([False]),
        }
        feed = {name: value for name, value in known.items() if name in inputs} | unused
        text.append(int(np.argmax(session.run(["logits"], feed)[0][0, -1])))
    return [text[len(ids) :] for text, ids in zip(texts, PROMPTS, strict=True)]


@pytest.mark.parametrize(
    ("stem", "engine", "context"),
    [("optimum_models-llama-merged", SelectiveEngine, 0), ("optimum_models-gpt2-merged", MergedEngine, 64)],
)
def test_merged_decoders_of_optimum(stem: str, engine: type[Any], context: int, tmp_path: Path) -> None:
    """The branch of Llama computes prompts; that of GPT-2 was traced with single tokens, and reads a whole table."""
    model = read_sample(stem, tmp_path).model
    with Generator(model, threads=1, chunk=2) as generator:
        assert type(loop_of(generator).engine) is engine
        assert generator.context == context
        assert [s.result(60) for s in [generator.submit(ids, 12) for ids in PROMPTS]] == by_the_first_branch(model, 12)
        if context:
            assert len(generator.submit([1] * (context - 4), 5).result(60)) == 5
            with pytest.raises(OptionError, match="positions for 64 tokens, the request needs 65"):
                generator.submit([1] * (context - 4), 6)


@pytest.mark.parametrize(
    ("stem", "about"),
    [
        ("transformer_multimodal-t5-decoder-past", "which reads 'encoder_"),
        ("transformer_multimodal-whisper-decoder-past", "which reads '"),
        ("optimum_models-whisper-merged-decoder", "which reads 'encoder_hidden_states'"),
    ],
)
def test_encoder_decoder_models_are_refused_in_one_line(stem: str, about: str, tmp_path: Path) -> None:
    """The message says that the model is part of an encoder-decoder model."""
    graph = chrion.load(read_sample(stem, tmp_path).model)
    with pytest.raises(ModelError, match=f"part of an encoder-decoder model, {about}") as refused:
        decoder_signature(graph)
    assert "\n" not in str(refused.value)
