"""Models of the transformers library that read images, sound or text of two kinds, with random weights."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers as hf
from cases import Feed, main
from torch_export import Axes, Subject, captured, integers, normal, traced
from transformer_wrappers import TEXT, VOCABULARY, Positional, encoder, text_feed

#: Installed by pip for this family.
REQUIREMENTS = [
    "torch==2.13.0",
    "transformers==4.49.0",
    "onnx==1.23.2",
    "onnxscript==0.7.2",
    "onnxruntime==1.31.1",
]

_WIDTHS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_IMAGE = {**_WIDTHS, "image_size": 32, "patch_size": 8}


class DecoderWithPast(torch.nn.Module):
    """A decoder of an encoder-decoder model, with keys and values of past tokens and of the encoder's output."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the decoder on token ids, hidden states of the encoder, and four tensors for every layer."""
        ids, states, *past = values
        groups = tuple(tuple(past[at : at + 4]) for at in range(0, len(past), 4))
        result = self.model(
            decoder_input_ids=ids,
            encoder_outputs=(states,),
            past_key_values=hf.EncoderDecoderCache.from_legacy_cache(groups),
            use_cache=True,
        )
        present = result.past_key_values
        groups = present if isinstance(present, tuple) else present.to_legacy_cache()
        return (result.logits, *(tensor for group in groups for tensor in group[:2]))


class Decoder(torch.nn.Module):
    """A decoder of an encoder-decoder model without past tokens."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Run the decoder on token ids and hidden states of the encoder."""
        return self.model(decoder_input_ids=ids, encoder_outputs=(states,), use_cache=False).logits


def _decoder(model: torch.nn.Module, width: int = 32) -> Subject:
    feeds: list[Feed] = [
        {
            "decoder_input_ids": integers(VOCABULARY, batch, length),
            "encoder_hidden_states": normal(batch, source, width),
        }
        for batch, length, source in ((2, 5, 7), (1, 9, 4), (3, 2, 11))
    ]
    axes: Axes = {"decoder_input_ids": TEXT, "encoder_hidden_states": {0: "batch", 1: "source"}, "logits": TEXT}
    return Subject(Decoder(model), feeds, ["logits"], axes)


def _decoder_past_feed(batch: int, past: int, source: int) -> Feed:
    feed = {"decoder_input_ids": integers(VOCABULARY, batch, 1), "encoder_hidden_states": normal(batch, source, 32)}
    for layer in range(2):
        for part, (owner, length) in enumerate((("decoder", past), ("encoder", source))):
            for at, kind in enumerate(("key", "value")):
                name = f"past_key_values.{layer}.{owner}.{kind}"
                feed[name] = normal(batch, 4, length, 8, seed=4 * layer + 2 * part + at)
    return feed


def _decoder_past(model: torch.nn.Module) -> Subject:
    feeds = [_decoder_past_feed(*shape) for shape in ((2, 5, 7), (1, 9, 4), (3, 1, 11))]
    axes: dict[str, dict[int, str]] = {"decoder_input_ids": {0: "batch"}}
    axes["encoder_hidden_states"] = {0: "batch", 1: "source"}
    axes |= {name: {0: "batch", 2: "past" if "decoder" in name else "source"} for name in feeds[0] if "past" in name}
    outputs = ["logits", *(f"present.{layer}.decoder.{kind}" for layer in range(2) for kind in ("key", "value"))]
    return Subject(DecoderWithPast(model), feeds, outputs, axes)


def _image(
    model: torch.nn.Module, outputs: Sequence[str], size: int = 32, batches: Sequence[int] = (2, 1, 4)
) -> Subject:
    feeds = [{"pixel_values": normal(batch, 3, size, size)} for batch in batches]
    return Subject(Positional(model, ["pixel_values"], outputs), feeds, outputs, {"pixel_values": {0: "batch"}})


@traced("t5-encoder", opset=14)
@captured("t5-encoder-dynamo")
def _t5_encoder() -> Subject:
    return encoder(hf.T5EncoderModel(_t5_config()), ["last_hidden_state"])


@traced("t5-decoder", opset=15)
@captured("t5-decoder-dynamo")
def _t5_decoder() -> Subject:
    return _decoder(hf.T5ForConditionalGeneration(_t5_config()))


@traced("t5-decoder-past", opset=17)
@captured("t5-decoder-past-dynamo")
def _t5_decoder_past() -> Subject:
    return _decoder_past(hf.T5ForConditionalGeneration(_t5_config()))


@traced("bart-encoder", opset=17)
def _bart_encoder() -> Subject:
    return encoder(hf.BartModel(_bart_config()).get_encoder(), ["last_hidden_state"])


@traced("bart-decoder", opset=17)
@captured("bart-decoder-dynamo")
def _bart_decoder() -> Subject:
    return _decoder(hf.BartForConditionalGeneration(_bart_config()))


@traced("bart-decoder-past", opset=18)
def _bart_decoder_past() -> Subject:
    return _decoder_past(hf.BartForConditionalGeneration(_bart_config()))


@traced("whisper-encoder", opset=17)
@captured("whisper-encoder-dynamo")
def _whisper_encoder() -> Subject:
    model = hf.WhisperModel(_whisper_config()).get_encoder()
    feeds = [{"input_features": normal(batch, 16, 60)} for batch in (2, 1, 3)]
    outputs = ["last_hidden_state"]
    return Subject(Positional(model, ["input_features"], outputs), feeds, outputs, {"input_features": {0: "batch"}})


