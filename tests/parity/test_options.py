"""Tests of every configuration key of onnxruntime on a cut session: honoured, run plain, or without effect."""

from __future__ import annotations

import re
from pathlib import Path

import onnxruntime as ort
import pytest

from chrion.runtime.options.session_options import (
    BASELINE_KEYS,
    INHERITED_KEYS,
    UNSUPPORTED_ACCELERATOR_RUN_KEYS,
    UNSUPPORTED_KEYS,
    UNSUPPORTED_RUN_KEYS,
)
from option_cases import check_key

#: Keys without an effect on a session: onnxruntime reports a session option under these, and ignores what is set.
REPORTED = {
    "session.enable_cpu_mem_arena",
    "session.enable_mem_pattern",
    "session.enable_profiling",
    "session.execution_mode",
    "session.graph_optimization_level",
    "session.inter_op_num_threads",
    "session.intra_op_num_threads",
    "session.log_id",
    "session.log_severity_level",
    "session.log_verbosity_level",
    "session.optimized_model_filepath",
    "session.use_deterministic_compute",
    "session.use_per_session_threads",
}
#: Keys with an effect only together with another option, or with a model format, that makes the model run plain.
DEPENDENT = {
    "session.enable_saved_runtime_optimizations",
    "session.optimized_model_external_initializers_file_name",
    "session.optimized_model_external_initializers_min_size_in_bytes",
    "session.save_external_prepacked_constant_initializers",
    "session.save_model_format",
    "session.use_external_initializer_file_buffers_directly",
    "session.use_memory_mapped_ort_model",
    "session.use_ort_model_bytes_directly",
    "session.use_ort_model_bytes_for_initializers",
}
SESSION_KEYS = {*INHERITED_KEYS, *BASELINE_KEYS, *UNSUPPORTED_KEYS, *REPORTED, *DEPENDENT}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to an empty folder, in which files that a session writes appear."""
    monkeypatch.chdir(tmp_path)


def test_every_key_in_the_library_is_listed() -> None:
    """All configuration keys in the texts of the installed library are listed."""
    capi = Path(ort.__file__).parent / "capi"
    (library,) = [*capi.glob("onnxruntime_pybind11_state*.so"), *capi.glob("onnxruntime_pybind11_state*.pyd")]
    areas = b"session|optimization|ep|mlas|memory|qnn"
    found = re.findall(rb"\0((?:%s)\.[a-z][a-zA-Z0-9_.]+[a-zA-Z0-9])(?=\0)" % areas, library.read_bytes())
    assert len(found) > 50
    run_keys = {*UNSUPPORTED_RUN_KEYS, *UNSUPPORTED_ACCELERATOR_RUN_KEYS}
    assert {key.decode() for key in found} - SESSION_KEYS - run_keys == set()


@pytest.mark.parametrize("key", sorted(SESSION_KEYS))
def test_a_session_key_is_treated_as_listed(key: str) -> None:
    """The session is cut or plain as listed, with equal outputs, and cut with the key's default."""
    check_key(key)
