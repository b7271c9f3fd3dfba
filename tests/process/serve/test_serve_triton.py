"""The server against Triton's client, and its messages against their source; both run in processes of their own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import chrion
from server_process import Server

FOLDER = Path(chrion.__file__).parent / "serving" / "server"
CLIENT = Path(__file__).parents[2] / "triton_checks.py"

needs_client = pytest.mark.skipif(
    importlib.util.find_spec("tritonclient") is None, reason="tritonclient: pip install 'tritonclient[all]'"
)


@needs_client
def test_tritons_client(server: Server) -> None:
    """Triton's client finds what the protocol promises."""
    checks = ["http", "grpc", "asyncio", "stream", "management", "errors"]
    command = [sys.executable, str(CLIENT), str(server.http), str(server.grpc), *checks]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.splitlines()[-1] == "passed"


def test_the_compiled_file_is_that_of_the_source(tmp_path: Path) -> None:
    """The committed descriptors are what protoc makes of the committed source.

    The compiler runs in a process of its own: its library of protocol buffers and those of others end a process that
    loads them together.
    """
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpc_tools: pip install grpcio-tools")
    made = tmp_path / "made.desc"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{FOLDER}", f"--descriptor_set_out={made}"]
    sources = [str(FOLDER / f"{name}.proto") for name in ("open_inference", "health")]
    subprocess.run([*command, *sources], check=True, timeout=60)  # noqa: S603
    assert made.read_bytes() == (FOLDER / "messages.desc").read_bytes()