@traced("whisper-decoder", opset=17)
@captured("whisper-decoder-dynamo")
def _whisper_decoder() -> Subject:
    return _decoder(hf.WhisperForConditionalGeneration(_whisper_config()))


@traced("whisper-decoder-past", opset=17)
def _whisper_decoder_past() -> Subject:
    return _decoder_past(hf.WhisperForConditionalGeneration(_whisper_config()))


@traced("wav2vec2", opset=17)
def _wav2vec2() -> Subject:
    sizes = {"conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 2)}
    model = hf.Wav2Vec2ForCTC(
        hf.Wav2Vec2Config(vocab_size=32, **_WIDTHS, **sizes, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4)
    )
    feeds = [{"input_values": normal(*shape)} for shape in ((2, 400), (1, 640), (3, 300))]
    axes = {"input_values": {0: "batch", 1: "samples"}, "logits": {0: "batch", 1: "frames"}}
    return Subject(Positional(model, ["input_values"], ["logits"]), feeds, ["logits"], axes)


@traced("vit", opset=14)
@captured("vit-dynamo")
def _vit() -> Subject:
    return _image(hf.ViTForImageClassification(hf.ViTConfig(**_IMAGE, num_labels=7)), ["logits"])


@traced("deit", opset=16)
def _deit() -> Subject:
    return _image(hf.DeiTModel(hf.DeiTConfig(**_IMAGE)), ["last_hidden_state", "pooler_output"])


@traced("swin", opset=16)
@captured("swin-dynamo")
def _swin() -> Subject:
    config = hf.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=5
    )
    return _image(hf.SwinForImageClassification(config), ["logits"])


@traced("segformer", opset=17)
def _segformer() -> Subject:
    config = hf.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        initializer_range=0.2,
        num_labels=4,
    )
    model = Positional(hf.SegformerForSemanticSegmentation(config), ["pixel_values"], ["logits"])
    feeds = [{"pixel_values": normal(*shape)} for shape in ((2, 3, 32, 32), (1, 3, 64, 32), (1, 3, 32, 96))]
    return Subject(model, feeds, ["logits"], {"pixel_values": {0: "batch", 2: "height", 3: "width"}})


@traced("convnextv2", opset=18)
@captured("convnextv2-dynamo")
def _convnextv2() -> Subject:
    config = hf.ConvNextV2Config(image_size=32, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=5)
    return _image(hf.ConvNextV2ForImageClassification(config), ["logits"])


@captured("dinov2-dynamo", opset=20)
@traced("dinov2", opset=17)
def _dinov2() -> Subject:
    widths = {name: value for name, value in _IMAGE.items() if name != "intermediate_size"}
    return _image(hf.Dinov2Model(hf.Dinov2Config(**widths, mlp_ratio=2)), ["last_hidden_state", "pooler_output"])


@traced("clip", opset=16)
@captured("clip-dynamo")
def _clip() -> Subject:
    text = {**_WIDTHS, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 2}
    config = hf.CLIPConfig(text_config=text, vision_config=dict(_IMAGE), projection_dim=16)
    outputs = ["logits_per_image", "logits_per_text", "text_embeds", "image_embeds"]
    feeds = [
        {**text_feed(texts, length), "pixel_values": normal(images, 3, 32, 32)}
        for texts, length, images in ((2, 8, 3), (3, 5, 2), (5, 11, 4))
    ]
    names = {0: "texts", 1: "sequence"}
    axes = {"input_ids": names, "attention_mask": names, "pixel_values": {0: "images"}}
    return Subject(Positional(hf.CLIPModel(config), list(feeds[0]), outputs), feeds, outputs, axes)


@traced("mamba", opset=17)
def _mamba() -> Subject:
    config = hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=2)
    model = Positional(hf.MambaForCausalLM(config), ["input_ids"], ["logits"], use_cache=False)
    feeds = [{"input_ids": integers(VOCABULARY, batch, 6)} for batch in (2, 1, 4)]
    return Subject(model, feeds, ["logits"], {"input_ids": {0: "batch"}})


@captured("time-series-dynamo")
def _time_series() -> Subject:
    config = hf.PatchTSTConfig(
        num_input_channels=3, context_length=32, patch_length=8, patch_stride=8, d_model=16, ffn_dim=32,
        num_hidden_layers=2, num_attention_heads=2, prediction_length=4,
    )  # fmt: skip
    model = Positional(hf.PatchTSTForPrediction(config), ["past_values"], ["prediction_outputs"])
    feeds = [{"past_values": normal(batch, 32, 3)} for batch in (2, 1, 5)]
    return Subject(model, feeds, ["prediction_outputs"], {"past_values": {0: "batch"}})


def _t5_config() -> hf.T5Config:
    return hf.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )


def _bart_config() -> hf.BartConfig:
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in _SIDE.items()}
    return hf.BartConfig(vocab_size=VOCABULARY, d_model=32, max_position_embeddings=64, forced_eos_token_id=2, **sizes)


def _whisper_config() -> hf.WhisperConfig:
    sizes: dict[str, Any] = {
        f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in _SIDE.items()
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return hf.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, num_mel_bins=16, max_source_positions=30, max_target_positions=32,
        suppress_tokens=None, begin_suppress_tokens=None, **sizes, **tokens,
    )  # fmt: skip


_SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}


if __name__ == "__main__":
    sys.exit(main("transformer_multimodal"))
