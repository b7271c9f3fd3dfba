"""A model server with one decoder, and clients in a process of their own that read its tokens as they come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from chrion.generation import Generator
from chrion.serving.manager.records import HOST
from chrion.serving.server.grace import Grace
from chrion.serving.server.options import ServerOptions
from chrion.serving.server.rest import RestService
from chrion.serving.server.run import listen, web_server
from chrion.serving.server.served_models import local_models
from chrion.serving.simulator.decoder_requests import DecoderWorkload
from chrion.zoo.cached_decoder import LlamaDecoderSpec, build_llama_decoder

_MEMORY = 4 << 30
_MODEL = "decoder"


@dataclass(frozen=True, slots=True)
class LiveServer:
    """A server that runs in this process, and its only generator."""

    url: str
    generator: Generator

    def send(self, workload: DecoderWorkload) -> list[list[float]]:
        """Send requests at their times of arrival; return when their clients had each token, in ms."""
        rows = zip(*(own.tolist() for own in (workload.arrivals_ms, workload.prompts, workload.new)), strict=True)
        given = json.dumps({"url": self.url, "model": _MODEL, "requests": list(rows)})
        client = [sys.executable, str(Path(__file__).with_name("token_clients.py"))]
        answer = subprocess.run(client, input=given, stdout=subprocess.PIPE, check=True, text=True).stdout  # noqa: S603 - own script
        times: list[list[float]] = json.loads(answer)
        counts = [len(own) for own in times]
        if not np.array_equal(counts, workload.new):
            raise RuntimeError(f"expected {sum(workload.new)} tokens, found {sum(counts)}")
        return times


@contextlib.contextmanager
def live_server(spec: LlamaDecoderSpec, max_batch: int, threads: int) -> Iterator[LiveServer]:
    """Serve a decoder as ``chrion serve`` does, in an event loop in a thread.

    Args:
        spec: The decoder.
        max_batch: The most requests of an iteration.
        threads: CPU threads of its session.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server")
    thread.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            _write_repository(Path(folder), spec, max_batch, threads)
            running = _running(ServerOptions(Path(folder), budgets={HOST: _MEMORY}))
            yield asyncio.run_coroutine_threadsafe(running.__aenter__(), loop).result()
            asyncio.run_coroutine_threadsafe(running.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _write_repository(folder: Path, spec: LlamaDecoderSpec, max_batch: int, threads: int) -> None:
    version = folder / _MODEL / "1"
    version.mkdir(parents=True)
    onnx.save(build_llama_decoder(spec), version / "model.onnx")
    Tokenizer(WordLevel({f"t{at}": at for at in range(spec.vocabulary)}, "t0")).save(str(version / "tokenizer.json"))
    settings = f'cores = {threads}\n[generation]\nmax_batch = {max_batch}\nkv_memory = "1 GB"\n'
    (folder / _MODEL / "model.toml").write_text(settings, encoding="utf-8")


@contextlib.asynccontextmanager
async def _running(options: ServerOptions) -> AsyncIterator[LiveServer]:
    models = local_models(options)
    web = web_server(options, RestService(options, models.target, models.generation).app)
    with listen("127.0.0.1", 0) as listener:
        await models.begin()
        serving = asyncio.create_task(web.serve(sockets=[listener]))
        yield LiveServer(f"http://127.0.0.1:{listener.getsockname()[1]}", models.generation.served[_MODEL].generator)
        await models.end(Grace(options.drain_s))
        web.should_exit = True
        await serving
