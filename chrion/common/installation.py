"""The distribution that provides onnxruntime, and the libraries of extras.

Several distributions install the same module ``onnxruntime``: that for CPUs, and one for each kind of accelerator. pip
does not know that they exclude each other, so that two of them overwrite each other's files, and removing one removes
files of the other. Therefore Chrion requires none of them; its extras do.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from chrion.errors import OptionError

#: Distributions that provide onnxruntime. Of several, the last is kept.
FLAVOURS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-openvino",
    "onnxruntime-directml",
    "onnxruntime-webgpu",
    "onnxruntime-migraphx",
    "onnxruntime-rocm",
    "onnxruntime-training",
    "onnxruntime-vitisai",
)
_INFO = re.compile(r"(onnxruntime(?:[-_.][a-z]+)?)-([0-9][^-]*)(?:-.*)?\.(?:dist|egg)-info", re.IGNORECASE)


def install_hint(*extras: str) -> str:
    """Return the command that installs extras: for a Chrion from a package index, and for one from a checkout."""
    names = f"[{','.join(extras)}]"
    return f"pip install 'chrion{names}', or in a checkout: pip install -e '.{names}'"


def require_extras(subject: str, modules: Mapping[str, Iterable[str]]) -> None:
    """Check that the modules of extras can be imported.

    Args:
        subject: What needs them, for the message.
        modules: Names of modules by the extra that has them.

    Raises:
        OptionError: Some are missing; the message names all of them, and one command that installs them.
    """
    lacking = {extra: [name for name in names if not _is_found(name)] for extra, names in modules.items()}
    missing = [name for names in lacking.values() for name in names]
    if missing:
        verb = "are" if len(missing) > 1 else "is"
        hint = install_hint(*(extra for extra, names in lacking.items() if names))
        raise OptionError(f"{subject}: {', '.join(missing)} {verb} not installed", hint=hint)


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


_MISSING = (
    f"onnxruntime is not installed ({install_hint('cpu')}; [gpu] is for CUDA; "
    "the page on installation lists other flavours)"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with the installation of onnxruntime."""

    #: What is wrong, and the command that repairs it.
    text: str
    #: Whether onnxruntime cannot be imported.
    fatal: bool


@functools.cache
def find_fault() -> Fault | None:
    """Return what is wrong with the installation of onnxruntime; None if one distribution provides it.

    Costs a listing of the folder of its distribution.
    """
    loaded = sys.modules.get("onnxruntime")
    spec = getattr(loaded, "__spec__", None) if loaded else importlib.util.find_spec("onnxruntime")
    if spec is None:
        if loaded:
            return None  # a stand-in
        left = next(filter(None, (find_flavours(Path(entry)) for entry in sys.path)), {})
        return Fault(_lost(left) if left else _MISSING, fatal=True)
    location = Path(next(iter(spec.submodule_search_locations or ()), ""))
    installed = find_flavours(location.parent)
    if spec.origin is None:  # a folder without __init__.py
        return Fault(_lost(installed), fatal=True)
    if len(installed) < 2:
        return None
    text = f"{_names(installed)} provide the same module and overwrite each other's files; keep one, for example by: "
    return Fault(text + repair(installed), fatal=False)


def find_flavours(folder: Path) -> dict[str, str]:
    """Return the distributions in a folder that provide onnxruntime, and their versions."""
    matches = (_INFO.fullmatch(path.name) for path in folder.glob("onnxruntime*-info"))
    named = {match[1].lower().replace("_", "-").replace(".", "-"): match[2] for match in matches if match}
    return {name: named[name] for name in sorted(named) if name in FLAVOURS}


def repair(installed: Mapping[str, str]) -> str:
    """Return the command that leaves one of the distributions that were found, the last one of the list."""
    remaining = max(installed or FLAVOURS[:1], key=FLAVOURS.index)
    return (
        f"pip uninstall -y {' '.join(installed or FLAVOURS[:1])} && pip install --force-reinstall --no-deps {remaining}"
    )


def warn_of_fault() -> None:
    """Warn if onnxruntime is damaged, or provided by two distributions. Without any, importing it says so."""
    fault = find_fault()
    if fault and fault.text != _MISSING:
        warnings.warn(fault.text, stacklevel=3)


def require_onnxruntime() -> None:
    """Check that onnxruntime can be imported.

    Raises:
        ImportError: It is missing or damaged; the message has the command that installs or repairs it.
    """
    fault = find_fault()
    if fault and fault.fatal:
        raise ImportError(fault.text, name="onnxruntime")


def _lost(installed: Mapping[str, str]) -> str:
    cause = "the removal of another distribution has removed its files"
    return f"{_names(installed) or 'onnxruntime'}: {cause}; repair it with: {repair(installed)}"


def _names(installed: Mapping[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in installed.items())
