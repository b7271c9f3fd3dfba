"""Options of the plain session of one thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from chrion.graph.opened_model import OpenedModel
from chrion.runtime.selection.configuration import SessionConfig
from helpers import branches
from seams.machine import set_free_memory


def one_thread(
    options: ort.SessionOptions | None = None, *, arena: bool = True, **rest: Any
) -> ort.InferenceSession | None:
    """Return the one-thread session of a configuration."""
    model = OpenedModel(branches().SerializeToString())
    config = SessionConfig(model, options, rest.pop("providers", None), cores=2)
    engine = config.one_thread("for a test", arena=arena)
    return engine and engine.session


def options_of(session: ort.InferenceSession | None) -> ort.SessionOptions:
    """Return the options that a session was opened with."""
    assert session is not None
    return session.get_session_options()


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_the_callers_options_are_copied(threads: int) -> None:
    """All options but the number of threads are the caller's, whose own object is not changed."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.disable_prepacking", "1")
    found = options_of(one_thread(options))
    assert found.intra_op_num_threads == 1
    assert found.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert not found.enable_mem_pattern
    assert found.get_session_config_entry("session.disable_prepacking") == "1"
    assert options.intra_op_num_threads == threads
    assert options_of(one_thread()).intra_op_num_threads == 1


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("allowed", [True, False])
def test_the_memory_arena(*, wanted: bool, allowed: bool) -> None:
    """A session has an arena if both the caller's options and the argument allow one."""
    options = ort.SessionOptions()
    options.enable_cpu_mem_arena = wanted
    assert options_of(one_thread(options, arena=allowed)).enable_cpu_mem_arena is (wanted and allowed)
    assert options.enable_cpu_mem_arena is wanted
    assert options_of(one_thread(arena=allowed)).enable_cpu_mem_arena is allowed


@pytest.mark.parametrize(("own", "entry", "expected"), [(True, "0", True), (False, "0", False), (True, "1", False)])
def test_an_arena_of_its_own(entry: str, *, own: bool, expected: bool) -> None:
    """A session without an arena, or with allocators of the environment, has none that could be avoided."""
    options = ort.SessionOptions()
    options.enable_cpu_mem_arena = own
    options.add_session_config_entry("session.use_env_allocators", entry)
    model = OpenedModel(branches().SerializeToString())
    assert SessionConfig(model, options, cores=2).has_arena is expected
    assert SessionConfig(model, cores=2).has_arena


def test_options_that_cannot_be_copied(tmp_path: Path) -> None:
    """With added initialisers, which Python cannot read, or a file that each session writes, there is none."""
    replaced = ort.SessionOptions()
    weight = ort.OrtValue.ortvalue_from_numpy(np.zeros((4, 4), np.float32))
    replaced.add_initializer("w", weight)
    assert one_thread(replaced) is None
    written = ort.SessionOptions()
    written.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    assert one_thread(written) is None
    assert not list(tmp_path.iterdir())


def test_an_accelerator() -> None:
    """A session on an accelerator has no second session on the CPU."""
    assert one_thread(providers=["WebGpuExecutionProvider"]) is None


@pytest.mark.parametrize(("factor", "expected"), [(15, False), (17, True)])
def test_the_free_memory(monkeypatch: pytest.MonkeyPatch, factor: int, *, expected: bool) -> None:
    """The model may take a sixteenth of the free memory."""
    size = len(branches().SerializeToString())
    set_free_memory(monkeypatch, factor * size)
    assert (one_thread() is not None) is expected
