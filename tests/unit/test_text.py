"""Text that grows token by token, with tokenizers of the kinds that decoders have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from chrion.generation.text import TextBuilder, load_tokenizer

WORDS = ["▁Once", "▁upon", "▁a", "▁time", "▁there", "▁was", "<unk>"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]
TEXT = "Grüße, 世界! 👩‍🚀 naïve — עברית end. And more."


def sentencepiece() -> Tokenizer:
    """Return a tokenizer with Llama's decoder: bytes for unknown characters, and no space at the beginning."""
    vocabulary = {token: at for at, token in enumerate([*BYTES, *WORDS])}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))  # noqa: S106 - a word
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def byte_level() -> Tokenizer:
    """Return a tokenizer of single bytes as GPT-2's, which writes each byte as a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({token: at for at, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Return a tokenizer of single bytes as those of SentencePiece models write unknown characters."""
    tokenizer = Tokenizer(BPE({token: at for at, token in enumerate(BYTES)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


class BytePieces:
    """A decoder of pieces of bytes, as GPT-2's tokenizer is; it counts the tokens that it decodes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces, self.decoded = pieces, 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        self.decoded += len(ids)
        return b"".join(self.pieces[at] for at in ids).decode(errors="replace")


def grow(tokenizer: Any, tokens: Sequence[int], stop: Sequence[str] = (), prompt: Sequence[int] = ()) -> list[str]:
    """Return the pieces of a text, the last one from its end."""
    builder = TextBuilder(tokenizer, stop, prompt)
    return [*(builder.add(token) for token in tokens), builder.finish()]


def test_the_text_continues_the_prompt() -> None:
    """The space between the prompt and the first word is part of the text; one at the beginning of all is not."""
    tokenizer = sentencepiece()
    once, there = [256, 257, 258, 259], [260, 261]
    assert grow(tokenizer, there, prompt=once) == [" there", " was", ""]
    assert grow(tokenizer, once) == ["Once", " upon", " a", " time", ""]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_characters_and_stop_strings_of_several_tokens(make: Callable[[], Tokenizer]) -> None:
    """Characters arrive whole, and nothing of a stop string is released."""
    tokenizer = make()
    prompt, tokens = (tokenizer.encode(text).ids for text in ("é", TEXT))
    assert len(tokens) == len(TEXT.encode())
    for stop in ("not in it", "世界!", "👩‍🚀", "end. And", "—"):
        builder, pieces = TextBuilder(tokenizer, ["never", stop], prompt), list[str]()
        while len(pieces) < len(tokens) and not builder.stopped:
            pieces.append(builder.add(tokens[len(pieces)]))
        pieces.append(builder.finish())
        assert "".join(pieces) == TEXT.partition(stop)[0]
        assert builder.stopped == (stop in TEXT)
        assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


@given(prompt=st.text(max_size=8), text=st.text(max_size=12))
def test_prompt_and_text_are_what_is_decoded_at_once(prompt: str, text: str) -> None:
    """Characters of one to four tokens arrive whole, also if the prompt ends with many bytes."""
    if "�" in prompt + text:
        return
    tokens = list(text.encode())
    pieces = grow(sentencepiece(), tokens, prompt=[256, *prompt.encode()])
    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces)


@given(text=st.text(min_size=1, max_size=14), data=st.data())
def test_a_prompt_may_end_inside_a_character(text: str, data: st.DataObject) -> None:
    """The text begins with the character that the prompt began, and nothing is lost or repeated after it."""
    if "�" in text:
        return
    content = text.encode()
    end = data.draw(st.integers(0, len(content)))
    whole = len(content[:end].decode(errors="ignore"))
    of_bytes = BytePieces([bytes([byte]) for byte in range(256)])
    for tokenizer, first in ((sentencepiece(), [256]), (of_bytes, [65])):
        pieces = grow(tokenizer, list(content[end:]), prompt=[*first, *content[:end]])
        assert "".join(pieces) == text[whole:]
        assert all("�" not in piece for piece in pieces)


@given(cuts=st.lists(st.binary(min_size=1, max_size=5), max_size=40))
def test_damaged_bytes_are_the_text_that_is_decoded_at_once(cuts: list[bytes]) -> None:
    """Nothing is lost or repeated if bytes are no characters, unless more of them follow than any character has."""
    tokenizer = BytePieces([*cuts, b" "])
    tokens = [at for cut in range(len(cuts)) for at in (cut, len(cuts))]
    assert "".join(grow(tokenizer, tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_stream_takes_time_in_proportion_to_its_tokens() -> None:
    """A token is decoded with a few others, whether its bytes are text or damaged."""
    for piece in (b"a", b"\x80"):
        tokenizer = BytePieces([piece])
        pieces = grow(tokenizer, [0] * 2000)
        assert "".join(pieces) == piece.decode(errors="replace") * 2000
        assert tokenizer.decoded < 2000 * 50


def test_tokens_without_text_are_not_decoded_again() -> None:
    """Thousands of special tokens in a row, which texts omit, take time in proportion, and change no space."""
    tokenizer = BytePieces([b" a", b""])
    pieces = grow(tokenizer, [0, *[1] * 2000, 0])
    assert "".join(pieces) == " a a"
    assert tokenizer.decoded < 2000 * 50


def test_a_character_that_the_prompt_began_is_text() -> None:
    """Nothing is lost if the tokens of a prompt end within a character."""
    tokenizer = BytePieces([b"x\xc3", b"\xa9", b"y"])
    assert grow(tokenizer, [1, 2], prompt=[0]) == ["é", "y", ""]


def test_no_part_of_a_stop_string_is_released() -> None:
    """A token with a letter and the first byte of the next one waits for the other byte."""
    tokenizer = BytePieces([b"x", b"a\xc3", b"\xa9", b"ab", "aé".encode() + b"\xc3"])
    assert grow(tokenizer, [0, 1, 2, 0], ["aé"]) == ["x", "", "", "", ""]
    assert grow(tokenizer, [0, 3, 0], ["aé"]) == ["x", "ab", "x", ""]
    assert grow(tokenizer, [0, 3, 1], ["abc", "aé"]) == ["x", "", "", "aba�"]
    assert grow(tokenizer, [0, 4], ["aé"]) == ["x", "", ""]


def test_tokenizers_do_not_change_prompts(tmp_path: Path) -> None:
    """Truncation and padding that a file was saved with are switched off."""
    tokenizer = Tokenizer(WordLevel({"a": 0, "[PAD]": 1}, unk_token="a"))  # noqa: S106 - a word
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.truncation, loaded.padding) == (None, None)
