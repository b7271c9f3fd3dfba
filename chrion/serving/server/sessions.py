"""Sessions of the server: opening one for a variant, and running batches on it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.devices import CPU_PROVIDER
from chrion.errors import PlanError
from chrion.graph.opened_model import OpenedModel
from chrion.graph.ort_sessions import first_line
from chrion.machine.allocator import trim
from chrion.machine.cores import affinity, pin
from chrion.runtime import HybridSession
from chrion.runtime.block_chain import BlockChain, open_chain
from chrion.runtime.options.terminable import TerminableRunOptions
from chrion.runtime.shared_arena import missing_bytes, use_shared_arena
from chrion.scheduler.plan import Plan
from chrion.serving.server.failures import RequestFailure, Status
from chrion.serving.server.repository import VariantSource
from chrion.serving.server.tensors import Array, TensorSpec

_BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16
#: The logical CPUs that the process may use.
_ALL_CPUS = affinity()
#: Errors of the system, and texts of onnxruntime, if memory is full, or the disk on which weights of a plan are put.
_FULL = {errno.ENOMEM, errno.ENOSPC, errno.EDQUOT}
_FULL_TEXTS = (
    *("failed to allocate", "available memory of", "out of memory", "bad_alloc", "bad allocation", "cannot allocate"),
    *("failed to write external initializers", "protobuf serialization failed"),
)


class OpenedFiles:
    """The models and plans of a version as they were when it was opened first; later loads open the same.

    Args:
        sources: The version's variants.

    Raises:
        ChrionError: A plan is damaged.
    """

    def __init__(self, sources: Iterable[VariantSource]) -> None:
        self._models = {model: OpenedModel(model) for model in {source.model for source in sources}}
        self._plans = {source.plan: Plan.load(source.plan) for source in sources if source.plan}

    def model(self, source: VariantSource) -> OpenedModel:
        """Return the model of a variant."""
        return self._models[source.model]

    def plan(self, source: VariantSource) -> Plan | None:
        """Return the plan of a variant; None without one."""
        return self._plans[source.plan] if source.plan else None

    def are_readable(self) -> bool:
        """Return whether all models can be opened again."""
        return all(model.is_readable() for model in self._models.values())


class Session:
    """A session of one variant. Runs are safe from several threads.

    Args:
        source: The variant's files.
        files: The version's files as they were when it was opened first.
        provider: The accelerator's execution provider, with its options; used by variants on the accelerator.
        cores: The cores that the lanes of a plan are pinned to.

    Attributes:
        cores: The cores that its threads are pinned to; empty without a plan.
        chain: The model in blocks, if it is served in blocks.

    Raises:
        Exception: As onnxruntime and HybridSession raise it.
    """

    def __init__(
        self,
        source: VariantSource,
        files: OpenedFiles,
        provider: tuple[str, Mapping[str, Any]] | None,
        cores: tuple[int, ...] = (),
    ) -> None:
        self.cores = cores if source.plan else ()
        self._hybrid: HybridSession | None = None
        self.chain: BlockChain | None = None
        if source.block_ms is not None:
            self.chain = open_chain(files.model(source), source.block_ms)
            return
        options = ort.SessionOptions()
        options.intra_op_num_threads = max(1, source.cores)
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # the cores belong to all models
        if not source.accelerated:
            use_shared_arena(options)
        providers: list[Any] = [provider] if source.accelerated and provider else []
        providers.append(CPU_PROVIDER)
        opened = files.model(source)
        if source.plan:
            plan, shared = files.plan(source), ort.SessionOptions()
            if not source.accelerated:
                use_shared_arena(shared)
            try:
                with _restricted_to(cores):  # lanes are pinned to cores that the calling thread may use
                    self._hybrid = opened.use(
                        lambda model: HybridSession(model, shared, providers, plan=plan, strict=True, tune="never")
                    )
            except PlanError as error:
                raise PlanError(f"{source.plan.name}: {error.message}", hint=error.hint) from error
            self._session: Any = self._hybrid
        else:
            self._session = opened.use(lambda model: ort.InferenceSession(model, options, providers=providers))
            self._session.disable_fallback()
        self._outputs = len(self._session.get_outputs())

    def run(
        self, outputs: Sequence[TensorSpec], feeds: Mapping[str, tuple[str, Array]], options: TerminableRunOptions
    ) -> list[Array]:
        """Run a request.

        Args:
            outputs: The outputs to return.
            feeds: Datatype and array of each input.
            options: Another thread can end the run with them.

        Returns:
            The outputs; BF16 as uint16.
        """
        names = [spec.name for spec in outputs]
        if self.chain:
            named = self.chain.run({name: array for name, (_, array) in feeds.items()}, options)
            return [np.asarray(named[name]) for name in names]
        if all(kind != "BF16" for kind, _ in feeds.values()) and all(spec.datatype != "BF16" for spec in outputs):
            arrays = {name: array for name, (_, array) in feeds.items()}
            # A plan's fast path returns all outputs.
            output_names = None if self._hybrid and len(outputs) == self._outputs else names
            return [np.asarray(output) for output in self._session.run(output_names, arrays, options)]
        values = {name: _value(kind, array) for name, (kind, array) in feeds.items()}
        return [_array(output) for output in self._session.run_with_ort_values(names, values, options)]

    def close(self) -> None:
        """Release the session's memory. Idempotent."""
        if self._hybrid:
            self._hybrid.close()
        self._session = self._hybrid = self.chain = None
        trim()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory is full, or the disk that the weights of a plan are written to."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _FULL):
        return True
    return any(text in str(error).lower() for text in _FULL_TEXTS)


def pin_worker(cores: tuple[int, ...]) -> None:
    """Pin the calling thread to the leased core; with several cores, or none, it may use all of them."""
    if len(cores) == 1:
        pin(cores[0])
    elif _ALL_CPUS is not None:
        os.sched_setaffinity(0, _ALL_CPUS)


@contextlib.contextmanager
def _restricted_to(cores: tuple[int, ...]) -> Iterator[None]:
    """Let the calling thread use some cores only, if the system supports that."""
    before = affinity()
    if before is None or not cores:
        yield
        return
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _value(datatype: str, array: Array) -> ort.OrtValue:
    if datatype == "BF16":
        contiguous = np.require(array, requirements="C")  # ascontiguousarray would give a scalar a dimension
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(contiguous, _BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def _array(value: ort.OrtValue) -> Array:
    if value.element_type() != _BFLOAT16:
        return np.asarray(value.numpy())
    shape = tuple(value.shape())  # numpy has no such type, so that onnxruntime refuses to convert
    content = ctypes.string_at(value.data_ptr(), 2 * int(np.prod(shape, dtype=np.int64)))
    return np.frombuffer(content, np.uint16).reshape(shape)


def run_failure(
    model: str, error: BaseException, limit: int, unequal: tuple[str, bool] = ("", False)
) -> RequestFailure:
    """Return the failure of a request.

    Args:
        model: The name of the model.
        error: What its run raised.
        limit: Memory of models and requests together, in bytes.
        unequal: Which of its inputs differ in the size of a dimension that they share, and whether that has a name:
            without one, the failure may be the server's; see :func:`unequal_sizes`.
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
    explanation, is_named = unequal
    text = f"{text}; {explanation}" if explanation else text
    return RequestFailure(Status.INVALID if is_named else Status.INTERNAL, text)
