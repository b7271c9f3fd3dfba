"""Models that optimum exports from transformers, with merged decoders and the names its runtime expects."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import torch
import transformers as hf
from cases import Feed, case, main
from onnx import helper
from optimum.exporters.onnx import onnx_export_from_model
from torch_export import integers, normal

#: Installed by pip for this family. The extras of optimum would bring torchvision, which transformers imports and which
#: fails without CUDA's libraries.
REQUIREMENTS = [
    "torch==2.13.0",
    "transformers==4.49.0",
    "onnx==1.23.2",
    "onnxscript==0.7.2",
    "onnxruntime==1.31.1",
    "optimum==1.25.3",
]

_SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
#: Lengths of the symbolic dimensions of a model by name, and values of its flags.
Sizes = Mapping[str, int]


def exported(
    name: str, task: str, file: str, sizes: Sequence[Sizes], *, opset: int = 17, **options: Any
) -> Callable[[Callable[[], hf.PreTrainedModel]], Callable[[], hf.PreTrainedModel]]:
    """Register one file of a model's export as a case.

    Args:
        name: Of the case.
        task: As optimum calls it.
        file: The file of the export that becomes the case.
        sizes: Of each request.
        opset: Of the exported model.
        options: Passed to optimum.
    """

    def register(build: Callable[[], hf.PreTrainedModel]) -> Callable[[], hf.PreTrainedModel]:
        @case(name, exporter="optimum", package="optimum", atol=5e-4)
        def _make(path: Path) -> Sequence[Feed]:
            torch.manual_seed(0)
            # This optimum was made for a torch whose default is the TorchScript exporter.
            script = mock.patch("torch.onnx.export", partial(torch.onnx.export, dynamo=False))
            with tempfile.TemporaryDirectory() as folder, script:
                onnx_export_from_model(build(), folder, opset=opset, task=task, do_validation=False, **options)
                onnx.save(onnx.load(Path(folder) / file), path)
            inputs = onnx.load(path).graph.input
            return [{value.name: _array(value, size) for value in inputs} for size in sizes]

        return build

    return register


def _array(value: onnx.ValueInfoProto, sizes: Sizes) -> np.ndarray[Any, Any]:
    """Return data for an input: token ids, a mask, positions after past tokens, a flag or random numbers."""
    tensor = value.type.tensor_type
    shape = [_length(dimension, sizes) for dimension in tensor.shape.dim]
    kind = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    if kind == np.bool_:
        return np.full(shape, sizes["use_cache_branch"], bool)
    if "mask" in value.name:
        return np.ones(shape, kind)
    if value.name == "position_ids":
        return np.broadcast_to(np.arange(shape[1]) + sizes["past_sequence_length"], shape).astype(kind)
    words = 2 if value.name == "token_type_ids" else 100
    return integers(words, *shape) if kind == np.int64 else normal(*shape)


def _length(dimension: onnx.TensorShapeProto.Dimension, sizes: Sizes) -> int:
    if not dimension.dim_param:
        return int(dimension.dim_value)
    return sizes[dimension.dim_param]


_TEXTS = [{"batch_size": batch, "sequence_length": length} for batch, length in ((2, 8), (1, 13), (3, 5))]
_PASTS = [
    {
        "batch_size": batch,
        "sequence_length": new,
        "past_sequence_length": past,
        "past_sequence_length + sequence_length": past + new,
        "past_sequence_length + 1": past + new,
    }
    for batch, new, past in ((2, 3, 6), (1, 1, 9), (3, 4, 0))
]
_BRANCHES = [
    {
        "batch_size": batch,
        "sequence_length": new,
        "past_sequence_length": past,
        "attention_mask_sequence_length": past * cached + new,
        "use_cache_branch": cached,
    }
    for batch, new, past, cached in ((2, 1, 6, 1), (1, 5, 1, 0), (3, 1, 2, 1))
]
_MERGED = [
    {
        "batch_size": batch,
        "decoder_sequence_length": new,
        "past_decoder_sequence_length": past,
        "encoder_sequence_length": source,
        "encoder_sequence_length / 2": source,
        "encoder_sequence_length_out": source,
        "use_cache_branch": cached,
    }
    for batch, new, past, source, cached in ((2, 1, 6, 7, 1), (1, 5, 1, 4, 0), (3, 1, 2, 11, 1))
]


@exported("bert", "text-classification", "model.onnx", _TEXTS, opset=14)
@exported("bert-optimized", "text-classification", "model.onnx", _TEXTS, optimize="O2")
def _bert() -> hf.PreTrainedModel:
    return hf.BertForSequenceClassification(hf.BertConfig(**_SMALL, initializer_range=0.2))


@exported("gpt2-past", "text-generation-with-past", "model.onnx", _PASTS, opset=14)
@exported("gpt2-merged", "text-generation-with-past", "decoder_model_merged.onnx", _BRANCHES, opset=14, legacy=True)
def _gpt2() -> hf.PreTrainedModel:
    config = hf.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    return hf.GPT2LMHeadModel(config)


@exported("llama-past", "text-generation-with-past", "model.onnx", _PASTS)
@exported("llama-merged", "text-generation-with-past", "decoder_model_merged.onnx", _BRANCHES, opset=14, legacy=True)
def _llama() -> hf.PreTrainedModel:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_SMALL, num_key_value_heads=2))


@exported("t5-merged-decoder", "text2text-generation-with-past", "decoder_model_merged.onnx", _MERGED)
def _t5() -> hf.PreTrainedModel:
    config = hf.T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    config.decoder_start_token_id = 0
    return hf.T5ForConditionalGeneration(config)


@exported("whisper-merged-decoder", "automatic-speech-recognition-with-past", "decoder_model_merged.onnx", _MERGED)
def _whisper() -> hf.PreTrainedModel:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {"layers": 2, "attention_heads": 4, "ffn_dim": 64}.items()
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"num_mel_bins": 16, "max_source_positions": 1500, "max_target_positions": 32}
    config = hf.WhisperConfig(
        vocab_size=100, d_model=32, suppress_tokens=None, begin_suppress_tokens=None, **lengths, **sides, **tokens
    )
    return hf.WhisperForConditionalGeneration(config)


if __name__ == "__main__":
    sys.exit(main("optimum_models"))
