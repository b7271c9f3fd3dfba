"""Measure what the bounds of ``chrion serve`` cost: this checkout against another one, in requests per second.

    git worktree add ../before COMMIT
    python scripts/bench_bounds.py --against ../before
    python scripts/bench_bounds.py --against ../before --starts 20 --only grpc

Both servers serve a product with one input of 64 numbers, run at once, and get the same requests from the same
client in alternating rounds; the one that begins alternates as well. A ratio is that of one round's requests per second
to those of the round of the other server beside it: below one if this checkout is slower. Two processes of one code
differ by up to 5 %, whatever the number of rounds, so that both servers are started several times. The table has the
median over these starts of a start's median ratio, with a 90 % interval (bootstrap over starts), and the same of the
CPU time that the servers took, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import psutil
from model_serving.servers import free_port, started
from onnx import TensorProto, helper, numpy_helper

from chrion.serving.replay.http_client import HttpClient
from chrion.serving.server.grpc_codec import SERVICE, message
from chrion.serving.server.rest_codec import HEADER_LENGTH

#: Numbers of the input and of the output.
_WIDTH = 64
#: Numbers of clients that send requests at the same time, each one after another.
_CLIENTS = (1, 8)
_RESAMPLES = 2000

_Send = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Server:
    """A running server of one checkout."""

    process: psutil.Process
    http: int
    grpc: int

    def cpu_s(self) -> float:
        """Return the CPU time that it has taken, in seconds."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one kind of request from one start of both servers."""

    own_per_s: float
    other_per_s: float
    ratio: float
    cpu_ratio: float


def cells(rows: Sequence[Row]) -> list[str]:
    """Return the cells of the table for one kind of request, given the rows of all starts."""
    return [
        *(f"{np.median(rates):.0f}" for rates in ([r.other_per_s for r in rows], [r.own_per_s for r in rows])),
        *(_interval(ratios) for ratios in ([r.ratio for r in rows], [r.cpu_ratio for r in rows])),
    ]


def _interval(ratios: Sequence[float]) -> str:
    """Return the median of ratios, with a 90 % interval."""
    resampled = np.median(np.random.default_rng(0).choice(ratios, (_RESAMPLES, len(ratios))), axis=1)
    low, high = np.quantile(resampled, [0.05, 0.95])
    return f"{np.median(ratios):.3f} [{low:.3f} to {high:.3f}]"


def main() -> None:
    """Print the table."""
    options = _options()
    rows: dict[tuple[str, int], list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        _put_model(Path(folder))
        for _ in range(options.starts):
            with contextlib.ExitStack() as stack:
                roots = (Path.cwd(), options.against)
                own, other = (stack.enter_context(_serving(root, Path(folder))) for root in roots)
                for kind, clients in itertools.product(options.only or _KINDS, _CLIENTS):
                    row = asyncio.run(_measure(kind, clients, own, other, options))
                    rows.setdefault((kind, clients), []).append(row)
    titles = ["request", "clients", "other/s", "this/s", "ratio [90 %]", "CPU time [90 %]"]
    table = [titles, ["---"] * len(titles), *([kind, str(n), *cells(found)] for (kind, n), found in rows.items())]
    for line in table:
        print(f"| {' | '.join(line)} |")


async def _measure(kind: str, clients: int, own: Server, other: Server, options: argparse.Namespace) -> Row:
    """Measure one kind of request by alternating rounds."""
    rates: dict[Server, list[float]] = {own: [], other: []}
    async with _KINDS[kind](own) as to_own, _KINDS[kind](other) as to_other:
        senders = {own: to_own, other: to_other}
        for send in senders.values():  # loads the model, and opens the connections
            await _round(send, clients, options.requests)
        cpu_s = {server: server.cpu_s() for server in senders}
        for number in range(options.rounds):
            for server in (own, other) if number % 2 else (other, own):
                rates[server].append(await _round(senders[server], clients, options.requests))
        took_s = {server: server.cpu_s() - before for server, before in cpu_s.items()}
    ratio = float(np.median(np.divide(rates[own], rates[other])))
    own_per_s, other_per_s = (float(np.median(rates[server])) for server in (own, other))
    return Row(own_per_s, other_per_s, ratio, took_s[own] / max(took_s[other], 1e-9))


async def _round(send: _Send, clients: int, requests: int) -> float:
    """Return the requests per second of clients that send requests one after another."""

    async def client() -> None:
        for _ in range(requests // clients):
            await send()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return requests // clients * clients / (time.perf_counter() - began)


@contextlib.asynccontextmanager
async def _rest(server: Server, body: bytes, headers: dict[str, str]) -> AsyncIterator[_Send]:
    client = HttpClient(f"http://127.0.0.1:{server.http}", headers)

    async def send() -> None:
        answer = await client.request("POST", "/v2/models/small/infer", body)
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.body[:200]!r}")

    yield send
    await client.close()


def _json(server: Server) -> Any:
    entry = {"name": "x", "datatype": "FP32", "shape": [1, _WIDTH], "data": _values().tolist()}
    return _rest(server, json.dumps({"inputs": [entry]}).encode(), {})


def _binary(server: Server) -> Any:
    content = _values().tobytes()
    parameters = {"binary_data_size": len(content)}
    entry = {"name": "x", "datatype": "FP32", "shape": [1, _WIDTH], "parameters": parameters}
    head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    return _rest(server, head + content, {HEADER_LENGTH: str(len(head))})


@contextlib.asynccontextmanager
async def _grpc(server: Server) -> AsyncIterator[_Send]:
    entry = {"name": "x", "datatype": "FP32", "shape": [1, _WIDTH]}
    request = message("ModelInferRequest")(
        model_name="small", inputs=[entry], raw_input_contents=[_values().tobytes()]
    ).SerializeToString()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")

        async def send() -> None:
            await call(request)

        yield send


_KINDS: dict[str, Callable[[Server], Any]] = {"json": _json, "binary": _binary, "grpc": _grpc}


def _values() -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).standard_normal(_WIDTH, np.float32)


def _put_model(repository: Path) -> None:
    weight = np.eye(_WIDTH, dtype=np.float32)
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", _WIDTH]) for name in ("x", "y")]
    nodes, weights = [helper.make_node("MatMul", ["x", "w"], ["y"])], [numpy_helper.from_array(weight, "w")]
    graph = helper.make_graph(nodes, "small", infos[:1], infos[1:], weights)
    file = repository / "small" / "1" / "model.onnx"
    file.parent.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), file)


@contextlib.contextmanager
def _serving(checkout: Path, repository: Path) -> Iterator[Server]:
    """Run the server of a checkout."""
    ports = free_port(), free_port()
    addresses = [f"127.0.0.1:{port}" for port in ports]
    command = [sys.executable, "-m", "chrion", "serve", str(repository)]
    command += ["--http", addresses[0], "--grpc", addresses[1]]
    with started(command, ports[0], "/v2/health", checkout) as process:
        yield Server(psutil.Process(process.pid), *ports)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", type=Path, required=True, help="folder of the other checkout")
    parser.add_argument("--starts", type=int, default=10, help="starts of each server")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of a start and kind of request")
    parser.add_argument("--requests", type=int, default=200, help="requests of a round")
    parser.add_argument("--only", action="append", choices=_KINDS, help="kinds of requests; repeatable")
    found = parser.parse_args()
    found.against = found.against.resolve()
    if not (found.against / "chrion" / "__init__.py").is_file():
        parser.error(f"--against {found.against}: expected a checkout")
    return found


if __name__ == "__main__":
    main()
