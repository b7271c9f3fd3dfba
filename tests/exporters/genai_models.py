"""Decoders that the model builder of onnxruntime-genai writes, with fused attention and quantized weights."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import transformers as hf
from cases import Feed, case, main
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

#: Installed by pip for this family.
REQUIREMENTS = [
    "torch==2.13.0",
    "transformers==5.23.0",
    "tokenizers==0.23.3",
    "onnx==1.23.2",
    "onnx-ir==1.1.0",
    "onnxruntime==1.31.1",
    "onnxruntime-genai==0.18.0",
]

_WORDS = 100
_HEADS, _HEAD_WIDTH = 2, 16  # of keys and values
_SMALL = {
    "vocab_size": _WORDS,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": _HEADS,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def built(
    name: str, precision: str, *options: str, atol: float = 1e-3
) -> Callable[[Callable[[], hf.PreTrainedModel]], Callable[[], hf.PreTrainedModel]]:
    """Register a model with a precision and the builder's extra options as a case."""

    def register(build: Callable[[], hf.PreTrainedModel]) -> Callable[[], hf.PreTrainedModel]:
        @case(name, exporter="onnxruntime-genai model builder", package="onnxruntime-genai", atol=atol, rtol=1e-2)
        def _make(path: Path) -> Sequence[Feed]:
            torch.manual_seed(0)
            with tempfile.TemporaryDirectory() as folder:
                source, out = Path(folder) / "source", Path(folder) / "out"
                _save(build(), source)
                _run_builder(source, out, precision, options)
                onnx.save(onnx.load(out / "model.onnx"), path)
            inputs = onnx.load(path).graph.input
            return [_feed(inputs, *shape) for shape in ((2, 5, 0), (1, 1, 7), (1, 3, 4))]

        return build

    return register


def _save(model: hf.PreTrainedModel, folder: Path) -> None:
    """Save a model and a tokenizer of words without a meaning, which the builder asks for."""
    special = {f"{kind}_token": f"w{at}" for at, kind in enumerate(("unk", "bos", "eos", "pad"))}
    tokenizer = Tokenizer(WordLevel({f"w{at}": at for at in range(_WORDS)}, unk_token=special["unk_token"]))
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    model.save_pretrained(folder)


def _run_builder(source: Path, out: Path, precision: str, options: Sequence[str]) -> None:
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", source, "-o", out, "-p", precision]
    extra = ["--extra_options", *options] if options else []
    subprocess.run([*command, "-e", "cpu", "-c", out / "cache", *extra], check=True)  # noqa: S603  (our own arguments)


def _feed(inputs: Sequence[onnx.ValueInfoProto], batch: int, new: int, past: int) -> Feed:
    generator = np.random.default_rng([batch, new, past])
    known: dict[str, Any] = {
        "input_ids": generator.integers(0, _WORDS, (batch, new)),
        "attention_mask": np.ones((batch, past + new), np.int64),
        "position_ids": np.broadcast_to(np.arange(past, past + new), (batch, new)).copy(),
    }
    feed: dict[str, Any] = {}
    for value in inputs:
        if value.name in known:
            feed[value.name] = known[value.name]
            continue
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        feed[value.name] = generator.standard_normal((batch, _HEADS, past, _HEAD_WIDTH)).astype(kind)
    return feed


@built("llama", "fp32")
@built("llama-four-bits", "int4", "int4_block_size=32")
@built("llama-four-bits-qdq", "int4", "int4_block_size=32", "use_qdq=true")
def _llama() -> hf.PreTrainedModel:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_SMALL))


@built("qwen2", "fp32")
def _qwen2() -> hf.PreTrainedModel:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**_SMALL))


@built("mistral-four-bits", "int4", "int4_block_size=32", "int4_accuracy_level=4", atol=0.05)
def _mistral() -> hf.PreTrainedModel:
    return hf.MistralForCausalLM(hf.MistralConfig(**_SMALL, head_dim=_HEAD_WIDTH, sliding_window=4))


@built("phi3", "fp32")
def _phi3() -> hf.PreTrainedModel:
    return hf.Phi3ForCausalLM(hf.Phi3Config(**_SMALL, original_max_position_embeddings=64))


if __name__ == "__main__":
    sys.exit(main("genai_models"))
