"""Tests that every script describes itself."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

from seams.commands import set_arguments

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
#: Scripts that are run; the others are modules that they import.
PROGRAMS = sorted(path for path in SCRIPTS.glob("*.py") if '__name__ == "__main__"' in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_help_is_printed_without_running_the_script(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--help`` prints the description and exits with 0."""
    if path.stem.endswith("_serve"):
        for module in ("grpc", "prometheus_client"):
            pytest.importorskip(module, reason=f"no {module} in this environment (extra serve)")
    if path.stem == "bench_top":
        pytest.importorskip("equinox", reason="no equinox in this environment (extra learn)")
    set_arguments(monkeypatch, path.name, "--help")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: {path.name}")
    assert len(printed.splitlines()) > 5


def test_the_docstring_has_a_usage_line() -> None:
    """A script's docstring says how to run it."""
    for path in PROGRAMS:
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert f"python scripts/{path.name}" in text, path.name
