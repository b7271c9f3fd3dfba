"""Special tokens: those of a tokenizer, those that the files beside it name, and those that end texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chrion.errors import ModelError
from chrion.generation.rewrites.context_length import read_configuration
from chrion.generation.rewrites.model_folder import find_beside

#: The special tokens that transformers knows by name, and the list of the others.
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OTHERS = "additional_special_tokens"


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the special tokens of a tokenizer, which texts omit."""
    return {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def named_tokens(folder: Path) -> dict[str, str | list[str]]:
    """Return the special tokens that the files of transformers name, ``bos_token`` for example.

    ``special_tokens_map.json`` has those that ``tokenizer_config.json`` lacks.

    Args:
        folder: The folder with the files.

    Raises:
        ModelError: A file is not JSON.
    """
    named = {
        **read_configuration(folder / "special_tokens_map.json"),
        **read_configuration(folder / "tokenizer_config.json"),
    }
    texts: dict[str, str | list[str]] = {}
    for name in _NAMES:
        text = _content(named.get(name))
        if text is not None:
            texts[name] = text
    if isinstance(others := named.get(_OTHERS), list) and others:
        texts[_OTHERS] = [text for other in others if (text := _content(other)) is not None]
    return texts


def find_end_token(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Return the token that ``eos_token`` names, if the tokenizer has it.

    Args:
        folder: The folder with the files of the tokenizer.
        tokenizer: The tokenizer.

    Raises:
        ModelError: A file is not JSON.
    """
    text = named_tokens(folder).get("eos_token")
    token = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return frozenset() if token is None else frozenset({int(token)})


def find_stop_tokens(model: Path) -> frozenset[int]:
    """Return the tokens that end a text, from the configuration that transformers or onnxruntime-genai writes.

    Raises:
        ModelError: A file is not JSON, or its tokens are no numbers.
    """
    for name in ("generation_config.json", "config.json", "genai_config.json"):
        path = find_beside(model, name)
        content = read_configuration(path) if path is not None else {}
        # Models of text and images have text_config, those of onnxruntime-genai model.
        parts = [part for part in (content, content.get("text_config"), content.get("model")) if isinstance(part, dict)]
        stated = next((part["eos_token_id"] for part in parts if part.get("eos_token_id") is not None), None)
        if stated is not None:
            tokens = stated if isinstance(stated, list) else [stated]
            if not all(type(token) is int for token in tokens):
                raise ModelError(f"{path}: eos_token_id: expected a token or a list of tokens, found {stated!r:.100}")
            return frozenset(tokens)
    return frozenset()


def _content(token: Any) -> str | None:
    """Return the text of a special token, which is written as such or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
