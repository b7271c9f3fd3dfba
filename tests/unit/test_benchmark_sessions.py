"""Benchmarks of sessions, which time the selected engine and not the one that serves until tuning ends."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "scripts").glob("bench_*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_sessions_are_tuned_before_they_are_timed(script: Path) -> None:
    """A benchmark's HybridSession has a plan, or is tuned before its first request."""
    calls = [part for part in ast.walk(ast.parse(script.read_text(encoding="utf-8"))) if isinstance(part, ast.Call)]
    for call in calls:
        if ast.unparse(call.func).split(".")[-1] == "HybridSession":
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert "plan" in options or options.get("tune") == "'now'", ast.unparse(call)
