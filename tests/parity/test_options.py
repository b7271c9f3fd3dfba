"""Tests of every option of onnxruntime on a cut session: honoured, run plain, or without effect."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime as ort
import options_page
import pytest

from chrion import HybridSession
from chrion.runtime.execution import segments as segment
from chrion.runtime.execution.engine import CutEngine, PlainEngine
from chrion.runtime.options.session_options import fingerprint, session_reason
from chrion.runtime.options.table import (
    ARGUMENTS,
    RUN_KEYS,
    RUN_OPTIONS,
    SESSION_KEYS,
    SESSION_OPTIONS,
    Treatment,
)
from chrion.runtime.selection import selector as choosing
from chrion.runtime.selection.guard import Comparison
from chrion.runtime.selection.selector import SessionConfig
from helpers import assert_equal, node
from option_cases import (
    CPU,
    FEED,
    Change,
    Level,
    chain,
    check_session,
    cut,
    options,
    plain,
)


def segment_options(session: HybridSession) -> list[ort.SessionOptions]:
    """Return the options of every segment of a session with lane threads."""
    assert isinstance(session._engine, CutEngine)
    session.run(None, FEED, ort.RunOptions())
    executor = session._engine._python_executor()
    return [part.session.get_session_options() for part in executor._segments]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty folder, in which files that a session writes appear."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Completeness of the table.


def members(kind: type) -> set[str]:
    """Return the public members of a class."""
    return {name for name in dir(kind) if not name.startswith("_")}


#: Members that only some releases of onnxruntime have.
NEWER = {"execution_order", "set_ep_context_data_read_func", "clear_ep_context_data_read_func", "add_provider"}


def test_every_member_of_session_options_is_in_the_table() -> None:
    """A member that a new release of onnxruntime adds fails this test until the table contains it."""
    assert members(ort.SessionOptions) <= set(SESSION_OPTIONS)
    assert set(SESSION_OPTIONS) - NEWER <= members(ort.SessionOptions)


def test_every_member_of_run_options_is_in_the_table() -> None:
    """A member that a new release of onnxruntime adds fails this test until the table contains it."""
    assert members(ort.RunOptions) == set(RUN_OPTIONS)


def test_every_key_in_the_library_is_in_the_table() -> None:
    """All configuration keys in the texts of the installed library are in the table."""
    capi = Path(ort.__file__).parent / "capi"
    (library,) = [*capi.glob("onnxruntime_pybind11_state*.so"), *capi.glob("onnxruntime_pybind11_state*.pyd")]
    areas = b"session|optimization|ep|mlas|memory|qnn"
    found = re.findall(rb"\0((?:%s)\.[a-z][a-zA-Z0-9_.]+[a-zA-Z0-9])(?=\0)" % areas, library.read_bytes())
    assert len(found) > 50
    assert {key.decode() for key in found} - set(SESSION_KEYS) - set(RUN_KEYS) == set()


def test_the_page_agrees_with_the_table() -> None:
    """The page on options is the one that ``python scripts/options_page.py`` writes."""
    assert options_page.PAGE.read_text() == options_page.format_page()


# Session configuration.

#: A meaningful value of each key; "1" for the others.
VALUES = {
    "ep.context_file_path": "context.onnx",
    "optimization.disable_specified_optimizers": "ConstantFolding",
    "optimization.minimal_build_optimizations": "apply",
    "session.allow_released_opsets_only": "0",
    "session.collect_node_memory_stats_to_file": "stats.csv",
    "session.gqa_value_layout": "BNHS",
    "session.layer_assignment_settings": "cpu(=a)",
    "session.load_model_format": "ORT",
    "session.max_shape_override": "x:[2,4]",
    "session.model_external_initializers_file_folder_path": ".",
    "session.moe_expert_counter_state_file": "experts",
    "session.name_based_layer_assignment": "cpu(first)",
    "session.node_partition_config_file": "partition.json",
    "session.qdq_matmulnbits_block_size": "32",
    "session.resource_cuda_partitioning_settings": "1000,",
    "session.save_model_format": "ORT",
}


@pytest.mark.parametrize("key", SESSION_KEYS)
def test_a_session_key_is_treated_as_the_table_says(key: str) -> None:
    """The session is cut or plain as the table says, with equal outputs."""

    def change(made: ort.SessionOptions) -> None:
        made.intra_op_num_threads = 2
        made.add_session_config_entry(key, VALUES.get(key, "1"))

    if SESSION_KEYS[key].treatment is Treatment.PLAIN:
        assert repr(key) in session_reason(options(change), {})
    check_session(change, SESSION_KEYS[key].treatment, key)


@pytest.mark.parametrize("key", [key for key, option in SESSION_KEYS.items() if option.harmless])
def test_harmless_values_leave_the_model_cut(key: str) -> None:
    """The session is cut with the values that the table lists as harmless."""
    for harmless in SESSION_KEYS[key].harmless or ():
        if harmless:
            check_session(lambda o, text=harmless: o.add_session_config_entry(key, text), Treatment.HONOURED, key)


@pytest.mark.parametrize("key", [key for key, option in SESSION_KEYS.items() if option.inherited])
def test_segments_inherit_a_session_key(key: str, native_options: list[ort.SessionOptions]) -> None:
    """Segments receive the key with native lanes and with lane threads."""
    with cut(chain(), options(lambda o: o.add_session_config_entry(key, "1"))) as session:
        found = [*segment_options(session), *native_options]
        assert len(found) > 1
        assert [o.get_session_config_entry(key) for o in found] == ["1"] * len(found)


@pytest.fixture
def native_options(monkeypatch: pytest.MonkeyPatch) -> list[ort.SessionOptions]:
    """Return the options with which native lanes open sessions."""
    seen: list[ort.SessionOptions] = []
    real = segment.NativeSession

    def record(model: bytes, given: ort.SessionOptions) -> Any:
        seen.append(given)
        return real(model, given)

    monkeypatch.setattr(segment, "NativeSession", record)
    return seen


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
def test_an_attribute_is_treated_as_the_table_says(name: str) -> None:
    """The session is cut or plain as the table says, with equal outputs."""
    assert CHANGED[name] != getattr(ort.SessionOptions(), name)
    check_session(lambda o: setattr(o, name, CHANGED[name]), SESSION_OPTIONS[name].treatment, name)


def test_every_attribute_is_tested() -> None:
    """The values above cover all attributes of the table."""
    attributes = {name for name in SESSION_OPTIONS if not callable(getattr(ort.SessionOptions(), name, print))}
    assert attributes == set(CHANGED)


@pytest.mark.parametrize("name", [name for name, option in SESSION_OPTIONS.items() if option.inherited])
def test_segments_inherit_an_attribute(name: str, native_options: list[ort.SessionOptions]) -> None:
    """Segments receive the attribute with native lanes and with lane threads."""
    with cut(chain(), options(lambda o: setattr(o, name, CHANGED[name]))) as session:
        found = [*segment_options(session), *native_options]
        assert len(found) > 1
        assert [getattr(o, name) for o in found] == [CHANGED[name]] * len(found)


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
        return SessionConfig("", given, accelerator, None, None, None, None, None).decision_key

    threads = options(lambda o: setattr(o, "intra_op_num_threads", 1))
    goals = [goal(None, "0"), goal(None, "1"), goal(options(), "0"), goal(threads, "0")]
    assert len(set(goals)) == len(goals)
    assert goal(options(), "0") == goals[2]


def test_the_baseline_has_the_callers_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the plain session that the caller would have created is a baseline."""
    seen: list[str] = []

    def compare(contenders: list[Any], *_: Any) -> Comparison:
        seen.extend(c.name for c in contenders if c.plain)
        return Comparison("plain", ())

    monkeypatch.setattr(choosing, "compare", compare)
    given = options(lambda o: setattr(o, "intra_op_num_threads", 2))
    with HybridSession(chain(), given, [CPU]) as session:
        assert seen == ["plain"]
        assert isinstance(session._engine, PlainEngine)
        assert session._engine.session.get_session_options().intra_op_num_threads == 2


