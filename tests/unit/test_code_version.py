"""The version of the code in files of measurements."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from decoding.code_version import check_version, code_version
from decoding.costs import MeasuredCosts, append_costs, read_costs
from decoding.orca_experiment import LoadPoint, append_point, measured_on, read_points

import chrion
from chrion.errors import OptionError
from chrion.serving.simulator.decoder_costs import IterationCosts

POINT = LoadPoint("small", 1, "iteration", 8, 1.0, 1.0, 60, 0, 2.0, 3.0, machine="a machine", code="abc1234")
COSTS = MeasuredCosts("small", 1, IterationCosts(), IterationCosts(), "abc1234")


def run_git(folder: Path, *words: str) -> str:
    """Return what git prints in a folder."""
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603 - fixed words


def test_without_git_it_is_that_of_the_package(tmp_path: Path) -> None:
    """A folder without a repository, and one with a damaged repository, have no commit."""
    assert code_version(tmp_path) == chrion.__version__
    damaged = tmp_path / "damaged"
    (damaged / ".git").mkdir(parents=True)
    assert code_version(damaged) == chrion.__version__


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize(
    ("name", "mark"),
    [("chrion", ", changed"), ("scripts", ", changed"), ("scripts/decoding/measured", ""), ("docs", "")],
)
def test_a_checkout_has_its_commit(tmp_path: Path, name: str, mark: str) -> None:
    """Changes of the package and of the scripts are marked, those of data and of other folders are not."""
    file = tmp_path / name / "file.py"
    file.parent.mkdir(parents=True)
    file.write_text("1", encoding="utf-8")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "Add a file", "--no-gpg-sign"]):
        run_git(tmp_path, *words)
    file.write_text("2", encoding="utf-8")
    commit = run_git(tmp_path, "rev-parse", "--short", "HEAD")
    assert code_version(tmp_path) == commit + mark


def test_points_of_several_versions_are_refused(tmp_path: Path) -> None:
    """Points of one version are read with it; a line of another one, or without any, is refused with the others."""
    path = tmp_path / "points.jsonl"
    append_point(path, POINT)
    (found,) = read_points(path)
    assert found == POINT
    assert measured_on([found]) == "a machine, Chrion abc1234"
    append_point(path, replace(POINT, code=""))
    with pytest.raises(OptionError, match=r"points\.jsonl: .* several versions of the code: unknown, abc1234"):
        read_points(path)


def test_costs_of_several_versions_are_refused(tmp_path: Path) -> None:
    """Costs of one version are averaged; lines without one are read as long as all of them have none."""
    path, old = tmp_path / "costs.jsonl", tmp_path / "old.jsonl"
    append_costs(path, COSTS)
    assert check_version(path) == "abc1234"
    assert read_costs(path) == {("small", 1): (COSTS.costs, COSTS.prompt_costs)}
    old.write_text(path.read_text(encoding="utf-8").replace(', "code": "abc1234"', ""), encoding="utf-8")
    assert check_version(old) == ""
    assert read_costs(old) == read_costs(path)
    with pytest.raises(OptionError, match=r"costs\.jsonl and .*old\.jsonl: measured with several versions"):
        check_version(path, old)
    append_costs(path, replace(COSTS, code="def5678"))
    with pytest.raises(OptionError, match="abc1234, def5678"):
        read_costs(path)
