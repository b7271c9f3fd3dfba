"""Soak ``chrion serve``: mixed requests for an hour, while memory, threads and open files must stay flat.

    python scripts/soak_serve.py [--minutes 60] [--rate 100]

Twelve models share memory for four. Clients of both protocols send valid and wrong requests, single ones and streams,
leave before the answer, open connections and say nothing, and read the metrics. Prints a line every minute. After a
warm-up of a quarter of the time, the first third of the rest is compared with the last: the exit code is 1 if memory
has grown by 10 %, threads or open files by 8, or if a valid request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import psutil
from model_serving.servers import chrion_server, free_port

from chrion.serving.replay.http_client import HttpClient
from chrion.serving.replay.stand_ins import write_stand_ins
from chrion.serving.server.grpc_codec import SERVICE, message
from chrion.serving.simulator.scenario import ScenarioSource

MODELS, FITTING, MODEL_MB = 12, 4, 16.0
CLIENTS = 4
#: Kinds of requests with their shares.
KINDS = {
    "valid": 0.60,
    "grpc": 0.12,
    "stream": 0.04,
    "wrong": 0.08,
    "leaves": 0.06,
    "cancels": 0.03,
    "silent": 0.03,
    "metrics": 0.04,
}
#: Requests of a stream, and the time after which a call of gRPC is given up, in seconds.
STREAM, CALL_S = 5, 600.0
#: The part of the run that is not compared: memory grows while models are opened for the first time.
WARM_UP = 0.25
GROWTH, MORE = 1.10, 8


@dataclass(frozen=True, slots=True)
class Sample:
    """The resources of the server at one moment."""

    memory_mb: float
    threads: int
    files: int


def main() -> None:
    """Run the soak, and exit with its result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=100.0, help="Requests per second.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "models"
        write_models(root)
        grpc_address = f"127.0.0.1:{free_port()}"
        with chrion_server(root, FITTING * MODEL_MB + 2, "lru", "--grpc", grpc_address) as url:
            samples, counts = asyncio.run(soak(url, grpc_address, given.minutes * 60, given.rate))
    print("  ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    problems = grown(samples) + ([f"{counts['failed']} valid requests failed"] if counts["failed"] else [])
    for problem in problems:
        print(f"problem: {problem}")
    sys.exit(1 if problems else 0)


def write_models(root: Path) -> None:
    """Write the models."""
    variant = {"memory_mb": MODEL_MB, "latency_ms": 2.0, "gpu_busy_ms": 0.0, "cpu_busy_ms": 2.0, "cores": 1}
    content = {"models": [{"name": "m", "copies": MODELS, "variants": {"cpu": variant}}]}
    write_stand_ins(ScenarioSource("soak", content, Path()).build(), root)


async def soak(url: str, grpc_address: str, seconds: float, rate: float) -> tuple[list[Sample], Counter[str]]:
    """Send requests; return the server's resources over time, and the numbers of requests by kind.

    Args:
        url: The server's REST service.
        grpc_address: Its gRPC service.
        seconds: Time to send requests.
        rate: Requests per second.
    """
    process = _process(urlsplit(url).port or 0)
    samples: list[Sample] = []
    counts: Counter[str] = Counter()
    began = printed = time.monotonic()
    end, pause_s = began + seconds, CLIENTS / rate
    clients = [Client(url, grpc_address, number, counts) for number in range(CLIENTS)]
    running = [asyncio.create_task(client.run(end, pause_s)) for client in clients]
    interval = min(5.0, seconds / 60)
    while time.monotonic() < end:
        await asyncio.sleep(interval)
        samples.append(Sample(process.memory_info().rss / 1e6, process.num_threads(), process.num_fds()))
        if time.monotonic() - printed > 60:
            printed = time.monotonic()
            print(f"{(printed - began) / 60:.0f} min", samples[-1], dict(counts), flush=True)
    await asyncio.gather(*running)
    return samples, counts


def grown(samples: list[Sample]) -> list[str]:
    """Return what has grown from the first third after the warm-up to the last third."""
    kept = samples[int(len(samples) * WARM_UP) :]
    third = max(1, len(kept) // 3)
    found = []
    for name, limit in (("memory_mb", None), ("threads", MORE), ("files", MORE)):
        before, after = (
            statistics.median(getattr(sample, name) for sample in part) for part in (kept[:third], kept[-third:])
        )
        most = before * GROWTH if limit is None else before + limit
        print(f"{name}: {before:.0f} in the first third, {after:.0f} in the last")
        if after > most:
            found.append(f"{name} has grown from {before:.0f} to {after:.0f}")
    return found


class Client:
    """A client of both protocols.

    Args:
        url: The server's REST service.
        grpc_address: Its gRPC service.
        seed: Seed of its choices.
        counts: Receives the number of requests of each kind, and of valid requests that failed.
    """

    def __init__(self, url: str, grpc_address: str, seed: int, counts: Counter[str]) -> None:
        self._url = url
        self._rng = random.Random(seed)  # noqa: S311 - a load, not a secret
        self._http = HttpClient(url, {})
        self._channel = grpc.aio.insecure_channel(grpc_address)
        self._counts = counts

    async def run(self, end: float, pause_s: float) -> None:
        """Send requests until a time of the monotonic clock, with pauses of some seconds on average."""
        while time.monotonic() < end:
            await asyncio.sleep(self._rng.expovariate(1 / pause_s))
            kind = self._rng.choices([*KINDS], [*KINDS.values()])[0]
            self._counts[kind] += 1
            try:
                failed = await self._send(kind, f"m-{self._rng.randint(1, MODELS)}")
            except (OSError, grpc.RpcError) as error:
                print(f"{kind}: {error!r}", file=sys.stderr, flush=True)
                failed = True
            self._counts["failed"] += failed
        await self._http.close()
        await self._channel.close()

    async def _send(self, kind: str, model: str) -> bool:
        """Send a request of a kind; return whether it is valid and failed."""
        path = f"/v2/models/{model}/infer"
        if kind == "valid":
            return (await self._http.request("POST", path, _body([1]))).status != 200
        if kind == "wrong":
            return (await self._http.request("POST", path, _body([1 << 30]))).status != 400
        if kind == "metrics":
            return (await self._http.request("GET", "/metrics")).status != 200
        if kind == "leaves":
            await _leave(self._url, path, _body([1]))
        elif kind == "silent":
            await _leave(self._url, path, b"")
        elif kind == "stream":
            return not await self._stream(model)
        else:
            call = self._channel.unary_unary(f"/{SERVICE}/ModelInfer")(_message(model), timeout=CALL_S)
            if kind == "grpc":
                return not message("ModelInferResponse").FromString(await call).outputs
            await asyncio.sleep(0.002)
            call.cancel()
        return False

    async def _stream(self, model: str) -> bool:
        """Send requests in a stream; return whether all were answered."""

        async def requests() -> AsyncIterator[bytes]:
            for _ in range(STREAM):
                yield _message(model)

        call = self._channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(requests(), timeout=CALL_S)
        kind = message("ModelStreamInferResponse")
        answers = [kind.FromString(content) async for content in call]
        return len(answers) == STREAM and not any(answer.error_message for answer in answers)


def _body(shape: list[int]) -> bytes:
    return json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": shape, "data": [1.0]}]}).encode()


def _message(model: str) -> bytes:
    entry = {"name": "x", "datatype": "FP32", "shape": [1], "contents": {"fp32_contents": [1.0]}}
    content: bytes = message("ModelInferRequest")(model_name=model, inputs=[entry]).SerializeToString()
    return content


async def _leave(url: str, path: str, body: bytes) -> None:
    """Open a connection, send a request or nothing, and close it before the answer."""
    parts = urlsplit(url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    if body:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _process(port: int) -> psutil.Process:
    """Return the child process that listens on a port."""
    for child in psutil.Process().children(recursive=True):
        if any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in child.net_connections("tcp")):
            return child
    raise RuntimeError(f"no child process listens on port {port}")


if __name__ == "__main__":
    main()
