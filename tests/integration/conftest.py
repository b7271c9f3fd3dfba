"""Fixtures for tuning in the background, and for decoders with and without native operators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chrion.native import operators_available
from native_instructions import using_instructions
from seams.generation import without_native_operators
from tuning_support import background_tuning, gate, no_process_left, tuned_shapes  # noqa: F401 - fixtures


@pytest.fixture
def several_operators() -> Iterator[None]:
    """Let decoders have attention of several operators, as where there is no C compiler."""
    with without_native_operators():
        yield


@pytest.fixture(params=[True, False], ids=["one operator", "several operators"])
def native(request: pytest.FixtureRequest) -> bool:
    """Run a test with attention as the native operator, and without it."""
    if not request.param:
        request.getfixturevalue("several_operators")
    elif not operators_available():
        pytest.skip("native attention is not compiled")
    return bool(request.param)


@pytest.fixture(params=[0, 1, 2], ids=["portable", "AVX2", "AVX-512"])
def instructions(request: pytest.FixtureRequest) -> Iterator[int]:
    """Let the native operators use some instructions of the processor."""
    with using_instructions(request.param) as level:
        yield level
