"""The bytes of single tokens, by tokenizers of the kinds that decoders have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel, WordPiece

from chrion.generation.token_bytes import TokenBytes, byte_alphabet


def byte_level() -> Tokenizer:
    """Return a tokenizer of bytes, as GPT-2 and Llama 3 have, with a token of two bytes."""
    vocabulary = {character: at for at, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary["Ġa"] = len(vocabulary)
    tokenizer = Tokenizer(BPE(vocabulary, [("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<▁é▁>"])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Return a tokenizer of words and single bytes, as Llama 2 has."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "é", "▁b"]
    tokenizer = Tokenizer(BPE({word: at for at, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))  # noqa: S106
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


def metaspace() -> Tokenizer:
    """Return a tokenizer of words whose decoder is Metaspace."""
    words = ["<unk>", "</s>", "▁a", "b", "▁é"]
    tokenizer = Tokenizer(BPE({word: at for at, word in enumerate(words)}, [], unk_token="<unk>"))  # noqa: S106
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def word_piece() -> Tokenizer:
    """Return a tokenizer of words and their endings."""
    words = ["[UNK]", "[SEP]", "a", "##b", "c"]
    tokenizer = Tokenizer(WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


def word_level() -> Tokenizer:
    """Return a tokenizer of words without a decoder, which are joined with spaces."""
    tokenizer = Tokenizer(WordLevel({f"w{at}": at for at in range(20)}, unk_token="w0"))  # noqa: S106
    tokenizer.add_special_tokens(["<e>"])
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, sentencepiece, metaspace, word_piece, word_level])
def test_the_bytes_of_all_tokens_are_the_text(make: Callable[[], Tokenizer]) -> None:
    """After another token, the bytes of a token are what the tokenizer decodes, in pairs and one by one."""
    tokenizer = make()
    pieces = TokenBytes(tokenizer)
    plain = [token for token in range(tokenizer.get_vocab_size()) if token not in pieces.special]
    complete = [token for token in plain if "�" not in tokenizer.decode([token])]
    first = next(token for token in complete if tokenizer.decode([token, token]).strip() and len(pieces.of(token)) > 1)
    start = tokenizer.decode([first])
    for one in complete:
        for other in complete[-8:]:
            expected = tokenizer.decode([first, one, other])[len(start) :]
            assert (pieces.of(one) + pieces.of(other)).decode() == expected


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_parts_of_characters_have_bytes(make: Callable[[], Tokenizer]) -> None:
    """The tokens of a character of four bytes have one byte each."""
    tokenizer = make()
    pieces = TokenBytes(tokenizer)
    names = [next(c for c, byte in byte_alphabet().items() if byte == wanted) for wanted in "😀".encode()]
    if make is sentencepiece:
        names = [f"<0x{wanted:02X}>" for wanted in "😀".encode()]
    assert b"".join(pieces.of(tokenizer.token_to_id(name)) for name in names) == "😀".encode()


def test_special_tokens_have_names() -> None:
    """Texts omit them, and their names may have characters that stand for other bytes."""
    tokenizer = byte_level()
    pieces = TokenBytes(tokenizer)
    assert [*pieces.special.values()] == ["<|end|>", "<▁é▁>"]
    assert [pieces.of(token).decode() for token in pieces.special] == ["<|end|>", "<▁é▁>"]


def test_the_alphabet_of_bytes_is_that_of_tokenizers() -> None:
    """Each character that the library lists stands for the byte that the library decodes it to."""
    alphabet = byte_alphabet()
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    decoder = decoders.ByteLevel()
    for character, byte in alphabet.items():
        if byte < 128:
            assert decoder.decode([character]) == chr(byte)
        elif byte >= 0xC2 and byte < 0xE0:
            second = next(other for other, value in alphabet.items() if value == 0x80)
            assert decoder.decode([character, second]) == bytes([byte, 0x80]).decode()


def test_tokens_that_a_tokenizer_lacks_have_no_bytes() -> None:
    """A model may have more tokens than its tokenizer."""
    assert TokenBytes(word_level()).of(1000) == b""
