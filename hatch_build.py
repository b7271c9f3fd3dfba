"""A build hook that compiles the native lanes; without a C compiler, Chrion runs all lanes as Python threads."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = Path("chrion", "native")
_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-fPIC", "-shared", "-pthread")


class LanesHook(BuildHookInterface[Any]):
    """A hook that puts ``liblanes.so`` beside its source and into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        """Compile the library before hatchling collects the files."""
        if sys.platform != "linux":  # the lanes use the affinity calls and futexes of Linux
            return
        folder = Path(self.root) / _FOLDER
        fresh, target = folder / f"liblanes.{os.getpid()}.so", folder / "liblanes.so"
        source = folder / "lanes.c"
        identity = f'-DCHRION_SOURCE="{zlib.crc32(source.read_bytes()):08x}"'
        command = [*shlex.split(os.environ.get("CC", "cc")), *_FLAGS, identity, str(source), "-o", str(fresh)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - the compiler
        except (OSError, subprocess.CalledProcessError) as error:
            reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[0]
            target.unlink(missing_ok=True)
            self.app.display_warning(
                f"native lanes cannot be compiled, so lanes will be Python threads, which are slower: {reason}"
            )
            return
        fresh.replace(target)  # a running process may use the previous library
        build_data["artifacts"].append((_FOLDER / target.name).as_posix())
        build_data["pure_python"] = False
        # The library does not use Python's C API, so one wheel is for all versions of Python.
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
