"""Policies of installed packages, through the command."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from chrion import Plan
from command_line import Chrion, assert_refused
from helpers import branches
from policy_packages import policy_installer


def test_the_command_plans_with_an_installed_policy(
    cli: Chrion, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``--policy`` accepts the name of a package's policy; one that cannot be loaded is refused with its cause."""
    install = policy_installer(tmp_path, monkeypatch)
    install("last-core", "last-core = last_core:last_core\nbroken = last_core:missing")
    onnx.save(branches(), "m.onnx")
    assert cli("partition", "m.onnx", "--policy", "last-core", "--accelerator", "none")[0] == 0
    found = Plan.load("m.plan.json")
    assert found.policy == "last-core"
    assert set(found.schedule.lanes) == {found.schedule.cores}
    about = "policy 'broken' of package last-core cannot be loaded: AttributeError"
    assert_refused(cli("partition", "m.onnx", "--policy", "broken"), about)
