"""Damaged models, which processes of their own load: none crashes or hangs."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
from hypothesis import given
from hypothesis import strategies as st

from chrion import load
from chrion.devices import CPU_PROVIDER
from chrion.errors import InputError, UnsafeModelError
from chrion.graph.opened_model import OpenedModel
from chrion.zoo import RecurrentSpec, build_recurrent
from damaged_files import damaged_bytes
from damaged_trees import damaged_trees
from helpers import branches
from property_tests import examples
from worker_processes import FailedJob, run_all

_MOST = 10_000
#: Values of inputs of each type, some of them equal to thresholds.
_VALUES = {
    "tensor(float)": np.array([0.5, -1.0, 3.0, np.nan, 0.0, 1.0, -3.0, np.inf, 2.0], np.float32),
    "tensor(string)": np.array(["Oslo", "Rome", "", "unseen"], object),
}


def recurrent() -> bytes:
    """Return a small model with weights, chunks and several layers."""
    return bytes(build_recurrent(RecurrentSpec(layers=2, batch=1, io=3, seq=4, chunk=2)).SerializeToString())


def read_model(content: bytes) -> str:
    """Load a model with limited memory and time; return an empty text if it is loaded, or refused in one line."""
    import resource  # noqa: PLC0415 - exists on Unix only

    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    try:
        graph = load(content)
        graph.digest  # noqa: B018 - reads the whole model
    except InputError as error:
        return "" if "\n" not in error.message else f"more than a line: {error}"
    except Exception as error:  # noqa: BLE001 - the test detects unexpected exceptions
        return f"{type(error).__name__}: {error}"
    return ""


def run_trees(seed: int) -> str:
    """Run damaged trees as a session with several threads does; return an empty text if they run or are refused."""
    import resource  # noqa: PLC0415 - exists on Unix only

    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    model = OpenedModel(damaged_trees(seed).SerializeToString())
    try:
        session = model.use(lambda content: ort.InferenceSession(content, options, [CPU_PROVIDER]))
        for rows in (1, 60, 1000):
            feed = {info.name: np.resize(_VALUES[info.type], (rows, info.shape[1])) for info in session.get_inputs()}
            if session.run(None, feed)[-1].size > _MOST:  # a million targets take any time
                break
    except UnsafeModelError as error:
        return "" if "\n" not in str(error) else f"more than a line: {error}"
    except Exception:  # noqa: BLE001 - onnxruntime refuses it
        return ""
    return ""


@examples(6)
@given(st.lists(st.integers(0, 2**32), min_size=40, max_size=40))
def test_damaged_trees(seeds: list[int]) -> None:
    """Damaged trees are refused in one line or run, on one row and on many; no process crashes or hangs."""
    wrong = {r.reason if isinstance(r, FailedJob) else r for _, r in run_all(run_trees, seeds, 2, timeout_s=20.0)}
    assert wrong <= {""}


@examples(6)
@given(st.lists(st.one_of(damaged_bytes(recurrent()), damaged_bytes(branches().SerializeToString())), min_size=25))
def test_damaged_models(contents: list[bytes]) -> None:
    """A damaged model is refused in one line or loaded; no process crashes or hangs."""
    wrong = {r.reason if isinstance(r, FailedJob) else r for _, r in run_all(read_model, contents, 2, timeout_s=60.0)}
    assert wrong <= {""}
