"""Soak ``chrion serve``: mixed requests for an hour, while memory, threads and open files must stay flat.

    python scripts/soak_serve.py [--minutes 60]

Twelve models share memory for four. Clients send valid and wrong requests, leave before the answer, open connections
and say nothing, and read the metrics. Prints a line every minute. After a warm-up of a quarter of the time, the first
third of the rest is compared with the last: the exit code is 1 if memory has grown by 10 %, threads or open files by 8,
or if a valid request failed.
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
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from model_serving.servers import chrion_server

from chrion.replay.http_client import HttpClient
from chrion.replay.stand_ins import write_stand_ins
from chrion.simulator.scenario import ScenarioSource

MODELS, FITTING, MODEL_MB = 12, 4, 16.0
CLIENTS = 4
#: Pause between the requests of a client, on average, in seconds.
PAUSE_S = 0.02
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
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "models"
        write_models(root)
        with chrion_server(root, FITTING * MODEL_MB + 2, "lru") as url:
            samples, counts = asyncio.run(soak(url, minutes * 60))
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


async def soak(url: str, seconds: float) -> tuple[list[Sample], Counter[str]]:
    """Send requests; return the server's resources over time, and the numbers of requests by kind."""
    process = _process(urlsplit(url).port or 0)
    samples: list[Sample] = []
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    clients = [asyncio.create_task(_client(url, number, end, counts)) for number in range(CLIENTS)]
    interval, printed = min(5.0, seconds / 60), time.monotonic()
    while time.monotonic() < end:
        await asyncio.sleep(interval)
        samples.append(Sample(process.memory_info().rss / 1e6, process.num_threads(), process.num_fds()))
        if time.monotonic() - printed > 60:
            printed = time.monotonic()
            print(samples[-1], dict(counts), flush=True)
    await asyncio.gather(*clients)
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


async def _client(url: str, number: int, end: float, counts: Counter[str]) -> None:
    rng = random.Random(number)  # noqa: S311 - a load, not a secret
    client = HttpClient(url, {})
    entry = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}
    good = json.dumps({"inputs": [entry]}).encode()
    bad = json.dumps({"inputs": [{**entry, "shape": [1 << 30]}]}).encode()
    while time.monotonic() < end:
        await asyncio.sleep(rng.expovariate(1 / PAUSE_S))
        kind = rng.choices(("valid", "wrong", "leaves", "silent", "metrics"), (80, 8, 6, 3, 3))[0]
        counts[kind] += 1
        path = f"/v2/models/m-{rng.randint(1, MODELS)}/infer"
        if kind == "valid":
            counts["failed"] += (await client.request("POST", path, good)).status != 200
        elif kind == "wrong":
            await client.request("POST", path, bad)
        elif kind == "metrics":
            await client.request("GET", "/metrics")
        else:
            await _leave(url, path, good if kind == "leaves" else b"")
    await client.close()


async def _leave(url: str, path: str, body: bytes) -> None:
    """Open a connection, send a request or nothing, and close it before the answer."""
    parts = urlsplit(url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    if body:
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
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
