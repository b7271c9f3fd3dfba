"""Benchmarks of sessions, which time the selected engine and not the one that serves until tuning ends."""

from __future__ import annotations

import ast
from pathlib import Path

SCRIPTS = sorted((Path(__file__).parents[2] / "scripts").glob("bench_*.py"))


def test_sessions_are_tuned_before_they_are_timed() -> None:
    """A benchmark has a plan, or is tuned before its first request, unless tuning is what it measures."""
    for script in SCRIPTS:
        for call in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] == "HybridSession":
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                tuned = "plan" in options or options.get("tune") == "'now'"
                assert tuned or script.stem == "bench_adoption", (script.name, ast.unparse(call))
