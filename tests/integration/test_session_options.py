"""Tests of session options on a cut session: honoured, run plain, or without effect.

``tests/parity/test_options.py`` tests every configuration key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from chrion import HybridSession
from chrion.graph.opened_model import OpenedModel
from chrion.machine.cores import physical_cores
from chrion.runtime.execution.plain_engine import PlainEngine
from chrion.runtime.options.session_options import (
    BASELINE_KEYS,
    BASELINE_OPTIONS,
    INHERITED_KEYS,
    INHERITED_OPTIONS,
    UNSUPPORTED_KEYS,
    fingerprint,
)
from chrion.runtime.selection.selector import SessionConfig
from helpers import assert_equal, node
from option_cases import (
    CPU,
    FEED,
    Change,
    Level,
    chain,
    check_key,
    check_session,
    cut,
    options,
    plain,
)
from seams.execution import (
    engine_of,
    lane_threads_of,
    note,
    note_candidates,
    segments_of,
    strictness,
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to an empty folder, in which files that a session writes appear."""
    monkeypatch.chdir(tmp_path)


# Completeness.

#: Methods of SessionOptions. Python cannot read what they set; probes and other tests here cover them.
METHODS = {
    "add_external_initializers",
    "add_external_initializers_from_files_in_memory",
    "add_free_dimension_override_by_denotation",
    "add_free_dimension_override_by_name",
    "add_initializer",
    "add_provider",
    "add_provider_for_devices",
    "add_session_config_entry",
    "clear_ep_context_data_read_func",
    "get_session_config_entry",
    "has_providers",
    "register_custom_ops_library",
    "set_ep_context_data_read_func",
    "set_load_cancellation_flag",
    "set_provider_selection_policy",
    "set_provider_selection_policy_delegate",
}


def test_every_method_of_session_options_is_known() -> None:
    """A method that a new release of onnxruntime adds fails this test until its effect is known."""
    members = {name for name in dir(ort.SessionOptions) if not name.startswith("_")}
    assert {name for name in members if callable(getattr(ort.SessionOptions, name))} <= METHODS


# Session configuration.


@pytest.mark.parametrize("key", [INHERITED_KEYS[0], BASELINE_KEYS[0], *list(UNSUPPORTED_KEYS)[::12]])
def test_a_session_key_of_each_kind_is_treated_as_listed(key: str) -> None:
    """The session is cut or plain as listed, with equal outputs, and cut with the key's default."""
    check_key(key)


@pytest.mark.parametrize("native", [False, True])
def test_segments_inherit_options(monkeypatch: pytest.MonkeyPatch, *, native: bool) -> None:
    """Segments receive inherited keys and attributes with native lanes and with lane threads."""
    keys, names = INHERITED_KEYS, INHERITED_OPTIONS

    def change(made: ort.SessionOptions) -> None:
        for key in keys:
            made.add_session_config_entry(key, "1")
        for name in names:
            setattr(made, name, CHANGED[name])

    native_segments = note(monkeypatch, "open a native segment")
    with cut(chain(), options(change)) as session:
        if native:
            found = [given for _, given in (call.given for call in native_segments)]
        else:
            segments = segments_of(lane_threads_of(session))
            found = [segment.session.get_session_options() for segment in segments]
        assert len(found) > 1
        for given in found:
            assert [given.get_session_config_entry(key) for key in keys] == ["1"] * len(keys)
            assert [getattr(given, name) for name in names] == [CHANGED[name] for name in names]


# Members of SessionOptions.

#: Values other than the defaults.
CHANGED: Mapping[str, Any] = {
    "enable_cpu_mem_arena": False,
    "enable_mem_pattern": False,
    "enable_mem_reuse": False,
    "enable_profiling": True,
    "execution_mode": ort.ExecutionMode.ORT_PARALLEL,
    "execution_order": ort.ExecutionOrder.PRIORITY_BASED,
    "graph_optimization_level": Level.ORT_DISABLE_ALL,
    "inter_op_num_threads": 2,
    "intra_op_num_threads": 2,
    "log_severity_level": 3,
    "log_verbosity_level": 1,
    "logid": "mine",
    "optimized_model_filepath": "optimised.onnx",
    "profile_file_prefix": "mine",
    "use_deterministic_compute": True,
    "use_per_session_threads": False,
}


@pytest.mark.parametrize("name", CHANGED)
def test_an_attribute_is_treated_as_listed(name: str) -> None:
    """The session is cut if the attribute is listed as honoured and plain otherwise, with equal outputs."""
    assert CHANGED[name] != getattr(ort.SessionOptions(), name)
    honoured = {*INHERITED_OPTIONS, *BASELINE_OPTIONS, "profile_file_prefix"}
    check_session(lambda o: setattr(o, name, CHANGED[name]), None if name in honoured else name)


def test_every_attribute_is_tested() -> None:
    """The values above cover all attributes."""
    made = ort.SessionOptions()
    assert {name for name in dir(made) if not name.startswith("_") and not callable(getattr(made, name))} <= set(
        CHANGED
    )


