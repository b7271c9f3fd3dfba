"""Every page of the documentation with commands or code that is marked to be run."""

from __future__ import annotations

from pathlib import Path

import pytest

from code_blocks import PAGES, blocks, run_page
from command_line import Chrion

#: Pages that plan large models with the default policy.
SLOW = {"README.md", "gpu-memory-budget.md"}
RUN = [
    pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in SLOW else [])
    for page in PAGES
    if any(block.mark == "run" for block in blocks(page))
]


@pytest.mark.parametrize("page", RUN)
def test_a_page_runs(page: Path, cli: Chrion, capfd: pytest.CaptureFixture[str]) -> None:
    """The marked blocks of a page, run in order in one folder, have the documented output."""
    run_page(page, cli, capfd)
