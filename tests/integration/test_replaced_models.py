"""A session, a graph and a generator answer from the file that they opened, whatever happens to it afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from chrion import Generator, Graph, HybridSession, load
from chrion.errors import ModelError
from chrion.scheduler import Plan, fixed_plan
from decoder_support import small_decoder
from helpers import FLOAT, alternating_lanes, assert_equal, make_model, node, run_plain, value
from random_plans import random_plan

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
Array = np.ndarray[Any, Any]


def branches(seed: int, *, shared: bool = False) -> onnx.ModelProto:
    """Build two products of ``x`` that are added, with random weights of 4 kB each, or one for both."""
    rng = np.random.default_rng(seed)
    weights = {name: rng.standard_normal((32, 32)).astype(np.float32) for name in ("w" if shared else "wv")}
    second = "w" if shared else "v"
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("Tanh", ["x"], ["t"]),
        node("MatMul", ["t", second], ["b"]),
        node("Add", ["a", "b"], ["y"]),
    ]
    return make_model(nodes, [value("x", FLOAT, [2, 32])], [value("y", FLOAT, [2, 32])], weights)


def cut(graph: Graph) -> Plan:
    """Return a plan of two lanes."""
    return fixed_plan(graph, alternating_lanes(graph))


def by_options(session: HybridSession) -> list[Array]:
    """Run with options."""
    return list(session.run(None, {"x": X}, ort.RunOptions()))


def by_foreign_binding(session: HybridSession) -> list[Array]:
    """Run with onnxruntime's own binding, which needs a session of the whole model."""
    binding = ort.IOBinding(session)
    binding.bind_cpu_input("x", X)
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    return list(binding.copy_outputs_to_cpu())


def by_crowd(session: HybridSession) -> list[Array]:
    """Run in eight threads, so that a session of one thread is opened; return an output that differs, or any."""
    found: list[Array] = []

    def call() -> None:
        found.extend(session.run(None, {"x": X})[0] for _ in range(20))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [next((output for output in found if not np.allclose(output, found[0], rtol=1e-4)), found[0])]


def by_providers(session: HybridSession) -> list[Array]:
    """Run after the providers were set, which opens all engines again."""
    session.set_providers(["CPUExecutionProvider"])
    return list(session.run(None, {"x": X}))


WAYS = (by_options, by_crowd, by_foreign_binding, by_providers)


def rename_over(path: Path) -> None:
    """Replace the file as deployments do."""
    onnx.save(branches(9), path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize("change", [rename_over, Path.unlink], ids=["renamed over", "deleted"])
@pytest.mark.parametrize("plan", [None, cut], ids=["plain", "cut"])
def test_a_session_answers_from_the_model_that_it_opened(
    plan: Callable[[Graph], Plan] | None, change: Callable[[Path], None], tmp_path: Path
) -> None:
    """All ways to call it have the old outputs, and ``explain`` tells that the file has changed."""
    path = tmp_path / "m.onnx"
    onnx.save(branches(0), path)
    expected = run_plain(branches(0), {"x": X})
    with HybridSession(path, plan=plan, tune="never") as session:
        assert_equal(session.run(None, {"x": X}), expected)
        change(path)
        for way in WAYS:
            assert_equal(way(session), expected)
        assert f"{path} has changed since the model was opened" in session.explain()


def test_a_session_of_a_relative_path_stays_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may change to a folder that has another file of that name."""
    (tmp_path / "other").mkdir()
    for folder, seed in ((tmp_path, 0), (tmp_path / "other", 9)):
        onnx.save(branches(seed), folder / "m.onnx")
    monkeypatch.chdir(tmp_path)
    expected = run_plain(branches(0), {"x": X})
    with HybridSession("m.onnx", plan=cut) as session:
        monkeypatch.chdir("other")
        for way in WAYS:
            assert_equal(way(session), expected)


def test_what_cannot_be_opened_again_is_an_error_and_the_plan_serves_on(tmp_path: Path) -> None:
    """Weights in another file that is replaced are lost: a session of the whole model is refused, with the reason."""
    path = tmp_path / "m.onnx"
    onnx.save(branches(0), path, save_as_external_data=True, location="weights", size_threshold=0)
    expected = run_plain(branches(0), {"x": X})
    with HybridSession(path, plan=cut) as session:
        onnx.save(branches(9), tmp_path / "n.onnx", save_as_external_data=True, location="new", size_threshold=0)
        (tmp_path / "new").replace(tmp_path / "weights")
        assert_equal(by_options(session), expected)
        assert_equal(by_crowd(session), expected)
        with pytest.raises(ModelError, match="cannot be opened again"):
            by_foreign_binding(session)
        assert_equal(by_options(session), expected)
        assert "the model cannot be opened again" in session.explain()


def test_a_graph_is_that_of_the_file_when_it_was_loaded(tmp_path: Path) -> None:
    """Plain sessions of a graph are opened from what it was loaded from."""
    path = tmp_path / "m.onnx"
    onnx.save(branches(0), path)
    graph = load(path)
    rename_over(path)
    for plan in (None, cut):
        with HybridSession(graph, plan=plan, tune="never") as session:
            assert_equal(by_foreign_binding(session), run_plain(branches(0), {"x": X}))


def test_a_generator_answers_from_the_file_that_it_opened(tmp_path: Path) -> None:
    """Texts after the file was replaced are those from before."""
    path = tmp_path / "decoder.onnx"
    onnx.save(small_decoder("gpt2-decoder", seed=1), path)
    with Generator(path) as generator:
        before = list(generator.submit([1, 2, 3], 8))
        onnx.save(small_decoder("gpt2-decoder", seed=2), tmp_path / "new.onnx")
        (tmp_path / "new.onnx").replace(path)
        assert list(generator.submit([1, 2, 3], 8)) == before


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_of_a_model_with_other_weights_gives_that_models_outputs(seed: int) -> None:
    """A retrained model may use the plan; one that shares weights where the other does not is another model."""
    plan = random_plan(load(branches(0)), pick=Random(seed))
    with HybridSession(branches(9), plan=plan, strict=True) as session:
        assert_equal(session.run(None, {"x": X}), run_plain(branches(9), {"x": X}))
    assert load(branches(0)).digest == load(branches(9)).digest
    assert load(branches(0)).digest != load(branches(0, shared=True)).digest
