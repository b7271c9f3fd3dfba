"""Configuration of a session: the model, and the arguments of HybridSession."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import onnxruntime as ort

from chrion.common.imports import import_late
from chrion.common.wrong_values import wrong_value
from chrion.devices import CPU_PROVIDER
from chrion.errors import ModelError
from chrion.graph.model import Graph
from chrion.graph.opened_model import OpenedModel
from chrion.machine.cgroups import free_memory
from chrion.machine.cores import physical_cores
from chrion.profiler.precision import Precision
from chrion.runtime.execution.plain_engine import PlainEngine
from chrion.runtime.options.session_options import (
    copy_options,
    fingerprint,
    hidden_reason,
    optimises,
    options_from_data,
    options_to_data,
    read_entries,
    session_reason,
)
from chrion.runtime.options.thread_limit import given_threads, thread_count
from chrion.scheduler.plan import Plan
from chrion.scheduler.priced_memory import Memory

if TYPE_CHECKING:
    import onnx

#: ``background`` is the default; see :mod:`chrion.runtime.engines`.
TUNING_MODES = ("background", "now", "never")
#: Environment variable that has the tuning mode of sessions created without the argument ``tune``.
TUNE_VARIABLE = "CHRION_TUNE"
#: The fields of a configuration that are sent to another process as they are.
_SENT = (
    *("providers", "provider_options", "slo_ms", "alpha", "cores", "budget_mb", "rest", "memory"),
    *("precision", "max_error"),
)
#: A second session for the same model is opened if the model takes at most this share of the free memory
#: (a choice, not measured).
_SHARE_OF_FREE_MEMORY = 1 / 16


@dataclass(frozen=True)
class SessionConfig:
    """The model and the arguments that a HybridSession was created with; see the class for their meaning."""

    model: OpenedModel
    options: ort.SessionOptions | None = None
    providers: Sequence[Any] | None = None
    provider_options: Sequence[Mapping[Any, Any]] | None = None
    plan: Plan | Callable[[Graph], Plan] | None = None
    slo_ms: float | None = None
    alpha: float | None = None
    cores: int | None = None
    #: Raise if the accelerator fails, instead of falling back to the CPU.
    strict: bool = False
    #: Limit of resident accelerator memory in MB, or None.
    budget_mb: float | None = None
    #: Further keyword arguments of InferenceSession.
    rest: Mapping[str, Any] = field(default_factory=dict)
    #: The memory that alpha prices; None for the default.
    memory: Memory | None = None
    #: The precision of products in plans, and the limit of the error that it may add; None for no limit.
    precision: Precision = "float32"
    max_error: float | None = None

    @property
    def name(self) -> str:
        """Name of the model in messages."""
        return Path(self.model.path).stem or "given as bytes"

    @property
    def accelerator(self) -> tuple[str, Mapping[str, Any]] | None:
        """First provider other than the CPU's, with its options; None without one."""
        for at, provider in enumerate(self.providers or ()):
            separate = self.provider_options[at] if self.provider_options else {}
            name, options = provider if isinstance(provider, tuple) else (provider, separate)
            if name != CPU_PROVIDER:
                return name, options
        return None

    def without_accelerator(self) -> SessionConfig:
        """Return the configuration without the first provider other than the CPU's."""
        providers = list(self.providers or ())
        names = [provider[0] if isinstance(provider, tuple) else provider for provider in providers]
        first = next(at for at, name in enumerate(names) if name != CPU_PROVIDER)
        options = self.provider_options and [o for at, o in enumerate(self.provider_options) if at != first]
        left = providers[:first] + providers[first + 1 :]
        return replace(self, providers=left or [CPU_PROVIDER], provider_options=options if left else None)

    @property
    def lanes(self) -> int | None:
        """Maximum number of CPU lanes: ``cores``, or else the threads of the session options; None for all cores."""
        threads = given_threads(self.options) if self.options and self.cores is None else 0
        return min(threads, len(physical_cores())) if threads > 0 else self.cores

    @property
    def threads(self) -> int:
        """Number of threads of the plain session that the caller would have created."""
        return thread_count(self.options, self.cores)

    def plain(self, reason: str) -> PlainEngine:
        """Open the plain session that replaces a plan: the caller's, or one on the CPU if there is a memory budget."""
        return self.as_requested(reason) if self.budget_mb is None else self.on_cpu(reason)

    def as_requested(self, reason: str) -> PlainEngine:
        """Open the plain session the caller would have created; without providers, on the given plan's accelerator."""
        providers = self.providers
        if providers is None and isinstance(self.plan, Plan) and self.plan.accelerator not in {None, CPU_PROVIDER}:
            providers = [self.plan.accelerator, CPU_PROVIDER]
        return self._open_plain(self.options, providers, reason, self.provider_options)

    def on_cpu(self, reason: str) -> PlainEngine:
        """Open a plain session on the CPU, with the caller's options."""
        return self._open_plain(self.options, [CPU_PROVIDER], reason)

    def with_threads(self, count: int, reason: str) -> PlainEngine:
        """Open a plain session on the CPU with a number of threads, without the caller's options."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = count
        return self.model.use(lambda source: PlainEngine(source, options, [CPU_PROVIDER], None, reason))

    def load(self, shapes: Mapping[str, tuple[int, ...]], *, optimise: bool | None = None) -> Graph:
        """Load the model for shapes of its inputs.

        Args:
            shapes: As for :func:`chrion.load`.
            optimise: Whether onnxruntime's basic optimisation is applied; by default as the session options have it.

        Raises:
            ChrionError: As for :func:`chrion.load`.
        """
        from chrion.graph.loader import load  # noqa: PLC0415 - plain sessions do not need it

        return load(self.model, shapes, optimise=optimises(self.options) if optimise is None else optimise)

    def _open_plain(
        self,
        options: ort.SessionOptions | None,
        providers: Sequence[Any] | None,
        reason: str,
        provider_options: Sequence[Mapping[Any, Any]] | None = None,
    ) -> PlainEngine:
        return self.model.use(
            lambda source: PlainEngine(source, options, providers, provider_options, reason, self.cores, **self.rest)
        )

    @property
    def has_arena(self) -> bool:
        """Whether a session on the CPU has a memory arena of its own."""
        if self.options is None:
            return True
        shared = ("session.use_env_allocators", "1") in read_entries(self.options, ["session.use_env_allocators"])
        return bool(self.options.enable_cpu_mem_arena) and not shared

    def one_thread(self, reason: str, *, arena: bool = True) -> PlainEngine | None:
        """Open a plain session of one thread, with the caller's other options.

        Args:
            reason: Why there is such a session.
            arena: Whether it may have a memory arena.

        Returns:
            None if the options forbid a second session or cannot be copied, or if the model uses an accelerator, or if
            the weights would take more than a small share of the free memory once more.

        Raises:
            Exception: Raised by InferenceSession or while the model is read.
        """
        if self.accelerator or session_reason(self.options, self.rest):
            return None
        if self.model.size > _SHARE_OF_FREE_MEMORY * free_memory():
            return None
        if self.options is not None:
            import_late("chrion.runtime.options.probe", "chrion.graph.reading")
            from chrion.graph.reading import read_model  # noqa: PLC0415 - as above

            if hidden_reason(self.options, self.model.use(read_model)[0], (), None):
                return None
        options = copy_options(self.options)
        options.intra_op_num_threads = 1
        options.enable_cpu_mem_arena &= arena
        return self._open_plain(options, [CPU_PROVIDER], reason)

    @property
    def decision_key(self) -> tuple[object, ...]:
        """All parts of the configuration that the choice between plans and plain sessions depends on."""
        name, options = self.accelerator or (None, {})
        accelerator = name, tuple(sorted((str(key), str(value)) for key, value in options.items()))
        rest: tuple[object, ...] = () if self.memory is None else (self.memory,)
        if self.precision != "float32":
            # The error depends on the values of weights, which the digest of a model leaves out.
            rest += self.precision, self.max_error, "" if self.max_error is None else self.model.content_digest
        return self.slo_ms, self.alpha, self.cores, self.budget_mb, accelerator, fingerprint(self.options), *rest


def open_model(model: str | Path | bytes | onnx.ModelProto | Graph, *, weights_given: bool = False) -> OpenedModel:
    """Return the model that a session answers from.

    Args:
        model: The model.
        weights_given: As for :class:`chrion.graph.opened_model.OpenedModel`.

    Raises:
        TypeError: The argument is neither a model nor a path.
        ModelError: The path is empty, or that of a folder.
    """
    if isinstance(model, Graph):
        return model.source
    if isinstance(model, str | os.PathLike) and (not os.fspath(model) or Path(model).is_dir()):
        found = f"the folder {model}" if os.fspath(model) else "an empty path"
        raise ModelError(f"path_or_bytes: expected an ONNX model, found {found}")
    if isinstance(model, str | bytes | os.PathLike):
        return OpenedModel(model, weights_given=weights_given)
    from onnx import ModelProto  # noqa: PLC0415 - the caller has imported it if the argument is a model

    if isinstance(model, ModelProto):
        return OpenedModel(bytes(model.SerializeToString()), weights_given=weights_given)
    raise TypeError(f"Unable to load from type '{type(model)}'")


def tuning_mode(tune: str | None) -> str:
    """Return the tuning mode: the argument, or else the environment variable, or else ``background``.

    Raises:
        OptionError: The mode is none of ``TUNING_MODES``.
    """
    chosen = tune if tune is not None else os.environ.get(TUNE_VARIABLE) or TUNING_MODES[0]
    if chosen not in TUNING_MODES:
        where = "tune" if tune is not None else f"environment variable {TUNE_VARIABLE}"
        raise wrong_value(where, f"one of {', '.join(TUNING_MODES)}", chosen)
    return chosen


def config_to_data(config: SessionConfig) -> tuple[bytes, ...]:
    """Return the configuration as the protocol sends it, in parts; the last is the model's bytes, not copied.

    Raises:
        TypeError: An argument of the session cannot be passed to another process.
    """
    # The other process opens the file only if it is still the same.
    source = config.model.use(lambda opened: opened)
    content = source if isinstance(source, bytes) else b""
    header = {
        "path": config.model.path if isinstance(source, str) else None,
        "files": config.model.files,
        "bytes": len(content),
        "options": options_to_data(config.options),
        "arguments": {name: getattr(config, name) for name in _SENT},
    }
    return json.dumps(header).encode(), b"\n", content


def config_from_data(stream: BinaryIO) -> SessionConfig:
    """Read the configuration from the beginning of the stream; see :func:`config_to_data`."""
    header = json.loads(stream.readline())
    model = OpenedModel(header["path"] or stream.read(header["bytes"]), header["files"])
    config = SessionConfig(model, options_from_data(header["options"]), **header["arguments"])
    providers = config.providers and [tuple(p) if isinstance(p, list) else p for p in config.providers]
    return replace(config, providers=providers)
