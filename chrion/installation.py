"""The distribution that provides onnxruntime.

Several distributions install the same module ``onnxruntime``: that for CPUs, and one for each kind of accelerator. pip
does not know that they exclude each other, so that two of them overwrite each other's files, and removing one leaves a
folder without ``InferenceSession``. Therefore Chrion requires none of them; its extras do.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
import warnings
from pathlib import Path

#: Distributions that provide onnxruntime, with the extra of Chrion that requires each, if there is one.
FLAVOURS = {
    "onnxruntime": "cpu",
    "onnxruntime-gpu": "gpu",
    "onnxruntime-openvino": "",
    "onnxruntime-directml": "directml",
    "onnxruntime-webgpu": "webgpu",
    "onnxruntime-migraphx": "",
    "onnxruntime-rocm": "",
    "onnxruntime-qnn": "",
    "onnxruntime-training": "",
    "onnxruntime-vitisai": "",
}
_INFO = re.compile(r"(onnxruntime(?:[-_.][a-z]+)?)-([0-9][^-]*)(?:-.*)?\.(?:dist|egg)-info", re.IGNORECASE)
MISSING = (
    "onnxruntime is not installed (pip install 'chrion[cpu]', or 'chrion[gpu]' for CUDA; the page on installation lists"
    " other flavours)"
)


def find_flavours(folder: Path) -> dict[str, str]:
    """Return the distributions in a folder that provide onnxruntime, and their versions."""
    matches = (_INFO.fullmatch(path.name) for path in folder.glob("onnxruntime*-info"))
    named = {match[1].lower().replace("_", "-").replace(".", "-"): match[2] for match in matches if match}
    return {name: named[name] for name in sorted(named) if name in FLAVOURS}


@functools.cache
def check_onnxruntime() -> None:
    """Check, once, that one distribution provides onnxruntime, before it is imported.

    Costs a listing of the folder that contains it. If it is not installed, do nothing: importing it fails.

    Raises:
        ImportError: The module has lost its files, since one of several distributions was removed.
    """
    spec = None if "onnxruntime" in sys.modules else importlib.util.find_spec("onnxruntime")
    if spec is None or not spec.submodule_search_locations:
        return
    location = Path(next(iter(spec.submodule_search_locations)))
    found = find_flavours(location.parent)
    if spec.origin is None and not (location / "__init__.py").exists():
        raise ImportError(
            f"onnxruntime: {location} has lost its files, since a distribution that provides it was removed beside "
            f"another one; repair it with: {repair(found or {'onnxruntime': ''})}",
            name="onnxruntime",
        )
    if len(found) > 1:
        names = " and ".join(f"{name} {version}" for name, version in found.items())
        warnings.warn(
            f"{names} provide the same module and overwrite each other's files; keep one, for example: {repair(found)}",
            stacklevel=3,
        )


def repair(found: dict[str, str]) -> str:
    """Return the command that leaves one distribution, the most special of those found."""
    kept = max(found, key=len)
    return f"pip uninstall -y {' '.join(found)}; pip install --force-reinstall --no-deps {kept}"
