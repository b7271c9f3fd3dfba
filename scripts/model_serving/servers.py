"""Servers in processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

_START_S = 60.0


@contextlib.contextmanager
def chrion_server(repository: Path, budget_mb: float, policy: str, *more: str) -> Iterator[str]:
    """Run ``chrion serve``; yield its URL."""
    port = free_port()
    command = [sys.executable, "-m", "chrion", "serve", str(repository), "--http", f"127.0.0.1:{port}", *more]
    command += [] if "--grpc" in more else ["--grpc", "none"]
    with running(
        [*command, "--host-budget", f"{budget_mb:g}MB", "--serving-policy", policy], port, "/v2/health"
    ) as url:
        yield url


@contextlib.contextmanager
def plain_server(repository: Path, budget_mb: float) -> Iterator[str]:
    """Run the server of plain sessions; yield its URL."""
    port = free_port()
    script = Path(__file__).with_name("plain_server.py")
    with running([sys.executable, str(script), str(repository), str(port), str(budget_mb)], port, "/metrics") as url:
        yield url


@contextlib.contextmanager
def running(command: Sequence[str], port: int, path: str) -> Iterator[str]:
    """Run a server until the block ends; yield its URL once ``path`` is answered.

    Raises:
        RuntimeError: The server has ended, or has not started in time.
    """
    with started(command, port, path, Path.cwd()):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def started(command: Sequence[str], port: int, path: str, checkout: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server of a checkout until the block ends; yield its process once ``path`` is answered.

    Raises:
        RuntimeError: The server has ended, or has not started in time.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment, cwd=checkout)  # noqa: S603
    try:
        _wait(process, f"http://127.0.0.1:{port}{path}")
        yield process
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + _START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310 - our own server
                return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{url}: the server did not start") from error
        time.sleep(0.1)
