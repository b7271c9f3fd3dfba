"""Return of freed memory to the operating system."""

from __future__ import annotations

import ctypes

import pytest

from chrion.machine.allocator import trim


def test_other_c_libraries_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``malloc_trim`` the call has no effect and does not raise."""
    library = object()
    monkeypatch.setattr(ctypes, "pythonapi", library)
    trim()
    assert not hasattr(library, "malloc_trim")
