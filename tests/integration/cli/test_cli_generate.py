"""``chrion generate``."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from command_line import Chrion, assert_each_refused, assert_refused
from decoder_support import PlainDecoder, small_decoder
from text_decoder import save_text_decoder, text_after

MODEL = small_decoder("gpt2-decoder")


@pytest.fixture
def decoder(tmp_path: Path) -> str:
    """Write a small decoder; return its file."""
    onnx.save(MODEL, tmp_path / "decoder.onnx")
    return str(tmp_path / "decoder.onnx")


def test_tokens_are_those_of_plain_onnxruntime(cli: Chrion, decoder: str) -> None:
    """Without a tokenizer, token ids are given and printed."""
    expected = PlainDecoder(MODEL).generate([1, 2, 3], 6)
    code, out, _ = cli("generate", decoder, "--tokens", "1,2,3", "--max-new-tokens", "6")
    assert (code, out.split()) == (0, [str(token) for token in expected])
    code, out, _ = cli("generate", decoder, "--tokens", "1,2,3", "--max-new-tokens", "6", "--json")
    found = json.loads(out)
    assert (code, found["tokens"], found["finish_reason"]) == (0, expected, "length")
    assert found["time_to_first_token_ms"] > 0


def test_equal_seeds_give_equal_tokens(cli: Chrion, decoder: str) -> None:
    """Sampling is repeatable, and another seed gives other tokens."""
    first, again, other = (
        cli("generate", decoder, "--tokens", "5", "--temperature", "1.5", "--top-k", "40", "--seed", seed)[1]
        for seed in ("1", "1", "2")
    )
    assert first == again != other


def test_wrong_arguments_are_refused(cli: Chrion, decoder: str) -> None:
    """The message is one line that names the argument."""
    cases: list[tuple[list[str], str]] = [
        ([], "expected either --prompt or --tokens"),
        (["--tokens", "1", "--prompt", "a"], "expected either --prompt or --tokens"),
        (["--tokens", "1;2"], "--tokens: expected numbers with commas between them, found '1;2'"),
        (["--tokens", "99"], ": --tokens: expected tokens of 0 to 60, found 99"),
        (
            ["--prompt", "a"],
            ": --prompt: text needs a tokenizer (give --tokens 1,2,3 or --tokenizer FILE)",
        ),
        (["--tokens", "1", "--stop", "a"], ": --stop: text needs a tokenizer (give --tokenizer FILE)"),
        (["--tokens", "1", "--cores", "0"], ": --cores: expected 1 or more, found '0'"),
        (["--tokens", "1", "--cores", "2000"], ": --cores: expected at most 1024, found 2000"),
        (["--tokens", "1", "--top-p", "2"], ": --top-p: expected above 0 and at most 1, found 2.0"),
        (["--tokens", "1", "--top-k", "-1"], ": --top-k: expected 0 or more, found -1"),
        (["--tokens", "1", "--repetition-penalty", "0"], ": --repetition-penalty: expected above 0, found 0.0"),
        (["--tokens", "1", "--temperature", "nan"], ": --temperature: expected a finite number, found nan"),
        (["--tokens", "1", "--seed", "-1"], ": --seed: expected 0 or more, found -1"),
        (["--tokens", "1", "--tokenizer", "none.json"], "none.json: no such tokenizer"),
        (["--tokens", "1", "--max-new-tokens", "65"], "the request needs 65"),
    ]
    assert_each_refused(cli, [(("generate", decoder, *words), message) for words, message in cases])


def test_other_models_are_refused(cli: Chrion, model: Path) -> None:
    """A model without a cache is refused with what was expected."""
    assert_refused(cli("generate", str(model), "--tokens", "1"), "not a decoder with a cache")


def test_a_folder_is_refused_with_a_file_in_it(cli: Chrion, decoder: str) -> None:
    """Exporters write folders: the message names a model in it."""
    assert_refused(cli("generate", str(Path(decoder).parent), "--tokens", "1"), f"for example {decoder}")


def test_a_damaged_tokenizer_beside_the_model_matters_for_text_only(cli: Chrion, decoder: str) -> None:
    """Token ids are generated as without it; a text is refused with its fault."""
    expected = cli("generate", decoder, "--tokens", "1,2,3", "--max-new-tokens", "6")[1]
    Path(decoder).with_name("tokenizer.json").write_text("{", encoding="utf-8")
    assert cli("generate", decoder, "--tokens", "1,2,3", "--max-new-tokens", "6")[:2] == (0, expected)
    assert_refused(cli("generate", decoder, "--prompt", "a"), "tokenizer.json: not a tokenizer")


def test_texts_are_those_of_plain_onnxruntime(cli: Chrion, tmp_path: Path) -> None:
    """A text is one piece, which a stop string ends; a prompt without tokens or without text is refused."""
    decoder = str(save_text_decoder(tmp_path))
    text = text_after([1, 2], 9)
    options = ("generate", decoder, "-p", "wörd1 wörd2", "--max-new-tokens", "9")
    assert cli(*options)[:2] == (0, f"{text}\n")
    stop = text.split()[3]
    assert cli(*options, "--stop", stop)[:2] == (0, f"{text[: text.index(stop)]}\n")
    assert_refused(cli("generate", decoder, "-p", " "), "prompt: expected at least one token")
    assert_refused(cli("generate", decoder, "-p", "a\udcff"), "expected text that UTF-8 can represent")


def test_random_weights_are_said(cli: Chrion, decoder: str) -> None:
    """Tokens of a model of ``chrion model`` come with a warning, and those of other producers without one."""
    model = onnx.load(decoder)
    assert "weights are random" in cli("generate", decoder, "--tokens", "1", "--max-new-tokens", "1")[2]
    model.producer_name = "pytorch"
    onnx.save(model, decoder)
    assert "random" not in cli("generate", decoder, "--tokens", "1", "--max-new-tokens", "1")[2]
