"""Inputs of decoders in the Open Inference Protocol, as tensors and as values of JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from chrion.generation import Sampling
from chrion.serving.server.failures import RequestFailure, Status
from chrion.serving.server.generation_service import TextOptions
from chrion.serving.server.generation_tensors import (
    INPUTS,
    OUTPUTS,
    Piece,
    piece_tensors,
    read_document,
    read_tensors,
    read_values,
)
from chrion.serving.server.rest_codec import InferenceRequest


def of_tensors(outputs: tuple[str, ...] = (), parameters: dict[str, Any] | None = None, **feeds: Any) -> Any:
    """Read a request of (datatype, values) by name."""
    arrays = {
        name: (datatype, np.array(values, object if datatype == "BYTES" else None))
        for name, (datatype, values) in feeds.items()
    }
    request = InferenceRequest(feeds=arrays, outputs=dict.fromkeys(outputs, True), parameters=parameters or {})
    return read_tensors(request)


def test_a_prompt_is_enough() -> None:
    """Without more, 16 of the most probable tokens follow, in one response with all outputs."""
    found = of_tensors(text_input=("BYTES", ["once"]))
    assert (found.prompt, found.max_tokens, found.options, found.stream) == ("once", 16, TextOptions(), False)
    assert not found.echo
    assert found.sampling.temperature == 0
    assert found.outputs == OUTPUTS


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint16])
@pytest.mark.parametrize("shape", [(3,), (1, 3)])
def test_tokens_of_any_integer_type(kind: Any, shape: tuple[int, ...]) -> None:
    """Tokens may have a first dimension of one, as batches of TensorRT-LLM have."""
    array = np.array([4, 5, 6], kind).reshape(shape)
    request = InferenceRequest(feeds={"input_ids": (np.dtype(kind).name.upper(), array)})
    assert read_tensors(request).prompt == [4, 5, 6]


def test_all_inputs_of_triton_clients() -> None:
    """Inputs of [1] and [1, 1], parameters, and the JSON of vLLM's backend with numbers as texts."""
    found = of_tensors(
        ("output_ids",),
        {"temperature": 0.5, "triton_enable_empty_final_response": True, "timeout": 3},
        text_input=("BYTES", [["once"]]),
        max_tokens=("INT32", [[7]]),
        stream=("BOOL", [True]),
        top_k=("INT32", [20]),
        stop_words=("BYTES", [["a", ""]]),
        bad_words=("BYTES", [""]),
        sampling_parameters=("BYTES", ['{"top_p": "0.5", "seed": 3, "max_tokens": "100", "stop": null}']),
        exclude_input_in_output=("BOOL", [False]),
    )
    assert (found.max_tokens, found.options.stop, found.stream, found.echo) == (7, ("a",), True, True)
    assert found.sampling == Sampling(temperature=0.5, top_k=20, top_p=0.5, seed=3)
    assert [spec.name for spec in found.outputs] == ["output_ids"]


def test_parameters_of_vllm_and_tensorrt_llm() -> None:
    """What ends a text and how tokens are chosen; defaults of what is not implemented change nothing."""
    neutral = {"n": 1, "best_of": "1", "beam_width": 1, "pad_id": 2, "use_beam_search": "False", "logprobs": None}
    sent = {"n": "1", "skip_special_tokens": True, "presence_penalty": "0.5", "ignore_eos": True, "min_p": 0.1}
    found = of_tensors(
        text_input=("BYTES", ["once"]),
        end_id=("INT32", [7]),
        pad_id=("INT32", [0]),
        beam_width=("INT32", [[1]]),
        return_log_probs=("BOOL", [False]),
        bad_words=("BYTES", [["", ""]]),
        stop_token_ids=("INT64", [3, 4]),
        min_tokens=("INT32", [2]),
        frequency_penalty=("FP32", [0.25]),
        sampling_parameters=("BYTES", [json.dumps(sent)]),
        parameters=neutral,
    )
    assert found.options == TextOptions(end_tokens=(3, 4, 7), ignore_eos=True, min_tokens=2)
    assert (found.sampling.presence_penalty, found.sampling.frequency_penalty) == (0.5, 0.25)
    assert (found.sampling.min_p, found.sampling.temperature) == (0.1, 1.0)
    assert read_values({"text_input": "a", "end_id": -1}).options == TextOptions()


def test_parameters_of_the_protocol_beside_inputs() -> None:
    """A timeout is in microseconds; what Triton's clients send besides says nothing of the text."""
    found = read_document({"text_input": "a", "timeout": 1500, "priority": 0, "triton_enable_empty_final_response": 1})
    assert (found.prompt, found.timeout_ms) == ("a", 1.5)
    assert read_document({"text_input": "a"}).timeout_ms == math.inf
    wrong = [({"timeout": value}, "microseconds") for value in (-1, 10**400, 1.5, True, "1")]
    for values, about in (*wrong, ({"sequence_id": 3}, "'sequence_id'"), ({"x": 1}, "'x'")):
        with pytest.raises(RequestFailure, match=about):
            read_document({"text_input": "a", **values})