@pytest.mark.parametrize(("threads", "cores", "lanes"), [(0, None, None), (1, None, 1), (64, None, None), (1, 2, 2)])
def test_plans_use_no_more_lanes_than_threads_are_allowed(
    monkeypatch: pytest.MonkeyPatch, threads: int, cores: int | None, lanes: int | None
) -> None:
    """``intra_op_num_threads`` limits the lanes unless ``cores`` is given, and the machine's cores limit both."""
    available = len(choosing.physical_cores())
    cores, lanes = cores and min(cores, available), min(64, available) if threads == 64 else lanes
    used_cores: list[int | None] = []
    measure = choosing.profile

    def profile(graph: Any, cores: int | None, *rest: Any) -> Any:
        used_cores.append(cores)
        return measure(graph, cores, *rest)

    monkeypatch.setattr(choosing, "profile", profile)
    with HybridSession(chain(), options(lambda o: setattr(o, "intra_op_num_threads", threads)), [CPU], cores=cores):
        assert used_cores == [lanes and min(lanes, available)]


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
        assert session._engines.config.strict
    with cut(chain(), enable_fallback=1) as session:
        assert not session._engines.config.strict


def test_arguments_that_onnxruntime_ignores_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """An unknown argument is ignored with a warning, since it may be a misspelt one of Chrion's."""
    plain(chain(), options(), unheard_of=1)
    with cut(chain(), unheard_of=1) as session:
        assert session.plan is not None
    assert "unheard_of" in caplog.text


def test_every_argument_is_in_the_table() -> None:
    """All arguments of InferenceSession are in the table, including those in its keyword arguments."""
    source = inspect.getsource(ort.InferenceSession.__init__)
    taken = set(re.findall(r"kwargs(?:\.get\(|\[)\"(\w+)\"", source))
    named = set(inspect.signature(ort.InferenceSession.__init__).parameters) - {"self", "kwargs"}
    assert taken | named == set(ARGUMENTS)
