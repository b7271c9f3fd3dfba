"""Special tokens in the files that transformers writes, and the tokens that end texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from chrion import Generator
from chrion.errors import ModelError
from chrion.generation.special_tokens import find_end_token, named_tokens
from decoder_support import PlainDecoder, small_decoder

CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"


def write(folder: Path, **files: Any) -> Path:
    """Write JSON files, by their names without the extension."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def words() -> Tokenizer:
    """Return a tokenizer of 61 words, w0 to w60."""
    return Tokenizer(WordLevel({f"w{at}": at for at in range(61)}, unk_token="w0"))  # noqa: S106 - a word


def test_names_of_special_tokens(tmp_path: Path) -> None:
    """Texts, objects and lists name tokens; the map has those that the configuration lacks, and null is none."""
    write(
        tmp_path,
        tokenizer_config={
            "bos_token": None,
            "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False},
            "cls_token": "[CLS]",
            "additional_special_tokens": ["<a>", {"content": "<b>"}],
            "pad_token": 3,
            "chat_template": "x",
        },
        special_tokens_map={"bos_token": "<s>", "eos_token": "</t>", "sep_token": {"content": "[SEP]"}},
    )
    assert named_tokens(tmp_path) == {
        "eos_token": "</s>",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "additional_special_tokens": ["<a>", "<b>"],
    }


def test_without_files_no_token_is_named(tmp_path: Path) -> None:
    """A folder may have neither file, or files with something else."""
    assert named_tokens(tmp_path) == {}
    assert named_tokens(write(tmp_path, special_tokens_map=["</s>"])) == {}


@pytest.mark.parametrize("name", [CONFIG, MAP])
def test_damaged_files_are_refused(tmp_path: Path, name: str) -> None:
    """The message names the file."""
    (tmp_path / name).write_text("{")
    with pytest.raises(ModelError, match=name):
        named_tokens(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("tokenizer_config", {"eos_token": "w5"}, {5}),
        ("tokenizer_config", {"eos_token": {"content": "w5"}}, {5}),
        ("special_tokens_map", {"eos_token": "w5"}, {5}),
        ("tokenizer_config", {"eos_token": "unknown"}, set()),
        ("tokenizer_config", {"eos_token": None}, set()),
        ("tokenizer_config", {}, set()),
    ],
)
def test_the_end_token_is_the_tokenizers(tmp_path: Path, file: str, content: Any, expected: set[int]) -> None:
    """Its number is that of the tokenizer; a name that the tokenizer lacks is none."""
    assert find_end_token(write(tmp_path, **{file: content}), words()) == expected


def test_texts_end_at_the_tokens_of_both_configurations(tmp_path: Path) -> None:
    """A text ends at the first of the model's end tokens and the tokenizer's, as it does in vLLM."""
    model = small_decoder("llama-decoder")
    expected = PlainDecoder(model).generate([2, 3, 4], 12)
    first, second = expected[6], next(token for token in expected[:6] if token != expected[6])
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    words().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, config={"eos_token_id": first})
    with Generator(tmp_path / "model.onnx", threads=1) as generator:
        assert generator.stop_tokens == {first}
        stream = generator.submit([2, 3, 4], 12)
        assert stream.result(60) == expected[: expected.index(first)]
    write(tmp_path, tokenizer_config={"eos_token": f"w{second}"})
    with Generator(tmp_path / "model.onnx", threads=1) as generator:
        assert generator.stop_tokens == {first, second}
        stream = generator.submit([2, 3, 4], 12)
        assert stream.result(60) == expected[: expected.index(second)]
        assert stream.finish_reason == "stop"
        assert generator.submit([2, 3, 4], 12, stop_tokens=()).result(60) == expected


def test_a_tokenizer_elsewhere_has_its_configuration_beside_it(tmp_path: Path) -> None:
    """The end token belongs to the tokenizer, also if the model is not a file."""
    words().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, tokenizer_config={"eos_token": "w7"})
    with Generator(small_decoder("llama-decoder"), threads=1, tokenizer=tmp_path / "tokenizer.json") as generator:
        assert generator.stop_tokens == {7}


def test_the_files_of_a_model_may_be_in_the_folder_above(tmp_path: Path) -> None:
    """Repositories of transformers.js have models in a folder named onnx, and all other files above it."""
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model.onnx").write_bytes(small_decoder("llama-decoder").SerializeToString())
    words().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, generation_config={"eos_token_id": [3]}, tokenizer_config={"eos_token": "w7"})
    with Generator(tmp_path / "onnx" / "model.onnx", threads=1) as generator:
        assert generator.stop_tokens == {3, 7}
        assert generator.encode("w5 w6") is not None
