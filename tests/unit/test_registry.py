"""The registry of policies, with policies that installed packages add."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from chrion.errors import OptionError, ScheduleError
from chrion.graph import Dag
from chrion.profiler import uniform_costs
from chrion.scheduler import POLICIES, describe_policies, policy_names
from chrion.scheduler.policies.registry import find_policy
from policy_packages import Install, policy_installer
from policy_solutions import solve_policy

DAG = Dag.from_edges(3, [(0, 1), (1, 2)])
COSTS = uniform_costs(DAG, cpu_ms=[1.0, 1.0])


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install packages with policies, for this test."""
    return policy_installer(tmp_path, monkeypatch)


@pytest.mark.usefixtures("install")
def test_every_built_in_policy_has_a_line_of_description() -> None:
    """Each description fits into a help text; the names are in the order of the registry."""
    described = describe_policies()
    assert list(described) == policy_names() == list(POLICIES)
    for text in described.values():
        assert text == text.strip()
        assert text.endswith(".")
        assert "\n" not in text
        assert len(text) <= 80


def test_an_unknown_policy_is_refused_with_the_names() -> None:
    """The hint lists the names of all policies."""
    with pytest.raises(OptionError, match=r"unknown policy 'fastest' \(choose one of chrion, .*greedy"):
        find_policy("fastest")


def test_an_installed_package_adds_a_policy(install: Install) -> None:
    """The policy is listed after the built-in ones, described by its docstring, and makes schedules."""
    install("last-core", "last-core = last_core:last_core")
    assert policy_names() == [*POLICIES, "last-core"]
    assert describe_policies()["last-core"] == "Everything on the last core."
    solution = solve_policy("last-core", DAG, COSTS)
    assert solution.schedule.lanes == (2, 2, 2)
    assert solution.timeline.latency_ms == 3.0


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("missing_module:last_core", "cannot be loaded: ModuleNotFoundError: No module named 'missing_module'"),
        ("broken:missing", "cannot be loaded: AttributeError: .*missing"),
        ("broken:NUMBER", "broken:NUMBER is not a function"),
    ],
)
def test_a_broken_package_breaks_no_other_policy(install: Install, target: str, reason: str) -> None:
    """The error names the package, other policies keep working, and the description has the reason."""
    install("broken", f"bad = {target}\ngood = broken:last_core")
    with pytest.raises(OptionError, match=rf"policy 'bad' of package broken:? {reason}.*uninstall broken"):
        find_policy("bad")
    assert describe_policies()["bad"].startswith("unavailable: policy 'bad' of package broken")
    for name in ("good", "heft"):
        assert solve_policy(name, DAG, COSTS).timeline.latency_ms == 3.0


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("backwards", ": schedule: operator '1' precedes its predecessor '0'"),
        ("nothing", " returned a NoneType, expected a Schedule"),
    ],
)
def test_an_invalid_schedule_of_a_package_is_refused(install: Install, function: str, reason: str) -> None:
    """The error names the policy and its package."""
    install("broken", f"bad = broken:{function}")
    with pytest.raises(ScheduleError, match=f"policy 'bad' of package broken{reason}"):
        solve_policy("bad", DAG, COSTS)


def test_a_built_in_name_stays_built_in(install: Install) -> None:
    """A package's policy with the name of a built-in one is ignored, with one warning."""
    install("last-core", "heft = last_core:last_core\nlast-core = last_core:last_core")
    with pytest.warns(RuntimeWarning, match="'heft' of package last-core is ignored: Chrion has a policy of that name"):
        names = policy_names()
    assert names == [*POLICIES, "last-core"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_policy("heft") is POLICIES["heft"]


def test_the_first_of_two_packages_keeps_a_name(install: Install) -> None:
    """Packages are ordered by name; the policy of the second is ignored with a warning."""
    install("package-b", "same = package_b:missing")
    install("package-a", "same = package_a:last_core")
    with pytest.warns(RuntimeWarning, match="'same' of package package-b is ignored: package package-a has"):
        find_policy("same")
    assert solve_policy("same", DAG, COSTS).schedule.lanes == (2, 2, 2)