def test_a_model_is_cut_without_optimisation_if_options_disable_it() -> None:
    """Chrion does not optimise the model if the options disable it. The optimiser may be the reason for the option."""
    model = chain()
    model.graph.node.insert(1, node("Identity", ["a"], ["c"], name="nothing"))
    model.graph.node[2].input[0] = "c"
    for level, operators in ((Level.ORT_ENABLE_BASIC, 3), (Level.ORT_DISABLE_ALL, 4)):
        given = options(lambda o, at=level: setattr(o, "graph_optimization_level", at))
        with cut(model, given) as session:
            assert session.plan is not None
            assert len(session.plan.operators) == operators
            assert_equal(session.run(None, FEED), plain(model, given).run(None, FEED))


# Decisions.


def test_decisions_depend_on_the_options() -> None:
    """The key of a decision contains the options that affect latency, but not those of logging."""
    changes: list[Change] = [
        lambda _: None,
        lambda o: setattr(o, "intra_op_num_threads", 1),
        lambda o: setattr(o, "graph_optimization_level", Level.ORT_ENABLE_BASIC),
        lambda o: o.add_session_config_entry("session.disable_prepacking", "1"),
        lambda o: o.add_session_config_entry("session.intra_op.allow_spinning", "0"),
    ]
    keys = [fingerprint(options(change)) for change in changes]
    assert len({None, *keys}) == len(keys) + 1
    assert keys == [fingerprint(options(change)) for change in changes]
    assert fingerprint(options(lambda o: setattr(o, "logid", "mine"))) == keys[0]


def test_decisions_are_kept_for_the_options() -> None:
    """The key of a decision contains the session options and the accelerator's options."""

    def goal(given: ort.SessionOptions | None, device: str) -> tuple[object, ...]:
        accelerator = [("CUDAExecutionProvider", {"device_id": device})]
        return SessionConfig(OpenedModel(b""), given, accelerator).decision_key

    threads = options(lambda o: setattr(o, "intra_op_num_threads", 1))
    goals = [goal(None, "0"), goal(None, "1"), goal(options(), "0"), goal(threads, "0")]
    assert len(set(goals)) == len(goals)
    assert goal(options(), "0") == goals[2]


def test_the_baseline_has_the_callers_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the plain session that the caller would have created is a baseline."""
    compared = note_candidates(monkeypatch)
    given = options(lambda o: setattr(o, "intra_op_num_threads", 2))
    with HybridSession(chain(), given, [CPU]) as session:
        assert [candidate.name for candidate in compared if candidate.plain] == ["plain"]
        engine = engine_of(session)
        assert isinstance(engine, PlainEngine)
        assert engine.session.get_session_options().intra_op_num_threads == 2


@pytest.mark.parametrize(("threads", "cores", "lanes"), [(0, None, None), (1, None, 1), (64, None, 64), (1, 2, 2)])
def test_plans_use_no_more_lanes_than_threads_are_allowed(threads: int, cores: int | None, lanes: int | None) -> None:
    """``intra_op_num_threads`` limits the lanes unless ``cores`` is given; without either, the machine's cores do."""
    given = options(lambda o: setattr(o, "intra_op_num_threads", threads))
    config = SessionConfig(OpenedModel(b""), given, [CPU], cores=cores)
    assert config.lanes == (lanes and min(lanes, max(cores or 0, len(physical_cores()))))


# Arguments.


@pytest.mark.parametrize("rest", [{"disabled_optimizers": ["ConstantFolding"]}, {"read_config_from_model": 1}])
def test_arguments_for_one_session_run_plain(rest: dict[str, Any]) -> None:
    """The model runs plain, and the plain session receives the arguments."""
    with cut(chain(), **rest) as session:
        assert repr(next(iter(rest))) in session.explain()
        assert_equal(session.run(None, FEED), plain(chain(), options(), **rest).run(None, FEED))


def test_options_in_the_model_are_read_if_the_environment_enables_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options stored in the model have the effect that they have on InferenceSession."""
    monkeypatch.setenv("ORT_LOAD_CONFIG_FROM_MODEL", "1")
    with cut(chain()) as session:
        assert "'ORT_LOAD_CONFIG_FROM_MODEL'" in session.explain()
        assert_equal(session.run(None, FEED), plain(chain(), options()).run(None, FEED))


def test_disabling_fallback_makes_engines_strict() -> None:
    """``enable_fallback=0`` makes the engines strict and leaves the model cut."""
    with cut(chain(), enable_fallback=0) as session:
        assert session.plan is not None
        assert strictness(session) == {True}
    with cut(chain(), enable_fallback=1) as session:
        assert strictness(session) == {False}


def test_arguments_that_onnxruntime_ignores_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """An unknown argument is ignored with a warning."""
    plain(chain(), options(), unheard_of=1)
    with cut(chain(), unheard_of=1) as session:
        assert session.plan is not None
    assert "unheard_of" in caplog.text
