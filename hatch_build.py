"""A build hook that compiles the native libraries; without a C compiler, Chrion works without them.

Environment variables: ``CC`` is the compiler, and with ``CHRION_NATIVE=0`` nothing is compiled, for a wheel that fits
all systems. ``scripts/build_wheels.py`` sets them.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = Path("chrion", "native")
_FLAGS = ("-std=gnu11", "-O3", "-Wall", "-fPIC", "-fvisibility=hidden", "-shared", "-pthread", "-lm")
#: The sources of each library, and what Chrion does without it.
_LIBRARIES = {
    "lanes": (("lanes.c",), "lanes will be Python threads"),
    "operators": (
        (
            "operators.c",
            "attention.c",
            "attend.c",
            "attend_avx2.c",
            "attend_avx512.c",
            "recurrent.c",
            "recurrent_weights.c",
            "recur.c",
            "recur_avx2.c",
            "recur_avx512.c",
            "recur_bfloat16.c",
            "linear.c",
            "silu_and_mul.c",
            "multiply_row.c",
            "multiply_row_avx2.c",
        ),
        "models will be made of onnxruntime's operators",
    ),
}


class NativeHook(BuildHookInterface[Any]):
    """A hook that puts the libraries beside their sources and into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        """Compile the libraries before hatchling collects the files."""
        # The lanes use the affinity calls and futexes of Linux.
        if sys.platform != "linux" or os.environ.get("CHRION_NATIVE") == "0":
            return
        for name, (sources, otherwise) in _LIBRARIES.items():
            if reason := self._compile(name, sources, build_data):
                self.app.display_warning(f"{name}.c cannot be compiled, so {otherwise}, which is slower: {reason}")

    def _compile(self, name: str, sources: Sequence[str], build_data: dict[str, Any]) -> str:
        """Compile a library; return why that is not possible."""
        folder = Path(self.root) / _FOLDER
        fresh, target = folder / f"lib{name}.{os.getpid()}.so", folder / f"lib{name}.so"
        # As in chrion/native/library.py, which is not installed yet.
        content = b"".join(path.read_bytes() for path in sorted(folder.glob("*.[ch]")))
        identity = f'-DCHRION_SOURCE="{zlib.crc32(content):08x}"'
        paths = [str(folder / source) for source in sources]
        command = [*shlex.split(os.environ.get("CC", "cc")), identity, *paths, *_FLAGS, "-o", str(fresh)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - the compiler
        except (OSError, subprocess.CalledProcessError) as error:
            target.unlink(missing_ok=True)
            return str((getattr(error, "stderr", "") or str(error)).strip().splitlines()[0])
        fresh.replace(target)  # a running process may use the previous library
        build_data["artifacts"].append((_FOLDER / target.name).as_posix())
        build_data["pure_python"] = False
        # The libraries do not use Python's C API, so one wheel is for all versions of Python.
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        return ""
