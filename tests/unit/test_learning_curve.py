"""The picture of what agents reach while they learn."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from agent_curves import plot_agents


@pytest.mark.parametrize("values", [[0.5], [1.0, math.nan, 0.5] * 50, [math.nan], []])
def test_curves_of_agents_are_drawn(values: list[float], tmp_path: Path) -> None:
    """Curves of few or many trials, and of trials without a figure, give a PNG."""
    pytest.importorskip("matplotlib")
    plot_agents("Agents", {"agent": values, "other": [1.0, 0.9]}, "walk", "latency", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
