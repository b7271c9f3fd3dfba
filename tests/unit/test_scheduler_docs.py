"""The documentation of the schedulers agrees with their code."""

from __future__ import annotations

from pathlib import Path

import pytest

import chrion
from chrion.scheduler import POLICIES

ROOT = Path(chrion.__file__).parent.parent
PAGE = ROOT / "docs" / "adding-a-scheduler.md"
REGISTRY = ROOT / "chrion" / "scheduler" / "policies" / "registry.py"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="an installed package has no documentation")


def code_blocks() -> list[str]:
    """Return the Python code on the page, block by block."""
    return [part.split("```", 1)[0] for part in PAGE.read_text(encoding="utf-8").split("```python\n")[1:]]


def test_the_example_is_the_file() -> None:
    """The complete scheduler on the page is identical to the example's module."""
    assert (REGISTRY.parent / "cpop.py").read_text(encoding="utf-8") in code_blocks()


def test_the_registry_line_is_the_one_on_the_page() -> None:
    """The line on the page that adds the example is in the registry, but for white space."""
    (line,) = [block for block in code_blocks() if block.lstrip().startswith("SchedulePolicy(")]
    assert "".join(line.split()) in "".join(REGISTRY.read_text(encoding="utf-8").split())


def test_every_policy_is_described() -> None:
    """The page on schedulers contains the name of each built-in policy."""
    text = (ROOT / "docs" / "schedulers.md").read_text(encoding="utf-8")
    assert [name for name in POLICIES if f"`{name}`" not in text] == []