def test_top_k_and_top_p_choose_at_random() -> None:
    """Without a temperature, they have one of 1; all tokens may be written as -1."""
    assert read_values({"text_input": "a", "top_p": 0.9}).sampling.temperature == 1
    assert read_values({"text_input": "a", "top_k": -1}).sampling.top_k == 0
    assert read_values({"text_input": "a", "seed": 4}).sampling.temperature == 0


@pytest.mark.parametrize(
    ("values", "about"),
    [
        ({}, "expected one of text_input and input_ids"),
        ({"text_input": "a", "input_ids": [1]}, "expected one of text_input and input_ids"),
        ({"text_input": 3}, "'text_input': expected text, found '3'"),
        ({"input_ids": ["a"]}, "'input_ids': expected a list of tokens"),
        ({"text_input": "a", "beams": 2}, "unknown input 'beams' (19 are known, such as "),
        ({"text_input": "a", "max_tokens": 0}, "'max_tokens': expected at least 1, found 0"),
        ({"text_input": "a", "max_tokens": 1.5}, "'max_tokens': expected a whole number"),
        ({"text_input": "a", "max_tokens": True}, "'max_tokens': expected a whole number"),
        ({"text_input": "a", "max_tokens": "many"}, "'max_tokens': expected a whole number"),
        ({"text_input": "a", "temperature": -1}, "temperature: expected 0 or more, found -1.0"),
        ({"text_input": "a", "temperature": "nan"}, "temperature: expected a finite number, found nan"),
        ({"text_input": "a", "stream": 1}, "'stream': expected true or false"),
        ({"text_input": "a", "stop": [1]}, "'stop_words': expected a list of texts"),
        ({"text_input": "a", "stop": ["s"] * 17}, "at most 16 texts, found 17"),
        ({"text_input": "a", "bad_words": ["x"]}, "'bad_words': not supported"),
        ({"text_input": "a", "sampling_parameters": "{"}, "'sampling_parameters': not JSON"),
        ({"text_input": "a", "sampling_parameters": "[]"}, "'sampling_parameters': expected an object"),
        ({"text_input": "a", "sampling_parameters": '{"n": 2}'}, "input 'n': not supported"),
        ({"text_input": "a", "logprobs": 1}, "input 'logprobs': not supported"),
        ({"text_input": "a", "return_log_probs": True}, "input 'return_log_probs': not supported"),
        ({"text_input": "a", "max_tokens": 3, "min_tokens": 4}, "'min_tokens': expected 0 to 3, found 4"),
        ({"text_input": "a", "ignore_eos": 1}, "'ignore_eos': expected true or false"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], about: str) -> None:
    """The message names the input and what was expected."""
    with pytest.raises(RequestFailure, match=about.replace("(", r"\(")) as refused:
        read_values(values)
    assert refused.value.status is Status.INVALID


@pytest.mark.parametrize(
    ("feeds", "about"),
    [
        ({"max_tokens": ("FP32", [3.0])}, "'max_tokens': expected datatype INT32, found FP32"),
        ({"max_tokens": ("INT32", [3, 4])}, r"'max_tokens': expected shape \[1\], found \[2\]"),
        ({"input_ids": ("INT64", [[1, 2], [3, 4]])}, r"'input_ids': expected shape \[-1\], found \[2, 2\]"),
        ({"stream": ("INT32", [1])}, "'stream': expected datatype BOOL, found INT32"),
    ],
)
def test_wrong_tensors_are_refused(feeds: dict[str, Any], about: str) -> None:
    """Several texts in one request, and tensors of another type, are refused with the expected shape and type."""
    with pytest.raises(RequestFailure, match=about):
        of_tensors(**feeds)


def test_unknown_outputs_are_refused() -> None:
    """The message lists the outputs."""
    with pytest.raises(RequestFailure, match="unknown output 'logits': expected one of text_output, output_ids"):
        read_values({"text_input": "a"}, ["logits"])


def test_the_outputs_of_a_piece_have_their_declared_types() -> None:
    """A piece without a token has an empty list of tokens."""
    for piece in (Piece("a", (3,)), Piece("", (), "stop")):
        for spec, array in piece_tensors(piece, OUTPUTS):
            assert array.shape == ((len(piece.ids),) if spec.name == "output_ids" else (1,))
            assert array.dtype == (np.int64 if spec.datatype == "INT64" else object)
    assert Piece("", (), "stop").final
    assert not Piece("a", (3,)).final


def test_names_are_those_of_triton() -> None:
    """The prompt, its options and the text have the names of Triton's backends for language models."""
    assert {"text_input", "stream", "sampling_parameters", "exclude_input_in_output"} < {s.name for s in INPUTS}
    assert {"max_tokens", "stop_words", "temperature", "top_k", "top_p", "seed"} < {s.name for s in INPUTS}
    assert {"text_output", "finish_reason"} < {s.name for s in OUTPUTS}
