"""Tests of the options of a request on a cut session: honoured by every segment, or the request runs plain."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument

from chrion import HybridSession
from chrion.native import available
from chrion.runtime.options.session_options import (
    RUN_OPTIONS,
    UNSUPPORTED_ACCELERATOR_RUN_KEYS,
    UNSUPPORTED_RUN_KEYS,
    run_reason,
)
from chrion.runtime.options.terminable import TerminableRunOptions
from helpers import FLOAT, assert_equal, make_model, node, value
from option_cases import (
    DOUBLED,
    FEED,
    assert_same_outcome,
    chain,
    cut,
    doubled,
    options,
    ort_value,
    outcome,
    plain,
)
from seams.execution import Call, note


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty folder, in which files that a session writes appear."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Run options.


def run_options(change: Callable[[ort.RunOptions], object]) -> ort.RunOptions:
    """Return run options with a change applied."""
    made = ort.RunOptions()
    change(made)
    return made


#: A change of each readable run option except ``terminate``.
RUN_CHANGES: Mapping[str, Callable[[ort.RunOptions], object]] = {
    "log_severity_level": lambda o: setattr(o, "log_severity_level", 4),
    "log_verbosity_level": lambda o: setattr(o, "log_verbosity_level", 1),
    "logid": lambda o: setattr(o, "logid", "mine"),
    "only_execute_path_to_fetches": lambda o: setattr(o, "only_execute_path_to_fetches", True),
}


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Return the list of requests that run on the plan."""
    return note(monkeypatch, "run a plan")


def given_to(requests: list[Call]) -> list[ort.RunOptions | None]:
    """Return the run options of requests."""
    return [call.options.get("run_options") for call in requests]


@pytest.mark.parametrize("name", RUN_CHANGES)
def test_a_run_option_is_treated_as_listed(name: str, requests: list[Call]) -> None:
    """The request runs on the segments or plain as listed, whichever method makes it."""
    given = run_options(RUN_CHANGES[name])
    expected = plain(chain(), options()).run(None, FEED)
    with cut(chain()) as session:
        assert_equal(session.run(None, FEED, given), expected)
        values = session.run_with_ort_values(None, {"x": ort_value(FEED["x"])}, given)
        assert_equal([v.numpy() for v in values], expected)
        binding = session.io_binding()
        binding.bind_cpu_input("x", FEED["x"])
        binding.bind_output("y")
        session.run_with_iobinding(binding, given)
        assert_equal(binding.copy_outputs_to_cpu(), expected)
        assert given_to(requests) == ([given] * 3 if name in RUN_OPTIONS else [])
        assert session.plan is not None


@pytest.mark.parametrize("key", [*UNSUPPORTED_RUN_KEYS, *UNSUPPORTED_ACCELERATOR_RUN_KEYS])
def test_a_run_key_is_treated_as_listed(key: str, requests: list[Call]) -> None:
    """On the CPU, keys for accelerators have no effect; with an accelerator, the request runs plain, and only that."""
    given = run_options(lambda o: o.add_run_config_entry(key, "cpu:0" if key.startswith("memory") else "1"))
    with cut(chain()) as session:
        assert_equal(session.run(None, FEED, given), plain(chain(), options()).run(None, FEED, given))
        assert session.plan is not None
    assert given_to(requests) == ([given] if key in UNSUPPORTED_ACCELERATOR_RUN_KEYS else [])
    assert repr(key) in run_reason(given, accelerated=True)


