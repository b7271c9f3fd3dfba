"""Threads of an engine's sessions: a core for each, and another one for the caller."""

from __future__ import annotations

from pathlib import Path

import pytest

from chrion.generation.session_threads import SessionThreads, lease_iteration_cores
from chrion.machine.core_leases import lease_cores
from seams.generation import use_cores, without_leases

AFFINITIES = "session.intra_op_thread_affinities"


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use four cores, a registry without leases, and a folder without locks."""
    without_leases(monkeypatch)
    use_cores(monkeypatch, (0, 1, 4, 5))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_every_thread_has_its_own_core(threads: int) -> None:
    """No thread shares a core with another one."""
    cores = lease_iteration_cores(threads)
    assert cores is not None
    assert len({cores.caller, *cores.others}) == threads
    assert {cores.caller, *cores.others} <= {0, 1, 4, 5}


def test_callers_of_several_engines_are_on_different_cores() -> None:
    """The caller's core is the busiest one: it also chooses the tokens."""
    leased = [lease_iteration_cores(4) for _ in range(4)]
    assert sorted(cores.caller for cores in leased if cores) == [0, 1, 4, 5]
    for cores in leased:
        assert cores is not None
        assert len({cores.caller, *cores.others}) == 4


def test_the_core_of_the_caller_is_given_to_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it is held by the fewest lanes."""
    with monkeypatch.context() as limited:
        use_cores(limited, (0, 1, 4))
        lanes = [lease_cores(3) for _ in range(3)]
    cores = lease_iteration_cores(2)
    assert cores is not None
    assert cores.caller == 5
    assert cores.others in {(0,), (1,), (4,)}
    del lanes


@pytest.mark.parametrize("threads", [1, 5, 100])
def test_the_system_chooses_if_there_are_too_few_cores_or_threads(threads: int) -> None:
    """A single thread needs no core of its own, and more threads than cores cannot have one each."""
    assert lease_iteration_cores(threads) is None
    again = lease_iteration_cores(4)
    assert again is not None
    assert again.caller == 0  # nothing is held


def test_the_system_chooses_if_it_cannot_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without affinities gets no cores."""
    use_cores(monkeypatch, ())
    assert lease_iteration_cores(2) is None


def test_released_cores_are_free() -> None:
    """The next lease has the same caller's core."""
    cores = lease_iteration_cores(2)
    assert cores is not None
    cores.release()
    again = lease_iteration_cores(2)
    assert again is not None
    assert again.caller == cores.caller


def test_options_count_processors_from_one() -> None:
    """Logical CPUs count from 1 in onnxruntime."""
    options = SessionThreads(3, (0, 5)).options({"session.force_spinning_stop": "0"})
    assert options.intra_op_num_threads == 3
    assert options.get_session_config_entry(AFFINITIES) == "1;6"
    assert options.get_session_config_entry("session.force_spinning_stop") == "0"


def test_options_without_cores_leave_the_choice_to_the_system() -> None:
    """There is no entry for affinities."""
    with pytest.raises(RuntimeError, match="affinities"):
        SessionThreads(3).options({}).get_session_config_entry(AFFINITIES)
