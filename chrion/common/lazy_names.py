"""Packages whose public names are imported on first use, because their modules import large libraries."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

from chrion.common.installation import require_onnxruntime


def import_on_first_use(package: str, modules: Mapping[str, str], *, onnxruntime: bool = True) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports public names, and modules of the package, on first use.

    Args:
        package: The package's name.
        modules: The module of each public name.
        onnxruntime: Whether they need onnxruntime; then the function raises ImportError if it is missing or damaged.
    """

    def get(name: str) -> Any:
        if name in modules:
            if onnxruntime:
                require_onnxruntime()
            value = getattr(importlib.import_module(modules[name]), name)
            setattr(sys.modules[package], name, value)  # later uses do not call this function
            return value
        if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