def test_memory_arenas_of_other_devices_raise_onnxruntimes_exception() -> None:
    """The request runs plain and raises InferenceSession's exception."""
    given = run_options(lambda o: o.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0;gpu:0"))
    with cut(chain()) as session:
        ours = outcome(lambda: session.run(None, FEED, given))
    assert_same_outcome(ours, outcome(lambda: plain(chain(), options()).run(None, FEED, given)))


@pytest.mark.parametrize("own", [False, True])
def test_a_running_request_can_be_terminated(*, own: bool) -> None:
    """Another thread terminates a request, also on native lanes, and the next request succeeds."""
    size = 200
    names = ["x", *(f"v{at}" for at in range(99)), "y"]
    nodes = [node("MatMul", [a, "w"], [b], name=b) for a, b in itertools.pairwise(names)]
    ends = [value(name, FLOAT, [size, size]) for name in "xy"]
    model = make_model(nodes, ends[:1], ends[1:], {"w": np.eye(size, dtype=np.float32)})
    feed = {"x": np.ones((size, size), np.float32)}
    given = TerminableRunOptions() if own else ort.RunOptions()
    begun = threading.Event()

    def terminate() -> None:
        begun.wait()
        if isinstance(given, TerminableRunOptions):
            given.end()
        else:
            given.terminate = True

    def repeat(session: HybridSession) -> None:
        begun.set()  # the other thread continues when a request has released the GIL
        while True:
            session.run(None, feed, given)

    thread = threading.Thread(target=terminate)
    thread.start()
    with cut(model) as session:
        session.run(None, feed, given)
        with pytest.raises(Fail, match="terminate"):
            repeat(session)
        thread.join()
        assert_equal(session.run(None, feed), [feed["x"]])


@pytest.mark.skipif(not available(), reason="lanes are not compiled here")
@pytest.mark.parametrize("names", [None, ["y"]])
def test_requests_that_can_be_terminated_stay_on_native_lanes(names: list[str] | None) -> None:
    """They start no lane threads and open no further sessions, and one that was ended before does not begin."""
    with cut(chain()) as session:
        before = threading.active_count()
        assert_equal(session.run(names, FEED, TerminableRunOptions()), session.run(names, FEED))
        ended = TerminableRunOptions()
        ended.end()
        with pytest.raises(Fail, match="terminate"):
            session.run(names, FEED, ended)
        assert session.plan is not None
        assert_equal(session.run(names, FEED, TerminableRunOptions()), session.run(names, FEED))
        assert threading.active_count() == before


@pytest.fixture
def adapter(folder: Path) -> Iterator[ort.RunOptions]:
    """Yield run options with an active adapter that replaces the weight; they only refer to the adapter."""
    made = ort.AdapterFormat()
    made.set_adapter_version(1)
    made.set_model_version(1)
    made.set_parameters({"w": doubled()})
    made.export_adapter(str(folder / "adapter"))
    loaded = ort.LoraAdapter()
    loaded.Load(str(folder / "adapter"))
    given = ort.RunOptions()
    given.add_active_adapter(loaded)
    yield given
    del loaded


def test_an_adapter_gives_its_weights(adapter: ort.RunOptions, requests: list[Call]) -> None:
    """A request with an adapter runs plain with the adapter's weights, and the next one runs on the segments."""
    model = chain()
    model.graph.input.append(value("w", FLOAT, [4, 4]))
    with cut(model) as session:
        (found,) = session.run(None, FEED, adapter)
        assert requests == []
        assert_equal([found], plain(model, options()).run(None, FEED | {"w": DOUBLED}))
        assert_equal(session.run(None, FEED), plain(model, options()).run(None, FEED))
        assert len(requests) == 1


def test_an_adapter_for_another_model_is_refused(adapter: ort.RunOptions) -> None:
    """An adapter for another model is refused as by InferenceSession."""
    with cut(chain()) as session:
        for either in (session, plain(chain(), options())):
            with pytest.raises(InvalidArgument, match="w"):
                either.run(None, FEED, adapter)


def test_every_run_option_is_tested() -> None:
    """The changes above cover all run options."""
    members = {name for name in dir(ort.RunOptions) if not name.startswith("_")}
    methods = {name for name in members if callable(getattr(ort.RunOptions, name))}
    assert methods == {"add_active_adapter", "add_run_config_entry", "get_run_config_entry"}
    assert members - methods == {*RUN_CHANGES, "terminate"}
