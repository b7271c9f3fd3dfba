"""Fixtures of all tests: a separate cache, checked plans, and a check that no lane thread remains."""

from __future__ import annotations

import gc
import os
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import property_tests  # noqa: F401 - registers the profiles of Hypothesis
from chrion import HybridSession
from chrion.native import available
from chrion.profiler import measure_graph
from chrion.runtime.selection import guard
from command_line import cli  # noqa: F401 - a fixture
from helpers import FakeInterferenceMonitor, lanes, tasks
from seams.execution import answer, check_frames, check_plans, check_rewrites, serve_crowds, shorten_planning
from seams.sessions import decide_in_this_process, measure_machine_once

#: Folders whose tests have the marker of the same name.
_TIERS = ("process", "quality", "parity", "libraries", "webgpu")
_TESTS = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Run all tests of files that the command line names, whatever their markers, unless it has an option ``-m``."""
    files = all(Path(str(argument).split("::")[0]).is_file() for argument in config.args)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; commands would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.args_source is pytest.Config.ArgsSource.ARGS and files and not _has_markers(config):
        config.option.markexpr = ""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run the default tests in one process more than there are cores, at most four; what is chosen, in this one.

    Tests wait at times: on two idle cores, three take a fifth less time than two.
    """
    chosen = config.args_source is pytest.Config.ArgsSource.ARGS or _has_markers(config)
    return 0 if chosen else min(4, len(os.sched_getaffinity(0)) + 1)


def _has_markers(config: pytest.Config) -> bool:
    """Return whether the command line has an option ``-m``."""
    return any(str(word).startswith("-m") for word in config.invocation_params.args)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the folders that a plain ``pytest`` leaves out."""
    for item in items:
        folder = item.path.relative_to(_TESTS).parts[0]
        if folder in _TIERS:
            item.add_marker(folder)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the command that runs each failed test alone."""
    failed = {report.nodeid: None for state in ("failed", "error") for report in terminalreporter.getreports(state)}
    profile = config.getoption("--hypothesis-profile", None)
    for name in failed:
        words = ["pytest", name, *([f"--hypothesis-profile={profile}"] if profile else [])]
        terminalreporter.write_line(f"to run it alone: {shlex.join(words)}")


def pytest_collection_finish() -> None:
    """Exempt the objects of pytest and of all imported modules from later garbage collections, to make them quick."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep measurements in a temporary folder; tests share it, so that each signature is measured once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHRION_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("CHRION_TUNE", "now")  # tests of tuning in the background ask for it
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))  # other processes do not count
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_interference() -> Iterator[None]:
    """Take no measurement as disturbed, so that tests do not depend on other processes; measure the machine once."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (guard, measure_graph):
            patch.setattr(module, "UsageMonitor", lambda _: FakeInterferenceMonitor())
        measure_machine_once(patch)
        decide_in_this_process(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _checked_plans() -> Iterator[None]:
    """Check each plan and rewritten model, and that each frame on a second device holds what its plan predicts."""
    with pytest.MonkeyPatch.context() as patch:
        check_plans(patch)
        check_rewrites(patch)
        check_frames(patch)
        yield


@pytest.fixture(scope="module")
def short_planning() -> Iterator[None]:
    """Shorten measurements and searches, in tests for which it does not matter which plan they find."""
    with pytest.MonkeyPatch.context() as patch:
        shorten_planning(patch)
        yield


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Python threads as lanes, as on a machine without a compiler."""
    answer(monkeypatch, "find native lanes", False)  # noqa: FBT003 - what the call returns


@pytest.fixture
def uncrowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve requests by the plan's lanes, however many are in flight."""
    serve_crowds(monkeypatch)


@pytest.fixture(params=[True, False], ids=["native", "interpreted"])
def either_lanes(request: pytest.FixtureRequest) -> None:
    """Run the test with native lanes and with Python threads as lanes."""
    if not request.param:
        request.getfixturevalue("interpreted")
    elif not available():
        pytest.skip("native lanes are not compiled")


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Check that no lane thread outlives its session, and that the caller's affinity is restored."""
    affinity, before = os.sched_getaffinity(0), {*tasks()}
    yield
    assert os.sched_getaffinity(0) == affinity, "the main thread's affinity was not restored"
    end_s = time.monotonic() + 10
    if lanes(before):
        time.sleep(0.01)  # most are just ending
    while left := lanes(before):
        gc.collect()
        if any(isinstance(thing, HybridSession) for thing in gc.get_objects()):
            return  # a fixture of a wider scope still holds one
        assert time.monotonic() < end_s, f"left behind: {left}"
        time.sleep(0.01)
