"""Checks of a server's decoders with Triton's client, run as a program: ``decoder_checks.py HTTP GRPC JSON CHECK...``.

The arguments are the ports and a file with ``prompts`` and the greedy ``tokens`` that follow each of them. The server
has the decoder ``llama``, with a tokenizer of words, and the model ``product``.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import queue
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

HTTP, GRPC = (f"127.0.0.1:{port}" for port in sys.argv[1:3])
KNOWN = json.loads(Path(sys.argv[3]).read_text(encoding="utf-8"))
PROMPTS: list[list[int]] = KNOWN["prompts"]
TOKENS: list[list[int]] = KNOWN["tokens"]
KINDS = {"BYTES": np.object_, "INT32": np.int32, "INT64": np.int64, "FP32": np.float32, "BOOL": np.bool_}


def words(tokens: list[int]) -> str:
    """Return the text of tokens after others."""
    return "".join(f" w{token}" for token in tokens)


def inputs(module: Any, **values: Any) -> list[Any]:
    """Return the inputs of a request, from (datatype, values) by name."""
    found = []
    for name, (datatype, given) in values.items():
        data = [text.encode() for text in given] if datatype == "BYTES" else given
        array = np.array(data, KINDS[datatype])
        found.append(module.InferInput(name, array.shape, datatype))
        found[-1].set_data_from_numpy(array)
    return found


def wanted(at: int, **more: Any) -> dict[str, Any]:
    """Return the inputs for the tokens that follow a prompt."""
    return {"input_ids": ("INT64", PROMPTS[at]), "max_tokens": ("INT32", [len(TOKENS[at])]), **more}


def final(result: Any) -> bool:
    """Return whether a response is the last of its request."""
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def text_of(result: Any) -> str:
    """Return the text of a response."""
    (text,) = result.as_numpy("text_output")
    return bytes(text).decode() if isinstance(text, bytes) else str(text)


class Texts:
    """The responses to several requests by their ids."""

    def __init__(self) -> None:
        self.responses: dict[str, list[Any]] = {}

    def add(self, result: Any) -> bool:
        """Add a response; return whether it is the last of its request."""
        seen = self.responses.setdefault(result.get_response().id, [])
        assert not (seen and final(seen[-1])), "a response after the last"
        seen.append(result)
        return final(result)

    def check(self, identity: str, at: int) -> None:
        """Assert that a request had a response for each token, and one for the end."""
        seen = self.responses[identity]
        assert [list(result.as_numpy("output_ids")) for result in seen] == [[t] for t in TOKENS[at]] + [[]]
        assert "".join(map(text_of, seen)) == words(TOKENS[at])
        assert [result.as_numpy("finish_reason")[0] for result in seen][-2:] == [b"", b"length"]


def check_metadata() -> None:
    """Metadata and configuration describe the decoder: several responses, optional inputs, and its outputs."""
    with triton_grpc.InferenceServerClient(GRPC) as grpc, triton_http.InferenceServerClient(HTTP) as http:
        for client, options in ((grpc, {"as_json": True}), (http, {})):
            assert client.is_model_ready("llama")
            metadata = client.get_model_metadata("llama", **options)
            found = {entry["name"]: entry["datatype"] for entry in metadata["inputs"]}
            assert found["text_input"] == "BYTES"
            assert found["input_ids"] == "INT64"
            assert found["stream"] == "BOOL"
            assert {entry["name"] for entry in metadata["outputs"]} == {"text_output", "output_ids", "finish_reason"}
            config = client.get_model_config("llama", **options)
            config = config.get("config", config)
            assert config["model_transaction_policy"]["decoupled"] is True
            assert all(entry["optional"] for entry in config["input"])
            assert {entry["name"] for entry in client.get_model_metadata("product", **options)["inputs"]} == {"x"}


def check_infer() -> None:
    """One response has the whole text: of text and tokens, in both protocols, with the outputs that are asked for."""
    with triton_grpc.InferenceServerClient(GRPC) as grpc, triton_http.InferenceServerClient(HTTP) as http:
        for client, module in ((grpc, triton_grpc), (http, triton_http)):
            for at in range(len(PROMPTS)):
                count = ("INT32", [[len(TOKENS[at])]])
                text = inputs(module, text_input=("BYTES", [words(PROMPTS[at])]), max_tokens=count)
                ids = inputs(module, input_ids=("INT32", [PROMPTS[at]]), max_tokens=count)
                for given in (text, ids):
                    result = client.infer("llama", given, request_id="7")
                    assert list(result.as_numpy("output_ids")) == TOKENS[at]
                    assert text_of(result) == words(TOKENS[at])
                    assert result.as_numpy("finish_reason")[0] in {b"length", "length"}
                chosen = [module.InferRequestedOutput("output_ids")]
                result = client.infer("llama", inputs(module, **wanted(at)), outputs=chosen, model_version="1")
                assert list(result.as_numpy("output_ids")) == TOKENS[at]
                assert result.as_numpy("text_output") is None


def check_stream() -> None:
    """Requests of one stream run together; each has its tokens one by one, and other models answer in between."""
    answers: queue.Queue[Any] = queue.Queue()
    given = inputs(triton_grpc, x=("FP32", [[1, 2, 3, 4]]))
    with triton_grpc.InferenceServerClient(GRPC) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for at in range(len(PROMPTS)):
            several = inputs(triton_grpc, **wanted(at, stream=("BOOL", [True])))
            client.async_stream_infer("llama", several, request_id=str(at), enable_empty_final_response=True)
            client.async_stream_infer("product", given, request_id=f"product {at}")
        client.async_stream_infer("llama", inputs(triton_grpc, **wanted(0)), request_id="whole")
        texts, order, running = Texts(), [], len(PROMPTS) + 1
        while running or len(order) < len(PROMPTS):
            result, error = answers.get(timeout=30)
            assert error is None, error
            if (identity := result.get_response().id).startswith("product"):
                order.append(identity)
            else:
                running -= texts.add(result)
        client.stop_stream()
    assert order == [f"product {at}" for at in range(len(PROMPTS))]
    for at in range(len(PROMPTS)):
        texts.check(str(at), at)
    (whole,) = texts.responses["whole"]
    assert list(whole.as_numpy("output_ids")) == TOKENS[0]


def check_asyncio() -> None:
    """Two streams of the asyncio client have their own texts."""

    async def read(client: Any, indices: list[int]) -> None:
        async def requests() -> AsyncIterator[dict[str, Any]]:
            for at in indices:
                several = inputs(triton_grpc, **wanted(at, stream=("BOOL", [True])))
                yield {"model_name": "llama", "inputs": several, "request_id": str(at)}

        texts, running = Texts(), len(indices)
        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            running -= texts.add(result)
            if not running:
                break
        for at in indices:
            texts.check(str(at), at)

    async def run() -> None:
        async with triton_grpc_aio.InferenceServerClient(GRPC) as client:
            result = await client.infer("llama", inputs(triton_grpc, **wanted(0)))
            assert list(result.as_numpy("output_ids")) == TOKENS[0]
            middle = len(PROMPTS) // 2
            await asyncio.gather(read(client, [*range(middle)]), read(client, [*range(middle, len(PROMPTS))]))

    asyncio.run(run())


def check_sampling() -> None:
    """Seeds repeat a text, stop words end it, and it may begin with the prompt, as in Triton's backends."""
    with triton_grpc.InferenceServerClient(GRPC) as client:

        def ids(**values: Any) -> list[int]:
            return list(client.infer("llama", inputs(triton_grpc, **wanted(0), **values)).as_numpy("output_ids"))

        one = ids(temperature=("FP32", [1.0]), seed=("INT32", [5]))
        parameters = json.dumps({"temperature": "1.0", "seed": 5})
        assert ids(sampling_parameters=("BYTES", [parameters])) == one
        result = client.infer("llama", inputs(triton_grpc, **wanted(0)), parameters={"temperature": "1.0", "seed": 5})
        assert list(result.as_numpy("output_ids")) == one
        assert ids(temperature=("FP32", [1.0]), seed=("INT32", [6])) != one
        stop = f"w{TOKENS[0][3]}"
        result = client.infer("llama", inputs(triton_grpc, **wanted(0, stop_words=("BYTES", [stop]))))
        assert text_of(result) == words(TOKENS[0]).split(stop)[0]
        assert result.as_numpy("finish_reason")[0] == b"stop"
        given = inputs(triton_grpc, **wanted(0, exclude_input_in_output=("BOOL", [False])))
        assert text_of(client.infer("llama", given)) == words(PROMPTS[0]).strip() + words(TOKENS[0])


