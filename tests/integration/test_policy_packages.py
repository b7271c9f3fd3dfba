"""Policies of installed packages, through the command."""

from __future__ import annotations

import os
import subprocess
import sys
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


def test_a_taken_name_is_warned_of_as_commands_warn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In one line, without the place in Chrion's code."""
    policy_installer(tmp_path, monkeypatch)("last-core", "heft = last_core:last_core")
    path = os.pathsep.join([str(tmp_path / "last-core"), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [sys.executable, "-m", "chrion", "partition", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path})  # noqa: S603
    expected = "chrion: warning: policy 'heft' of package last-core is ignored: Chrion has a policy of that name"
    assert done.stderr.splitlines() == [expected]
