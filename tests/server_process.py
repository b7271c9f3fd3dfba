"""Servers in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from server_client import Answer, Body, ServerClient, wait_until

_SERVING = re.compile(
    r"^chrion: serving (\d+) models?(?: in \d+ versions)?(?: \([^)]*\))? at https?://127\.0\.0\.1:(\d+)(?: and grpc://127\.0\.0\.1:(\d+))?"
)


@dataclass
class Server(ServerClient):
    """A running server."""

    process: subprocess.Popen[str]
    http: int
    grpc: int
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    def send(self, method: str, path: str, body: Body, headers: Mapping[str, str]) -> Answer:
        named = {"Content-Type": "application/json", **headers}  # urllib's own type is that of forms
        request = urllib.request.Request(self.url + path, body, named, method=method)  # noqa: S310 - http only
        try:
            answer = urllib.request.urlopen(request, timeout=120)  # noqa: S310
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            return answer.status, answer.read(), {name.lower(): value for name, value in answer.headers.items()}

    def rss_mb(self) -> float:
        """Return the memory of the server's process."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def events(self) -> list[dict[str, Any]]:
        """Return the log so far."""
        return [json.loads(line) for line in self.lines if line.startswith("{")]


def server_command(repository: Path, *arguments: str, program: Sequence[str] = ("-m", "chrion")) -> list[str]:
    """Return the command of a server on free ports; ``program`` is what Python runs."""
    ports = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    return [sys.executable, *program, "serve", str(repository), *ports, *arguments]


@contextlib.contextmanager
def serving(
    repository: Path, *arguments: str, program: Sequence[str] = ("-m", "chrion"), within: Sequence[str] = ()
) -> Iterator[Server]:
    """Run a server, and check that it ends by itself with exit code 0 on SIGTERM.

    Args:
        repository: Its repository.
        arguments: Its options.
        program: What Python runs.
        within: A command that becomes the server's.
    """
    command = [*within, *server_command(repository, *arguments, program=program)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: S603
    lines: list[str] = []
    try:
        assert process.stderr
        for line in process.stderr:
            lines.append(line)
            match = _SERVING.match(line)
            if match:
                break
        else:
            raise AssertionError("".join(lines))
        reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
        reader.start()
        server = Server(process, int(match[2]), int(match[3] or 0), lines)
        if "https" not in line:
            wait_until(lambda: server.get("/v2/health/ready")[0] == 200)
        yield server
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, "".join(lines[-20:])
        reader.join(10)
        assert not any("Traceback" in line for line in lines), "".join(lines)
    finally:
        if process.poll() is None:  # a test has failed; replicas on Ray are removed only if the server ends by itself
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()
        if process.stderr:
            process.stderr.close()
