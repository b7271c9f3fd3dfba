"""Inputs and outputs of decoders in the Open Inference Protocol, named as in Triton's backends for language models.

``text_input``, ``stream``, ``sampling_parameters``, ``exclude_input_in_output``, ``text_output`` and ``finish_reason``
are those of its vLLM backend; ``input_ids``, ``max_tokens``, ``stop_words``, the single sampling parameters and
``output_ids`` those of its TensorRT-LLM backend, and the others those of vLLM's sampling parameters. All but the prompt
are optional. The values may also be parameters of the request, or keys of the JSON object ``sampling_parameters``.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from msgspec import ValidationError, convert

from chrion.common.files import parse_json
from chrion.common.suggestions import did_you_mean
from chrion.errors import OptionError
from chrion.generation import Sampling
from chrion.serving.server.failures import RequestFailure, Status, invalid
from chrion.serving.server.generation_service import TextOptions
from chrion.serving.server.openai_bodies import MAX_STOPS, NEUTRAL, is_neutral
from chrion.serving.server.rest_codec import InferenceRequest
from chrion.serving.server.tensors import Array, TensorSpec, choose_outputs

INPUTS = (
    TensorSpec("text_input", "BYTES", (1,)),
    TensorSpec("input_ids", "INT64", (-1,)),
    TensorSpec("max_tokens", "INT32", (1,)),
    TensorSpec("stream", "BOOL", (1,)),
    TensorSpec("temperature", "FP32", (1,)),
    TensorSpec("top_k", "INT32", (1,)),
    TensorSpec("top_p", "FP32", (1,)),
    TensorSpec("min_p", "FP32", (1,)),
    TensorSpec("repetition_penalty", "FP32", (1,)),
    TensorSpec("frequency_penalty", "FP32", (1,)),
    TensorSpec("presence_penalty", "FP32", (1,)),
    TensorSpec("seed", "UINT64", (1,)),
    TensorSpec("stop_words", "BYTES", (-1,)),
    TensorSpec("stop_token_ids", "INT64", (-1,)),
    TensorSpec("end_id", "INT32", (1,)),
    TensorSpec("ignore_eos", "BOOL", (1,)),
    TensorSpec("min_tokens", "INT32", (1,)),
    TensorSpec("sampling_parameters", "BYTES", (1,)),
    TensorSpec("exclude_input_in_output", "BOOL", (1,)),
)
OUTPUTS = (
    TensorSpec("text_output", "BYTES", (1,)),
    TensorSpec("output_ids", "INT64", (-1,)),
    TensorSpec("finish_reason", "BYTES", (1,)),
)
#: The types of a value and of a list of values, with their names in messages, by datatype; others are whole numbers.
_WHOLE = ((int, "a whole number"), (list[int], "a list of tokens"))
_KINDS: dict[str, tuple[tuple[Any, str], ...]] = {
    "BYTES": ((str, "text"), (list[str], "a list of texts")),
    "BOOL": ((bool, "true or false"),),
    "FP32": ((float, "a number"),),
}
_BY_NAME = {spec.name: spec for spec in INPUTS}
#: Other names of inputs: of vLLM's sampling parameters.
_OTHER_NAMES = {"stop": "stop_words"}
#: Inputs that change nothing, whatever their value: texts have no pads.
_IGNORED = frozenset({"pad_id"})
#: The values that change nothing, of vLLM's parameters.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"n": (1,), "logit_bias": ({},), "logprobs": (False,), "best_of": (1,)}
#: Parameters of the protocol, which say nothing of the text.
_PROTOCOL = frozenset({"timeout", "priority", "binary_data_output", "sequence_id", "sequence_start", "sequence_end"})
#: Maximum new tokens without ``max_tokens``: the default of vLLM, and that of the OpenAI API.
_DEFAULT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request for one text."""

    prompt: str | list[int]
    max_tokens: int
    sampling: Sampling
    options: TextOptions
    #: Whether each token is a response of its own.
    stream: bool
    #: Whether the output begins with the prompt.
    echo: bool
    #: Outputs to return.
    outputs: tuple[TensorSpec, ...]
    #: Time within which the text must begin.
    timeout_ms: float = math.inf
    #: Time of the arrival, in seconds of ``time.perf_counter``.
    arrival_s: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a text: the content of one response."""

    text: str
    ids: tuple[int, ...] = ()
    #: Why the text ended, ``length`` or ``stop``; empty in all pieces but the last.
    reason: str = ""

    @property
    def final(self) -> bool:
        """True for the last piece."""
        return bool(self.reason)


def read_tensors(request: InferenceRequest) -> TextRequest:
    """Return the text that a request with tensors asks for.

    Raises:
        RequestFailure: An input is unknown, or has a wrong type or value.
    """
    if request.priority:
        raise RequestFailure(Status.UNSUPPORTED, "parameter 'priority': requests for text start in their order")
    values = {
        name: value
        for name, value in request.parameters.items()
        if name not in _PROTOCOL and not name.startswith("triton_")
    }
    for name, (datatype, array) in request.feeds.items():
        values[name] = _untyped(array) if _is_unused(name) else _plain(_spec(name), datatype, array)
    return replace(read_values(values, tuple(request.outputs)), timeout_ms=request.timeout_ms)


def read_document(values: Mapping[str, Any]) -> TextRequest:
    """Return the text that a JSON object with inputs and parameters asks for.

    Raises:
        RequestFailure: An input or a parameter is unknown, or has a wrong type or value.
    """
    return read_tensors(InferenceRequest.of("", values))


def read_values(values: Mapping[str, Any], outputs: Sequence[str] = ()) -> TextRequest:
    """Return the text that inputs ask for.

    Args:
        values: The inputs as values of JSON.
        outputs: Names of the outputs to return; empty for all.

    Raises:
        RequestFailure: An input is unknown, or has a wrong type or value.
    """
    given: dict[str, Any] = {}
    for name, value in (*_sampling_parameters(values).items(), *values.items()):
        if value is None:
            continue
        if not _is_unused(name):
            spec = _spec(name)
            given[spec.name] = _checked(spec, value)
        elif name not in _IGNORED and not is_neutral(name, _parsed(value), _NEUTRAL):
            raise invalid(f"input {name!r}: not supported")
    texts = [given[name] for name in ("text_input", "input_ids") if name in given]
    if len(texts) != 1:
        raise invalid("inputs: expected one of text_input and input_ids")
    max_tokens = given.get("max_tokens", _DEFAULT_TOKENS)
    if max_tokens < 1:
        raise invalid(f"input 'max_tokens': expected at least 1, found {max_tokens}")
    echo = not given.get("exclude_input_in_output", True)
    sampling, options = _sampling(given), _options(given, max_tokens)
    return TextRequest(
        texts[0], max_tokens, sampling, options, given.get("stream", False), echo, choose_outputs(OUTPUTS, outputs)
    )


def piece_tensors(piece: Piece, outputs: Sequence[TensorSpec]) -> list[tuple[TensorSpec, Array]]:
    """Return the outputs of a response."""
    arrays = {
        "text_output": np.array([piece.text], object),
        "output_ids": np.array(piece.ids, np.int64),
        "finish_reason": np.array([piece.reason], object),
    }
    return [(spec, arrays[spec.name]) for spec in outputs]


def _is_unused(name: str) -> bool:
    """Return whether an input is known and not implemented."""
    return name not in _BY_NAME and (name in _IGNORED or name in _NEUTRAL or name in NEUTRAL)


def _spec(name: str) -> TensorSpec:
    spec = _BY_NAME.get(_OTHER_NAMES.get(name, name))
    if spec is None:
        raise invalid(f"unknown input {name[:200]!r} ({did_you_mean(name[:200], _BY_NAME)})")
    return spec


def _sampling_parameters(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of the JSON object in ``sampling_parameters``."""
    text = values.get("sampling_parameters", "")
    if not text:
        return {}
    try:
        parameters = parse_json(_checked(_BY_NAME["sampling_parameters"], text).encode())
    except ValueError as error:
        raise invalid(f"input 'sampling_parameters': not JSON: {error}") from error
    if not isinstance(parameters, dict):
        raise invalid("input 'sampling_parameters': expected an object")
    return parameters


