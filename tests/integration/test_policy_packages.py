"""Policies of installed packages, through the command."""

from __future__ import annotations

import sys
from pathlib import Path

import onnx
import pytest

from chrion import Plan
from chrion.cli import main
from helpers import branches
from policy_packages import policy_installer


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a small model; install a package with a policy that works and one that does not."""
    install = policy_installer(tmp_path, monkeypatch)
    install("last-core", "last-core = last_core:last_core\nbroken = last_core:missing")
    path = tmp_path / "m.onnx"
    onnx.save(branches(), path)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["chrion", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


def test_the_command_plans_with_an_installed_policy(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--policy`` accepts the name of a package's policy."""
    plan = model.with_suffix(".plan.json")
    options = ("--policy", "last-core", "--accelerator", "none", "-o", str(plan))
    assert run(monkeypatch, "partition", str(model), *options) == 0
    found = Plan.load(plan)
    assert found.policy == "last-core"
    assert set(found.schedule.lanes) == {found.schedule.cores}


def test_a_broken_policy_is_refused_with_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The line names the package and the cause, without a traceback."""
    assert run(monkeypatch, "partition", str(model), "--policy", "broken") == 2
    error = capfd.readouterr().err
    assert "policy 'broken' of package last-core cannot be loaded: AttributeError" in error
    assert "Traceback" not in error
