"""Damaged models, which processes of their own load: none crashes or hangs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chrion import load
from chrion.errors import InputError
from chrion.zoo import RecurrentSpec, build_recurrent
from damaged_files import damaged_bytes
from helpers import branches
from property_tests import examples
from worker_processes import FailedJob, run_all


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


@examples(6)
@given(st.lists(st.one_of(damaged_bytes(recurrent()), damaged_bytes(branches().SerializeToString())), min_size=25))
def test_damaged_models(contents: list[bytes]) -> None:
    """A damaged model is refused in one line or loaded; no process crashes or hangs."""
    wrong = {r.reason if isinstance(r, FailedJob) else r for _, r in run_all(read_model, contents, 2, timeout_s=60.0)}
    assert wrong <= {""}