def _options(given: Mapping[str, Any], max_tokens: int) -> TextOptions:
    """Return what ends the text."""
    stop = tuple(text for text in given.get("stop_words", ()) if text)
    if len(stop) > MAX_STOPS:
        raise invalid(f"input 'stop_words': expected at most {MAX_STOPS} texts, found {len(stop)}")
    min_tokens = given.get("min_tokens", 0)
    if not 0 <= min_tokens <= max_tokens:
        raise invalid(f"input 'min_tokens': expected 0 to {max_tokens}, found {min_tokens}")
    ends = [token for token in (*given.get("stop_token_ids", ()), given.get("end_id", -1)) if token >= 0]
    return TextOptions(stop, tuple(ends), given.get("ignore_eos", False), min_tokens)


def _sampling(given: Mapping[str, Any]) -> Sampling:
    """Return how tokens are chosen: the most probable ones, unless a number says something else."""
    random = any(name in given for name in ("top_k", "top_p", "min_p"))
    numbers: dict[str, Any] = {"temperature": float(random), "seed": secrets.randbits(32)}
    numbers |= {name: given[name] for name in given.keys() & Sampling.__dataclass_fields__.keys()}
    numbers["top_k"] = max(numbers.get("top_k", 0), 0)  # vLLM's -1 is all tokens
    try:
        return Sampling(**numbers)
    except OptionError as error:
        raise invalid(str(error)) from error