def check_errors() -> None:
    """A wrong request fails by itself, with its status or with an error on the stream, which goes on."""
    wrong = {
        "unknown input 'beams'": wanted(0, beams=("INT32", [2])),
        "expected one of text_input and input_ids": {"max_tokens": ("INT32", [2])},
        "expected at least 1, found 0": {**wanted(0), "max_tokens": ("INT32", [0])},
        "expected tokens of 0 to 60, found 61": {**wanted(0), "input_ids": ("INT64", [61])},
        "the request needs": {**wanted(0), "max_tokens": ("INT32", [50_000])},
        "expected datatype INT32": {**wanted(0), "max_tokens": ("FP32", [2])},
    }
    answers: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(GRPC) as client:
        for about, values in {**wrong, "need ModelStreamInfer": wanted(0, stream=("BOOL", [True]))}.items():
            with pytest.raises(InferenceServerException, match=about) as refused:
                client.infer("llama", inputs(triton_grpc, **values))
            assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
        with pytest.raises(InferenceServerException) as refused:
            client.infer("llama", inputs(triton_grpc, **wanted(0)), model_version="2")
        assert refused.value.status() == "StatusCode.NOT_FOUND"
        client.start_stream(lambda result, error: answers.put((result, error)))
        several = inputs(triton_grpc, **wanted(1, stream=("BOOL", [True])))
        client.async_stream_infer("llama", several, request_id="good")
        for values in wrong.values():
            client.async_stream_infer("llama", inputs(triton_grpc, **values, stream=("BOOL", [True])))
        texts, errors, done = Texts(), [], False
        while not done or len(errors) < len(wrong):
            result, error = answers.get(timeout=30)
            if error is None:
                done |= texts.add(result)
            else:
                errors.append(str(error))
        client.stop_stream()
    texts.check("good", 1)
    for about in wrong:
        assert sum(about in error for error in errors) == 1, (about, errors)


def check_cancel() -> None:
    """Leave in the middle of a long text; whoever runs this sees that its slots become free."""
    answers: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(GRPC) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        values = {"input_ids": ("INT64", [1]), "max_tokens": ("INT32", [40_000]), "stream": ("BOOL", [True])}
        client.async_stream_infer("llama", inputs(triton_grpc, **values))
        result, error = answers.get(timeout=30)
        assert error is None
        assert not final(result)
        client.stop_stream(cancel_requests=True)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(100, exit=True)  # shows where a check hangs, before the test gives it up
    for check in sys.argv[4:]:
        globals()[f"check_{check}"]()
    print("passed")  # noqa: T201 - the test looks for it
