"""Profiles of this machine: signatures, caching, contention and an accelerator."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest

from chrion import Graph, Profile, load, partition, profile
from chrion.errors import ModelError, OptionError, ProviderError, ShapeError
from chrion.machine.cores import physical_cores
from chrion.profiler import measure_graph
from chrion.profiler.operator_bench import OperatorBench
from chrion.profiler.overheads import measure_reload_ms_per_byte
from chrion.profiler.plain_latency import measure_plain_latency
from chrion.profiler.synthetic_inputs import synthetic_inputs
from helpers import BOOL, FLOAT, INT64, branches, make_model, node, value
from seams.execution import answer, fail_provider, interfere_at, simulate_cores


@pytest.fixture(scope="module")
def stack() -> Graph:
    """Return four products and activations in turn: few signatures with several operators each."""
    nodes = []
    for at in range(4):
        nodes += [node("MatMul", [f"x{at}", "w"], [f"y{at}"]), node("Tanh", [f"y{at}"], [f"x{at + 1}"])]
    return load(
        make_model(
            nodes, [value("x0", FLOAT, [1, 4])], [value("x4", FLOAT, [1, 4])], {"w": np.eye(4, dtype=np.float32)}
        )
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a cache folder for the test, and return it."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured() -> list[tuple[int, int]]:
    """Return a list that :func:`measure` extends by the progress of each measurement."""
    return []


@pytest.fixture
def measure(stack: Graph, measured: list[tuple[int, int]]) -> Callable[..., Profile]:
    """Return a function that profiles the stack on one core."""
    return partial(profile, stack, 1, progress=lambda done, total, _: measured.append((done, total)))


@pytest.mark.usefixtures("cache")
def test_each_signature_is_measured_once(
    stack: Graph, measure: Callable[..., Profile], measured: list[tuple[int, int]]
) -> None:
    """Equal operators share a measurement, which the cache keeps; a fresh profile measures again."""
    found = measure()
    distinct = set(stack.dag.signatures)
    assert len(distinct) < len(stack.dag)
    assert set(found.operators) == distinct
    assert measured == [(at + 1, len(distinct)) for at in range(len(distinct))]
    assert all(len(c.cpu_ms) == 1 and c.cpu_ms[0] > 0 for c in found.operators.values())
    assert found.missing(stack.dag) == ()
    assert measure().operators == found.operators
    assert len(measured) == len(distinct)
    assert set(measure(fresh=True).operators) == distinct
    assert measured[len(distinct) :] == measured[: len(distinct)]


@pytest.mark.usefixtures("cache")
def test_a_profile_without_any_operator_is_refused() -> None:
    """A single operator that rejects synthetic inputs leaves nothing that its costs could be estimated from."""
    inputs = [value("x", FLOAT, [2, 4]), value("shape", INT64, [1])]
    graph = load(make_model([node("Reshape", ["x", "shape"], ["y"])], inputs, [value("y", FLOAT, [8])]))
    with pytest.raises(ModelError, match="none of its operators"):
        profile(graph, 1)


@pytest.mark.usefixtures("cache")
def test_operators_on_texts_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """No operator runs alone whose inputs are texts: the log says so, others are measured."""
    nodes = [node("Cast", ["text"], ["y"], name="parse", to=FLOAT), node("Tanh", ["x"], ["z"])]
    inputs = [value("text", onnx.TensorProto.STRING, [4]), value("x", FLOAT, [4])]
    graph = load(make_model(nodes, inputs, [value("y", FLOAT, [4]), value("z", FLOAT, [4])]))
    assert [cost.op_type for cost in profile(graph, 1).operators.values()] == ["Tanh"]
    assert "operator parse is not measured: its inputs are texts" in caplog.text


def test_damaged_measurements_are_measured_again(stack: Graph, cache: Path) -> None:
    """A truncated file, other content, and another signature count as missing."""
    first = profile(stack, 1)
    files = sorted(cache.rglob("*.json"))
    assert len(files) == len(first.operators)
    good = files[0].read_text()
    for damage in (good[: len(good) // 2], "[]", good.replace('"signature": "', '"signature": "x')):
        for file in files:
            file.write_text(damage)
        again = profile(stack, 1)
        assert set(again.operators) == set(first.operators)
        assert files[0].read_text() != damage


def test_a_cache_that_cannot_be_written_is_ignored(
    stack: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring succeeds if a file is in the place of the measurements' folder."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path))
    (tmp_path / "measurements").touch()
    assert set(profile(stack, 1).operators) == set(stack.dag.signatures)


@pytest.mark.usefixtures("cache")
def test_contention_is_measured_with_as_many_threads_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """For j busy cores the operator runs on the first j lanes at the same time.

    Times for 5 to 7 and 9 to 11 busy cores lie between their neighbours'.
    """
    core = physical_cores()[0]
    busy = simulate_cores(monkeypatch, [core] * 12, lambda count: float(count**2))
    found = profile(load(branches()))
    assert found.cores == 12
    assert list(dict.fromkeys(busy)) == [(core,) * count for count in (1, 2, 3, 4, 8, 12)]
    [cpu_ms] = {cost.cpu_ms for cost in found.operators.values()}
    assert cpu_ms == pytest.approx([1, 4, 9, 16, 28, 40, 52, 64, 84, 104, 124, 144])


@pytest.mark.usefixtures("cache")
def test_measurements_under_interference_are_not_cached(
    stack: Graph,
    measure: Callable[..., Profile],
    measured: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are used, and measured again for the next profile."""
    count = len(set(stack.dag.signatures))
    with monkeypatch.context() as patch:
        interfere_at(patch, range(99))
        disturbed = measure()
    assert set(disturbed.operators) == set(stack.dag.signatures)
    assert disturbed.interference
    for _ in range(2):
        assert not measure().interference
        assert len(measured) == 2 * count


