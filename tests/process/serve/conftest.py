"""Fixtures of the tests of the server's process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from model_repository import put_all
from server_process import Server, serving


@pytest.fixture(scope="package")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with a model of each kind."""
    return put_all(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="package")
def server(repository: Path) -> Iterator[Server]:
    """Return a server of that repository in explicit mode, with all models loaded."""
    with serving(repository, "--model-control", "explicit", "--load-model", "*", "--max-request", "4MB") as running:
        yield running
