"""The trial of a version: one run of its new session, with synthetic inputs, before requests get it.

A failure rejects the version if memory was short, or if the synthetic inputs cannot be the cause. They can be if a
dimension is free, since sizes may depend on each other, or if an input is no float, since it may be an index, a shape
or a text that the model looks up. Such a model is ready once it has opened, and its requests report what fails.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import numpy as np

from chrion.graph.ort_sessions import first_line
from chrion.runtime.options.terminable import TerminableRunOptions
from chrion.serving.server.repository import ServedVersion
from chrion.serving.server.sessions import Session, is_out_of_memory
from chrion.serving.server.tensors import DTYPES, Array, TensorSpec

log = logging.getLogger("chrion.server")

#: Time after which a run is ended; the model is ready then, since a slow one is no damaged one. It delays the loads of
#: other models.
_MAX_S = 10.0
#: Bytes of inputs up to which there is a run: larger ones could exceed the memory that requests have.
_MAX_BYTES = 1 << 28


def synthetic_input(datatype: str, shape: Sequence[int]) -> Array:
    """Return an input; free dimensions have size 1, floats are random, and integers are 0, which is a valid index."""
    sizes = [1 if size < 0 else size for size in shape]
    if datatype == "BYTES":
        return np.full(sizes, "a", object)
    if datatype.startswith("FP"):
        return np.random.default_rng(0).random(sizes).astype(DTYPES[datatype])
    return np.zeros(sizes, DTYPES[datatype])


def try_session(session: Session, version: ServedVersion) -> None:
    """Run a session of a version once.

    Raises:
        Exception: As onnxruntime raises it, if it rejects the version.
    """
    if sum(_bytes(spec) for spec in version.inputs) > _MAX_BYTES:
        return
    options = TerminableRunOptions()
    timer = threading.Timer(_MAX_S, options.end)
    timer.daemon = True
    timer.start()
    try:
        arrays = {spec.name: synthetic_input(spec.datatype, spec.shape or ()) for spec in version.inputs}
        feeds = {spec.name: (spec.datatype, arrays[spec.name]) for spec in version.inputs}
        session.run(version.outputs, feeds, options)
    except Exception as error:
        if is_out_of_memory(error) or (not options.terminate and all(map(_is_certain, version.inputs))):
            raise
        fields = {"model": version.name, "version": version.version, "reason": first_line(error)}
        log.info("the trial with synthetic inputs says nothing", extra={"fields": fields})
    finally:
        timer.cancel()


def _bytes(spec: TensorSpec) -> int:
    return int(np.prod([max(1, size) for size in spec.shape or ()], dtype=object)) * DTYPES[spec.datatype].itemsize


def _is_certain(spec: TensorSpec) -> bool:
    """Return whether a model must run with any value of an input."""
    return spec.datatype in {"FP16", "FP32", "FP64", "BF16"} and spec.shape is not None and -1 not in spec.shape