def test_a_brief_profile_takes_cpu_times_and_caches_none(
    stack: Graph, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has costs of all operators, equal for all numbers of cores, and near those of a whole profile."""
    with monkeypatch.context() as patch:
        patch.setattr(measure_graph, "UsageMonitor", None)  # looks for other processes on all cores
        brief = profile(stack, brief=True)
    assert not list(cache.rglob("*.json"))
    whole = profile(stack, fresh=True)
    assert brief.operators.keys() == whole.operators.keys()
    for signature, cost in brief.operators.items():
        assert cost.cpu_ms == cost.cpu_ms[:1] * brief.cores
        assert 0.1 < cost.cpu_ms[0] / whole.operators[signature].cpu_ms[0] < 10
    assert brief.interference
    assert brief.handoff_ms > 0
    assert partition(stack, brief).predicted.latency_ms > 0


def test_a_batch_is_limited_in_operators_and_in_bytes(stack: Graph) -> None:
    """All operators are in one batch each, in order; an operator above the limit is measured alone."""
    everything = list(range(len(stack.dag)))
    found = list(measure_graph.batches(stack, everything, max_count=3))
    assert [len(batch) for batch in found[:-1]] == [3] * (len(found) - 1)
    assert [i for batch in found for i in batch] == everything
    assert list(measure_graph.batches(stack, everything, max_bytes=1.0)) == [[i] for i in everything]
    assert list(measure_graph.batches(stack, [])) == []


def test_threads_on_all_cores_time_one_operator() -> None:
    """The threads are real and pinned, and end afterwards."""
    graph = load(branches())
    bench = OperatorBench(measure_graph.Extractor(graph), 0, {})
    before = threading.active_count()
    times_ms = bench.time([physical_cores()[0]] * 3)
    assert len(times_ms) >= 3
    assert min(times_ms) > 0
    assert threading.active_count() == before
    assert bench.copies > 1  # a small operator is measured with several copies


def test_sessions_end_with_their_bench(stack: Graph) -> None:
    """They are not part of a cycle, in which those of many operators would stay open."""
    bench = OperatorBench(measure_graph.Extractor(stack), 0, {})
    bench.time_wide([0])
    alive = weakref.ref(bench)
    gc.disable()
    try:
        del bench
        assert alive() is None
    finally:
        gc.enable()


def test_the_time_of_a_weight_reload_is_measured() -> None:
    """The measured time is below 10 ns per byte, and zero without a known cache size."""
    cores = physical_cores()
    assert 0 <= measure_reload_ms_per_byte(cores, 1 << 20) < 1e-5
    assert measure_reload_ms_per_byte(cores, 0) == 0.0


@pytest.mark.usefixtures("cache")
def test_the_weights_of_all_copies_fit_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """All copies together take at most half of the cache; if one copy is too large, it is timed alone."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(64, 64)).astype(np.float32)}
    product = make_model(
        [node("MatMul", ["x", "w"], ["y"])], [value("x", FLOAT, [1, 64])], [value("y", FLOAT, [1, 64])], weights
    )
    copies = {}
    for size in (1 << 30, 1 << 17, 1 << 12, 0):
        answer(monkeypatch, "find the size of a cache", size)
        copies[size] = OperatorBench(measure_graph.Extractor(load(product)), 0, {}).copies
    assert copies[1 << 17] == 4  # of 16 KiB each
    assert copies[1 << 12] == 1
    assert copies[1 << 30] > 4
    assert copies[0] > 4


@pytest.mark.usefixtures("cache")
def test_any_provider_may_be_the_accelerator(stack: Graph) -> None:
    """The provider is given by its short name; the profile has its times and copies, and a plan can use it."""
    found = profile(stack, 1, "cpu")
    assert found.accelerator == found.machine.accelerator == "CPUExecutionProvider"
    assert all(c.accelerator_ms is not None and c.accelerator_ms > 0 for c in found.operators.values())
    assert found.upload.latency_ms == found.download.latency_ms == found.handoff_ms
    plan = partition(stack, found, policy="heft")
    assert plan.accelerator_only is not None
    assert plan.cpu_only is not None
    assert profile(stack, 1, "none").accelerator is None


@pytest.mark.parametrize(
    ("cores", "accelerator", "error"),
    [
        (0, None, OptionError),
        (-1, None, OptionError),
        (10_000, None, OptionError),
        (None, "abacus", ProviderError),
    ],
)
def test_missing_cores_and_providers_are_refused(
    stack: Graph, cores: int | None, accelerator: str | None, error: type[Exception]
) -> None:
    """Too many cores and an unknown provider raise errors."""
    with pytest.raises(error, match=r"cores|accelerator"):
        profile(stack, cores, accelerator)


def test_a_broken_accelerator_is_an_error_with_its_reason(stack: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """For CUDA the hint has the command that installs its libraries."""
    fail_provider(monkeypatch, "no driver")
    with pytest.raises(ProviderError, match="does not work on this machine: no driver") as caught:
        profile(stack, 1, "cuda")
    assert "chrion[cuda]" in caught.value.hint


@pytest.mark.usefixtures("cache")
def test_the_plain_session_is_measured_unless_it_cannot_run(stack: Graph) -> None:
    """The fastest number of threads and its latency are stored by the digest of the graph."""
    [(digest, latency)] = profile(stack, 2).plain.items()
    assert digest == stack.digest
    assert latency.threads in {1, 2}
    assert 0 < latency.latency_ms < 1000
    assert profile(stack, 2, plain=False).plain == {}
    positive = [node("Gather", ["x", "i"], ["y"])]  # synthetic indices are zeros, which an empty table does not have
    empty = load(make_model(positive, [value("x", FLOAT, [0, 2]), value("i", INT64, [1])], [value("y", FLOAT, [1, 2])]))
    assert measure_plain_latency(empty, 2) is None


def test_free_dimensions_are_refused() -> None:
    """The error names the free dimensions, and the options and the argument that fix those that are still free."""
    inputs = [value("a", FLOAT, ["n", "m m"]), value("b", FLOAT, [None, 2])]
    nodes = [node("Relu", ["a"], ["y"]), node("Relu", ["b"], ["z"])]
    model = make_model(nodes, inputs, [value("y", FLOAT, None), value("z", FLOAT, None)])
    with pytest.raises(ShapeError, match=r"a\[n x m m\], b\[\?x2\]") as caught:
        profile(load(model))
    options, python = caught.value.hint.split("; ")
    assert options == "fix them, for example with --shape n=1 --shape 'm m=1' --shape b=1x2"
    assert python == "in Python, load(MODEL, shapes={'n': 1, 'm m': 1, 'b': (1, 2)})"
    assert not load(model, {"n": 1, "m m": 1, "b": (1, 2)}).free_dimensions
    with pytest.raises(ShapeError) as caught:
        profile(load(model, {"n": 3, "b": [3, 2]}))
    assert caught.value.hint.split("; ")[0] == "fix them, for example with --shape 'm m=1'"


@pytest.mark.usefixtures("cache")
def test_integer_inputs_are_taken_from_a_run() -> None:
    """Indices that the model computes are in range, unlike synthetic ones."""
    nodes = [node("ArgMax", ["x"], ["i"], axis=1, keepdims=0), node("Gather", ["x", "i"], ["y"], axis=1)]
    graph = load(make_model(nodes, [value("x", FLOAT, [2, 4])], [value("y", FLOAT, [2, 2])]))
    feeds = measure_graph.captured_inputs(graph, measure_graph.Extractor(graph), [0, 1])
    assert feeds["i"].dtype == np.int64
    assert feeds["i"].shape == (2,)
    assert profile(graph, 1).missing(graph.dag) == ()


@pytest.mark.usefixtures("cache")
def test_inputs_without_synthetic_values_are_an_error() -> None:
    """A sequence has no synthetic array, which is an error."""
    info = onnx.helper.make_tensor_sequence_value_info("s", FLOAT, None)
    nodes = [node("SequenceAt", ["s", "i"], ["v"]), node("Relu", ["v"], ["y"])]
    graph = load(make_model(nodes, [info, value("i", INT64, [])], [value("y", FLOAT, None)]))
    with pytest.raises(ModelError):
        profile(graph, 1)


def test_synthetic_inputs_fit_the_model() -> None:
    """Synthetic arrays have each input's type and shape, and equal seeds give equal values."""
    inputs = [value("x", FLOAT, [2, 3]), value("i", INT64, [0]), value("b", BOOL, [])]
    nodes = [node("Identity", [i.name], ["o" + i.name]) for i in inputs]
    graph = load(make_model(nodes, inputs, [value("o" + i.name, i.type.tensor_type.elem_type, None) for i in inputs]))
    feed = synthetic_inputs(graph)
    assert {n: (a.dtype.name, a.shape) for n, a in feed.items()} == {
        "x": ("float32", (2, 3)),
        "i": ("int64", (0,)),
        "b": ("bool", ()),
    }
    np.testing.assert_array_equal(feed["x"], synthetic_inputs(graph)["x"])
    assert not np.array_equal(feed["x"], synthetic_inputs(graph, 1)["x"])
