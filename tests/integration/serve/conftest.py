"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from decoder_support import PlainDecoder
from local_server import LocalServer, local_server, no_error_logged
from model_repository import counting, product, put, put_all
from served_decoders import MODEL, THINKING, TOOLS, put_byte_decoder, put_decoder


@pytest.fixture(autouse=True)
def _no_error_logged() -> Iterator[None]:
    """Check that a test logs no error: a failed task, or a traceback of the server."""
    with no_error_logged():
        yield


@pytest.fixture(scope="package")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with a model of each kind."""
    return put_all(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="package")
def server(repository: Path) -> Iterator[LocalServer]:
    """Return a server of that repository in explicit mode, with all models loaded."""
    with local_server(repository, control="explicit", load=("*",), body_bytes=4_000_000) as running:
        yield running


@pytest.fixture
def busy_root(tmp_path: Path) -> Path:
    """Return a repository of a model that keeps all cores busy until its client leaves, and of a quick one."""
    put(tmp_path, "slow", counting(), toml="cores = 64\n")
    put(tmp_path, "quick", product(), toml="cores = 64\n")
    return tmp_path


@pytest.fixture(scope="package")
def plain() -> PlainDecoder:
    """Return the served decoder in one session of plain onnxruntime."""
    return PlainDecoder(MODEL)


@pytest.fixture(scope="package")
def decoders(tmp_path_factory: pytest.TempPathFactory, plain: PlainDecoder) -> Iterator[LocalServer]:
    """Return a server of decoders of several kinds, and of a model that is none."""
    root = tmp_path_factory.mktemp("decoders")
    put_decoder(root, "llama")
    put_decoder(root, "plain", template="")
    put_decoder(root, "tools", template=TOOLS)
    put_decoder(root, "thinking", template=THINKING)
    put_decoder(root, "ending", config={"eos_token_id": plain.generate([2, 3, 4], 3)[2]})
    put_decoder(root, "small", '[generation]\nkv_memory = "100KB"\n')
    put_byte_decoder(root, "bytes")
    put(root, "product", product())
    with local_server(root) as running:
        yield running


@pytest.fixture(scope="module")
def client(decoders: LocalServer) -> Iterator[openai.OpenAI]:
    """Return OpenAI's client of the decoders."""
    with decoders.openai() as opened:
        yield opened
