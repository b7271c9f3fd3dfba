"""Decoders in repositories of servers, with tokenizers whose texts are easy to read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import tokenizers

from decoder_support import small_decoder
from model_repository import put

MODEL = small_decoder("llama-decoder", context=20_000)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    " w5 {{ message.content }}{% endfor %}{% if add_generation_prompt %} w6{% endif %}"
)

TOOLS = (
    "{% for message in messages %}{% if message.role == 'user' %} w1 {{ message.content }}"
    "{% elif message.tool_calls %}{% for call in message.tool_calls %} w2"
    "{% for _, value in call.function.arguments.items() %} {{ value }}{% endfor %}{% endfor %}"
    "{{ message.content or '' }}{% else %} w3 {{ message.content }}{% endif %}{% endfor %}"
)

#: A template with a variable that requests may set.
THINKING = (
    "w1{% if enable_thinking is false %} w7 w8{% endif %} {{ messages[0].content }}{% if add_generation_prompt %} w9"
    "{% endif %}"
)


def put_decoder(
    root: Path,
    name: str,
    toml: str = "[generation]\nmax_batch = 4\n",
    template: str = TEMPLATE,
    *,
    model: onnx.ModelProto = MODEL,
    **files: Any,
) -> Path:
    """Put a decoder with a tokenizer of words into a repository; return its file.

    Args:
        root: The repository.
        name: The model's name.
        toml: Its settings.
        template: Its chat template; empty for none.
        model: The decoder.
        files: JSON files beside it, by their names without the extension.
    """
    file = put(root, name, model, toml=toml)
    words = {f"w{at}": at for at in range(61)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))  # noqa: S106 - a word
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(file.parent / "tokenizer.json"))
    if template:
        settings = {"chat_template": template, "bos_token": {"content": "w1"}}
        (file.parent / "tokenizer_config.json").write_text(json.dumps(settings))
    for other, content in files.items():
        (file.parent / f"{other}.json").write_text(json.dumps(content))
    return file


def put_byte_decoder(root: Path, name: str) -> None:
    """Put a decoder of bytes, of which some are parts of characters and some special tokens, into a repository."""
    model = small_decoder("llama-decoder", vocabulary=260, context=2000)
    file = put(root, name, model, toml="[generation]\nmax_batch = 4\n")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({byte: at for at, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|a|>", "<|b|>", "<|c|>", "<|d|>"])
    tokenizer.save(str(file.parent / "tokenizer.json"))
    (file.parent / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")


def words_of(tokens: Sequence[int]) -> str:
    """Return the text of tokens after others."""
    return "".join(f" w{token}" for token in tokens)
