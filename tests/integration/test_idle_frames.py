"""Idle frames: few are kept, and they keep no values of earlier requests alive."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from chrion import HybridSession, load
from chrion.runtime.execution import executor as executors
from chrion.runtime.execution.engine import CutEngine
from chrion.runtime.execution.executor import Executor
from chrion.scheduler import fixed_plan
from helpers import FLOAT, INT64, assert_equal, branches, cut_session, make_model, node, run_plain, value

pytestmark = [pytest.mark.timeout(120, method="thread"), pytest.mark.usefixtures("uncrowded")]
#: Width of :func:`branches` whose inputs and outputs are bound (600 kB), and of those that are copied.
LARGE, SMALL = 75_000, 4


def wide(width: int) -> onnx.ModelProto:
    """Build two operators of one input, for two lanes."""
    nodes = [node("Relu", ["x"], ["a"], name="left"), node("Neg", ["x"], ["b"], name="right")]
    nodes.append(node("Add", ["a", "b"], ["y"], name="sum"))
    return make_model(nodes, [value("x", FLOAT, [2, width])], [value("y", FLOAT, [2, width])])


def sized_by_data() -> onnx.ModelProto:
    """Build a model whose results have sizes that depend on the data."""
    nodes = [node("Relu", ["x"], ["a"]), node("NonZero", ["a"], ["y"]), node("Neg", ["x"], ["b"])]
    outputs = [value("y", INT64, [2, "n"]), value("b", FLOAT, [2, LARGE])]
    return make_model(nodes, [value("x", FLOAT, [2, LARGE])], outputs)


def session_of(model: onnx.ModelProto, lanes: str) -> HybridSession:
    """Return a session on CPU lanes, or one whose first lane is of an accelerator with the memory of the host."""
    if lanes == "cpu":
        return cut_session(model)
    graph = load(model)
    placement = [at % 2 for at in range(len(graph.dag))]
    return HybridSession(graph, plan=fixed_plan(graph, placement, accelerator="CPUExecutionProvider"))


def executor_of(session: HybridSession) -> Executor[Any]:
    """Return the executor that serves a session's requests."""
    engine = session._engine
    assert isinstance(engine, CutEngine)
    executor = engine._native or engine._python
    assert executor is not None
    return executor


def array(width: int) -> np.ndarray[Any, Any]:
    """Return an input."""
    return np.linspace(-1, 1, 2 * width, dtype=np.float32).reshape(2, width)


@pytest.mark.usefixtures("either_lanes")
@pytest.mark.parametrize("lanes", ["cpu", "accelerator"])
@pytest.mark.parametrize("model", [wide(LARGE), wide(SMALL), sized_by_data()], ids=["large", "small", "sized by data"])
def test_no_value_of_a_request_is_kept_alive(model: onnx.ModelProto, lanes: str) -> None:
    """Arrays and OrtValues that were passed in or out are freed when the caller has released them."""
    width = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    with session_of(model, lanes) as session:
        for _ in range(2):
            x = array(width)
            outputs = session.run(None, {"x": x})
            assert_equal(outputs, run_plain(model, {"x": x}))
            arrays = [weakref.ref(x), *map(weakref.ref, outputs)]
            given = ort.OrtValue.ortvalue_from_numpy(array(width))
            values = session.run_with_ort_values(None, {"x": given})
            refs = [weakref.ref(given), *map(weakref.ref, values)]
            binding = session.io_binding()
            target = ort.OrtValue.ortvalue_from_numpy(np.zeros_like(x))
            binding.bind_ortvalue_input("x", given)
            binding.bind_ortvalue_output(model.graph.output[-1].name, target)
            session.run_with_iobinding(binding)
            refs.append(weakref.ref(target))
            assert_equal([target.numpy()], run_plain(model, {"x": x})[-1:])
            del x, outputs, given, values, binding, target
            gc.collect()
            assert [ref() for ref in (*arrays, *refs)] == [None] * (len(arrays) + len(refs))


def run_together(session: HybridSession, monkeypatch: pytest.MonkeyPatch, count: int, width: int) -> None:
    """Serve requests that are all in flight at the same time."""
    executor, barrier = executor_of(session), threading.Barrier(count)
    perform = executor._perform

    def meet(*given: Any) -> None:
        barrier.wait(60)
        perform(*given)

    with monkeypatch.context() as patch:
        patch.setattr(executor, "_perform", meet)
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda _: session.run(None, {"x": array(width)}), range(count)))


@pytest.mark.usefixtures("either_lanes")
@pytest.mark.parametrize("lanes", ["cpu", "accelerator"])
def test_a_burst_leaves_few_frames(monkeypatch: pytest.MonkeyPatch, lanes: str) -> None:
    """After many requests in flight as many frames are kept as there are groups of lanes, or as many as are small."""
    with session_of(wide(LARGE), lanes) as session:
        executor = executor_of(session)
        monkeypatch.setattr(executors, "_IDLE_BYTES", 0)
        run_together(session, monkeypatch, 12, LARGE)
        assert len(executor._frames) == executor.capacity
        monkeypatch.setattr(executors, "_IDLE_BYTES", 2.5 * executor._frames[0].bytes)
        run_together(session, monkeypatch, 12, LARGE)
        assert len(executor._frames) == max(2, executor.capacity)
        assert 1e5 < executor._frames[0].bytes < 1e8
    with session_of(wide(SMALL), lanes) as session:
        run_together(session, monkeypatch, 20, SMALL)
        assert len(executor_of(session)._frames) == executors._IDLE_FRAMES


@pytest.mark.usefixtures("either_lanes")
def test_all_ways_of_passing_values_alternate() -> None:
    """A frame that was used with arrays, OrtValues and the caller's buffers gives right results with any of them."""
    rng = np.random.default_rng(0)
    for size in (SMALL, 600):
        model = branches(size=size)
        with cut_session(model) as session:
            for _ in range(12):
                x = rng.standard_normal((2, size)).astype(np.float32)
                expected = run_plain(model, {"x": x})
                given = ort.OrtValue.ortvalue_from_numpy(x)
                kind = rng.integers(3)
                if kind == 0:
                    found = session.run(None, {"x": x})
                elif kind == 1:
                    found = [o.numpy() for o in session.run_with_ort_values(None, {"x": given})]
                else:
                    targets = [ort.OrtValue.ortvalue_from_numpy(np.zeros_like(x)) for _ in expected]
                    binding = session.io_binding()
                    binding.bind_ortvalue_input("x", given)
                    for name, target in zip("yl", targets, strict=True):
                        binding.bind_ortvalue_output(name, target)
                    session.run_with_iobinding(binding)
                    found = [target.numpy() for target in targets]
                assert_equal(found, expected)
            assert len(executor_of(session)._frames) == 1
