"""Tests that each example runs as a script and prints its results."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Text that each example has to print, as a regular expression.
PRINTED = {
    "capacity_planning": r" 2 models .*\n(.*\n)*12 models   gpu: .* violations, hybrid: .* violations",
    "gpu_memory_budget": r"budget  none: .*\nbudget 440MB: .*fits: True\nbudget   0MB: .* 0\.0 MB resident",
    "replace_inference_session": r"outputs equal: True",
    "ship_a_plan": r"\d+ operators in \d+ segments, predicted .* ms\noutputs: \[\(8, 1, 64\)\]",
    "write_a_scheduler": r"least loaded: .* segments\nchrion: predicted .* segments\noutputs: \[\(8, 1, 64\)\]",
}


def test_every_example_is_tested() -> None:
    """Each file among the examples has an expectation."""
    assert {p.stem for p in EXAMPLES.glob("*.py")} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    """The example ends without an error or a warning, and prints the expected text."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTED[name], done.stdout), done.stdout
