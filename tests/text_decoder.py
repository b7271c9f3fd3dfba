"""A small decoder of texts, whose tokens are words."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from decoder_support import PlainDecoder, small_decoder

_MODEL = small_decoder("llama-decoder", context=20_000)
_WORDS = [f"wörd{at}" for at in range(61)]


def save_text_decoder(folder: Path) -> Path:
    """Write the decoder and, beside it, a tokenizer of words; skip the test without the package tokenizers."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers: pip install 'chrion[text]'")
    onnx.save(_MODEL, folder / "decoder.onnx")
    vocabulary = {word: at for at, word in enumerate(_WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=_WORDS[0]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "decoder.onnx"


def text_after(prompt: list[int], count: int) -> str:
    """Return the text that plain onnxruntime generates."""
    return "".join(f" {_WORDS[token]}" for token in PlainDecoder(_MODEL).generate(prompt, count))
