"""Idle frames: few are kept, and they keep no values of earlier requests alive."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from chrion import HybridSession, load
from chrion.scheduler import fixed_plan
from helpers import FLOAT, INT64, assert_equal, branches, cut_session, make_model, node, run_plain, value
from seams.execution import around, cut_engine, executor_of, idle_frames

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
            assert [ref() for ref in (*arrays, *refs)] == [None] * (len(arrays) + len(refs))


def run_together(session: HybridSession, count: int, width: int) -> deque[Any]:
    """Serve requests that are all in flight at the same time, and return the idle frames after them."""
    barrier = threading.Barrier(count)

    def meet(lease: Callable[..., Any], *given: Any) -> Any:
        barrier.wait(60)
        return lease(*given)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(count) as pool:
        around(patch, "lease lanes", meet)
        list(pool.map(lambda _: session.run(None, {"x": array(width)}), range(count)))
    return idle_frames(executor_of(session))


@pytest.mark.usefixtures("either_lanes")
@pytest.mark.parametrize("lanes", ["cpu", "accelerator"])
def test_a_burst_leaves_few_frames(lanes: str) -> None:
    """At most 16 frames of 32 MB together are kept after a burst, and always one for each group of lanes."""
    for width, count, kept in ((SMALL, 20, 16), (800_000, 4, 2), (2_100_000, 2, 0)):
        with session_of(wide(width), lanes) as session:
            frames = run_together(session, count, width)
            assert len(frames) == max(kept, cut_engine(session).capacity)
            assert 2 * 2 * width * 4 <= frames[0].bytes < 1e8
    assert frames[0].bytes > 32e6


@pytest.mark.usefixtures("either_lanes")
def test_all_ways_of_passing_values_alternate() -> None:
    """A frame that was used with arrays, OrtValues and the caller's buffers gives right results with any of them."""
    rng = np.random.default_rng(0)
    for size in (SMALL, 600):
        model = branches(size=size)
        with cut_session(model) as session:
            for _ in range(8):
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
            assert len(idle_frames(executor_of(session))) == 1
