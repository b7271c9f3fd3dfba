"""Profiles of this machine: signatures, caching, contention and an accelerator."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from chrion import Graph, load, partition, profile
from chrion.cores import physical_cores
from chrion.devices import providers
from chrion.errors import ModelError, OptionError, ProviderError, ShapeError
from chrion.profiler import measure_graph, operator_bench
from chrion.profiler.operator_bench import OperatorBench
from chrion.profiler.synthetic_inputs import synthetic_inputs
from chrion.profiler.weight_reload import measure_reload_ms_per_byte
from chrion.zoo import build
from helpers import BOOL, FLOAT, INT64, FakeInterferenceMonitor, branches, make_model, node, value


@pytest.fixture
def stack() -> Graph:
    """Return two layers over three steps: few signatures with several operators each."""
    return load(build("lstm", {"layers": 2, "seq": 3, "io": 4, "batch": 1}))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a cache folder for the test, and return it."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refuse(*_: object) -> None:
    raise AssertionError("measured again")


@pytest.mark.usefixtures("cache")
def test_each_signature_is_measured_once(stack: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal operators share a measurement, and progress counts signatures."""
    seen: list[int] = []
    original = measure_graph.measure_operators
    monkeypatch.setattr(measure_graph, "measure_operators", lambda e, i, *rest: seen.extend(i) or original(e, i, *rest))
    steps: list[tuple[int, int]] = []
    found = profile(stack, 1, progress=lambda done, total, _: steps.append((done, total)))
    distinct = set(stack.dag.signatures)
    assert len(seen) == len(distinct) < len(stack.dag)
    assert set(found.operators) == distinct
    assert steps == [(at + 1, len(distinct)) for at in range(len(distinct))]
    assert all(len(c.cpu_ms) == 1 and c.cpu_ms[0] > 0 for c in found.operators.values())
    assert found.missing(stack.dag) == ()


@pytest.mark.usefixtures("cache")
def test_measurements_are_cached(stack: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second profile is equal without new measurements; a fresh one measures again."""
    first = profile(stack, 1)
    with monkeypatch.context() as patch:
        patch.setattr(measure_graph, "measure_operators", refuse)
        assert profile(stack, 1).operators == first.operators
        with pytest.raises(AssertionError, match="measured again"):
            profile(stack, 1, fresh=True)
    with monkeypatch.context() as patch:
        patch.setattr(measure_graph, "OperatorBench", refuse)
        with pytest.raises(ModelError, match="none of its operators"):
            profile(stack, 1, fresh=True)
    assert set(profile(stack, 1, fresh=True).operators) == set(first.operators)


def test_damaged_measurements_are_measured_again(stack: Graph, cache: Path) -> None:
    """An empty or truncated file, another signature, and a negative time count as missing."""
    first = profile(stack, 1)
    files = sorted(cache.rglob("*.json"))
    assert len(files) == len(first.operators)
    good = files[0].read_text()
    for damage in ("", good[: len(good) // 2], "[]", good.replace('"signature": "', '"signature": "x'), "{}"):
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
    """For j busy cores the operator runs on the first j lanes at the same time."""
    measured_cores: list[tuple[int, ...]] = []

    def time(_: OperatorBench, cores: Sequence[int] = ()) -> list[float]:
        measured_cores.append(tuple(cores))
        return [float(len(cores))] * 3

    monkeypatch.setattr(OperatorBench, "time", time)
    core = physical_cores()[0]
    monkeypatch.setattr(measure_graph, "physical_cores", lambda: (core, core, core))
    graph = load(branches())
    found = profile(graph)
    assert found.cores == 3
    assert {c.cpu_ms for c in found.operators.values()} == {(1.0, 2.0, 3.0)}
    assert set(measured_cores) == {(core,), (core,) * 2, (core,) * 3}
    assert measured_cores[:3] == [(core,), (core,) * 2, (core,) * 3]


@pytest.mark.usefixtures("cache")
def test_many_cores_are_measured_for_some_numbers_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times for 5 to 7 and 9 to 11 busy cores lie between their neighbours'."""
    counts = set()

    def time(_: OperatorBench, cores: Sequence[int] = ()) -> list[float]:
        counts.add(len(cores))
        return [float(len(cores) ** 2)] * 3

    monkeypatch.setattr(OperatorBench, "time", time)
    monkeypatch.setattr(measure_graph, "physical_cores", lambda: physical_cores()[:1] * 12)
    [cpu_ms] = {cost.cpu_ms for cost in profile(load(branches())).operators.values()}
    assert counts == {1, 2, 3, 4, 8, 12}
    assert cpu_ms == pytest.approx([1, 4, 9, 16, 28, 40, 52, 64, 84, 104, 124, 144])


@pytest.mark.usefixtures("cache")
def test_measurements_under_interference_are_not_cached(stack: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are used, and measured again for the next profile."""
    with monkeypatch.context() as patch:
        patch.setattr(measure_graph, "UsageMonitor", lambda _: FakeInterferenceMonitor(interference_at=range(99)))
        assert set(profile(stack, 1).operators) == set(stack.dag.signatures)
    seen: list[int] = []
    original = measure_graph.measure_operators
    monkeypatch.setattr(measure_graph, "measure_operators", lambda e, i, *rest: seen.extend(i) or original(e, i, *rest))
    profile(stack, 1)
    assert len(seen) == len(set(stack.dag.signatures))
    profile(stack, 1)
    assert len(seen) == len(set(stack.dag.signatures))


def test_a_batch_is_limited_in_operators_and_in_bytes(stack: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """All operators are in one batch each, in order; an operator above the limit is measured alone."""
    everything = list(range(len(stack.dag)))
    monkeypatch.setattr(measure_graph, "_TOGETHER", 3)
    batches = list(measure_graph._batches(stack, everything))
    assert [len(batch) for batch in batches[:-1]] == [3] * (len(batches) - 1)
    monkeypatch.setattr(measure_graph, "_TOGETHER_BYTES", 1.0)
    assert list(measure_graph._batches(stack, everything)) == [[i] for i in everything]
    assert [i for batch in batches for i in batch] == everything
    assert list(measure_graph._batches(stack, [])) == []


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
        monkeypatch.setattr(operator_bench, "private_cache_bytes", lambda _, size=size: size)
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
    plan = partition(stack, found)
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
    monkeypatch.setattr(providers, "provider_name", lambda _: "CUDAExecutionProvider")
    monkeypatch.setattr(providers, "failure_reason", lambda _: "no driver")
    with pytest.raises(ProviderError, match="does not work on this machine: no driver") as caught:
        profile(stack, 1, "cuda")
    assert "chrion[cuda]" in caught.value.hint


def test_free_dimensions_are_refused() -> None:
    """The error names the free dimensions and the option that fixes them."""
    model = make_model([node("Relu", ["x"], ["y"])], [value("x", FLOAT, ["n", 2])], [value("y", FLOAT, ["n", 2])])
    with pytest.raises(ShapeError, match=r"x\[nx2\]") as caught:
        profile(load(model))
    assert "--shape x=" in caught.value.hint


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
