"""Fixtures of the server's tests, which need the extra ``serve``."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server_process import ELEMENTS, Server, identity, product, put, serving, slow_model

_LIBRARIES = ("starlette", "uvicorn", "grpc", "prometheus_client")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder if a library is missing."""
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    for item in items if missing else ():
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"{missing[0]}: pip install 'chrion[serve]'"))


@pytest.fixture(scope="package")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with a model of each datatype, two versions of a product, and a bad model."""
    root = tmp_path_factory.mktemp("models")
    for datatype in ELEMENTS:
        put(root, f"identity-{datatype}", identity(datatype))
    put(root, "product", product(seed=1))
    put(root, "product", product(seed=2), version=2)
    put(root, "slow", slow_model())
    put(root, "bad", b"not a model")
    return root


@pytest.fixture(scope="package")
def server(repository: Path) -> Iterator[Server]:
    """Return a server of that repository in explicit mode, with all models loaded."""
    with serving(repository, "--model-control", "explicit", "--load-model", "*", "--max-request", "4MB") as running:
        yield running


@pytest.fixture(scope="module")
def client(decoders: Server) -> Iterator[Any]:
    """Return OpenAI's client of the server that the module's fixture ``decoders`` starts."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{decoders.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened
