"""Texts of the server's process: Triton's client, which runs in a process of its own, and memory."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from chrion.serving.server.grpc_codec import message
from decoder_support import PlainDecoder, small_decoder
from model_repository import product, put
from served_decoders import put_decoder
from server_client import wait_until
from server_process import Server, serving

CLIENT = Path(__file__).parents[2] / "decoder_checks.py"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
MODEL = small_decoder("llama-decoder", context=60_000)
PROMPTS = [[2, 3, 4], [5], [6, 7], [8, 9, 10, 11], [12, 13], [14]]
COUNTS = [12, 3, 20, 7, 1, 15]


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server of a decoder whose slots one long text fills, and of a model of another kind."""
    root = tmp_path_factory.mktemp("streamed")
    put_decoder(root, "llama", '[generation]\nmax_batch = 4\nkv_memory = "12MB"\n', model=MODEL)
    put(root, "product", product())
    with serving(root) as running:
        yield running


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with prompts and what plain onnxruntime generates after them."""
    plain = PlainDecoder(MODEL)
    tokens = [plain.generate(*pair) for pair in zip(PROMPTS, COUNTS, strict=True)]
    file = tmp_path_factory.mktemp("known") / "known.json"
    file.write_text(json.dumps({"prompts": PROMPTS, "tokens": tokens}))
    return file


def slots(server: Server) -> float:
    return server.metric("chrion_kv_reserved_slots", model="llama")


def generated(server: Server) -> float:
    return server.metric("chrion_generated_tokens_total", model="llama")


def run_client(server: Server, known: Path, *checks: str) -> None:
    """Run checks of Triton's client in a process of its own."""
    command = [sys.executable, str(CLIENT), str(server.http), str(server.grpc), str(known), *checks]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.splitlines()[-1] == "passed"


needs_client = pytest.mark.skipif(
    importlib.util.find_spec("tritonclient") is None, reason="tritonclient: pip install 'tritonclient[all]'"
)


@needs_client
def test_tritons_client_generates(decoders: Server, known: Path) -> None:
    """Triton's client gets the tokens of plain onnxruntime, whole and streamed."""
    run_client(decoders, known, "metadata", "infer", "stream", "asyncio", "sampling", "errors")
    wait_until(lambda: slots(decoders) == 0)


@needs_client
def test_a_cancelled_stream_frees_its_slots(decoders: Server, known: Path) -> None:
    """A text whose client cancels in the middle ends as cancelled, before its last token, and reserves no slots."""
    reason = {"model": "llama", "reason": "cancelled"}
    tokens, texts = generated(decoders), decoders.metric("chrion_generation_finish_reasons_total", **reason)
    run_client(decoders, known, "cancel")
    wait_until(lambda: slots(decoders) == 0)
    assert decoders.metric("chrion_generation_finish_reasons_total", **reason) == texts + 1
    assert generated(decoders) - tokens < 40_000


def request(prompt: list[int], count: int) -> bytes:
    """Return a streamed request for tokens."""
    entry = {"name": "input_ids", "datatype": "INT64", "shape": [len(prompt)], "contents": {"int64_contents": prompt}}
    found = message("ModelInferRequest")(model_name="llama", inputs=[entry])
    found.parameters["max_tokens"].int64_param = count
    found.parameters["stream"].bool_param = True
    return bytes(found.SerializeToString())


def test_many_streamed_texts_leave_no_memory(decoders: Server) -> None:
    """The memory of the server after 1500 texts is that after 500, within a few MB."""

    def serve(count: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{decoders.grpc}") as channel:
            for _ in range(count // 50):
                texts = iter([request([1 + at, 2], 4) for at in range(50)])
                assert len([*channel.stream_stream(STREAM)(texts, timeout=60)]) == 250

    serve(500)
    before = decoders.rss_mb()
    serve(1000)
    assert decoders.rss_mb() - before < 8
    assert slots(decoders) == 0