def _plain(spec: TensorSpec, datatype: str, array: Array) -> Any:
    """Return a tensor as a value of JSON.

    An integer may have any integer type, and a number any but BF16. Tokens may have a first dimension of one.
    """
    integers = {"INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"}
    allowed = {spec.datatype}
    if spec.datatype not in ("BYTES", "BOOL"):
        allowed |= integers
    if spec.datatype == "FP32":
        allowed |= {"FP16", "FP64"}
    if datatype not in allowed:
        raise invalid(f"input {spec.name!r}: expected datatype {spec.datatype}, found {datatype}")
    if array.size != (1 if spec.shape == (1,) else array.shape[-1] if array.shape else 1):
        raise invalid(f"input {spec.name!r}: expected shape {list(spec.shape or ())}, found {list(array.shape)}")
    values = array.ravel().tolist()
    return values[0] if spec.shape == (1,) else values


def _untyped(array: Array) -> Any:
    """Return a tensor as a value of JSON, a single number as such."""
    values = array.ravel().tolist()
    return values[0] if len(values) == 1 else values


def _parsed(value: Any) -> Any:
    """Return a value that may be written as text, as clients of vLLM's backend do. Empty texts are none."""
    if isinstance(value, list) and not any(value):
        return []
    with contextlib.suppress(ValueError):
        return parse_json(value.lower().encode()) if isinstance(value, str) and value else value
    return value


def _checked(spec: TensorSpec, value: Any) -> Any:
    """Return a value of JSON with the type of an input; single numbers may be written as texts."""
    kind, expected = _KINDS.get(spec.datatype, _WHOLE)[spec.shape != (1,)]
    if kind == list[str] and isinstance(value, str):
        value = [value]
    try:
        return convert(value, kind, strict=kind not in (int, float))
    except ValidationError as error:
        raise invalid(f"input {spec.name!r}: expected {expected}, found {str(value)[:100]!r}") from error
