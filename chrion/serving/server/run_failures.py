"""What clients are told if the run of their request raised."""

from __future__ import annotations

from chrion.graph.ort_sessions import first_line
from chrion.serving.server.failures import RequestFailure, Status
from chrion.serving.server.sessions import is_out_of_memory
from chrion.serving.server.shared_arena import missing_bytes


def run_failure(model: str, error: BaseException, limit: int) -> RequestFailure:
    """Return the failure of a request.

    Args:
        model: The name of the model.
        error: What its run raised.
        limit: Memory of models and requests together, in bytes.
    """
    missing = missing_bytes(error)
    if missing is not None:
        text = f"model {model!r}: no memory for a value of {missing} bytes: models and requests have {limit}"
        fits = missing <= limit
        return RequestFailure(Status.OVERLOADED if fits else Status.TOO_LARGE, text, retry_s=1.0 if fits else None)
    text = f"model {model!r}: {first_line(error) or type(error).__name__}"
    if type(error).__name__ == "InvalidArgument":
        return RequestFailure(Status.INVALID, text)
    if is_out_of_memory(error):
        return RequestFailure(Status.UNAVAILABLE, text, retry_s=1.0)
    return RequestFailure(Status.INTERNAL, text)
