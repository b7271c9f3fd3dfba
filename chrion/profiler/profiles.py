"""Profiles: the measured costs of operators, copies and handoffs on a machine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from chrion.common.files import bundled_folder, read_fields, read_json, write_atomically
from chrion.common.suggestions import did_you_mean
from chrion.common.units import format_count
from chrion.common.wrong_values import wrong_value
from chrion.errors import ProfileError
from chrion.graph.dag import Dag
from chrion.profiler.costs import FREE, STREAMS, BufferSupport, CopyCost, Costs, OperatorMemory
from chrion.profiler.estimate import Estimator, OperatorWork
from chrion.profiler.machine import Machine, machine_to_json
from chrion.profiler.precision import Precision
from chrion.profiler.roofline import Roofline, operator_bytes
from chrion.profiler.widths import describe_fit, fit_errors, measured_widths, planned_widths, times_at

SCHEMA = "chrion.profile/1"
#: A native kernel is used if it takes at most this share of the time of onnxruntime's (a choice, not measured).
_NATIVE_SHARE = 0.97
#: An estimate is extrapolated beyond this multiple of the most arithmetic that was measured for a type (a choice).
_COMPARABLE = 10
#: The largest time, size or number of operations in a file; with larger ones sums and fits overflow.
_LARGEST = 2.0**63
_FIGURES = ("handoff_ms", "dispatch_ms", "wake_ms", "base_memory_mb", "cache_bytes", "reload_ms_per_byte")
_COPIES = ("upload", "download", "pageable_upload", "pageable_download")
#: The fields in a file beside the operators, and those of them that it must have although they have a default.
_STORED = ("machine", "cores", "accelerator", *_FIGURES, *_COPIES, "plain", "notes", "precision")
_REQUIRED = ("upload", "download", "handoff_ms", "dispatch_ms", "base_memory_mb", "notes")


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """Measured costs of all operators of one signature."""

    op_type: str
    #: The time on one core while 1, 2, ..., k cores are busy.
    cpu_ms: tuple[float, ...]
    #: The time on the accelerator; None if it cannot run the operator, or without an accelerator.
    accelerator_ms: float | None = None
    #: Memory on the accelerator beside inputs, outputs and weights.
    ephemeral_bytes: int = 0
    #: The interquartile range of the one-core time, divided by its median.
    spread: float = 0.0
    flops: float = 0.0
    #: Bytes read and written: inputs, weights and outputs.
    bytes: int = 0
    #: The time on several cores, at each of the widths of :func:`chrion.profiler.widths.measured_widths`; empty if it
    #: was not measured, and then no width is taken to be a gain.
    wide_ms: tuple[float, ...] = ()
    #: The time of Chrion's native kernel on one core while 1, 2, ..., k cores are busy; empty if it was not measured.
    native_ms: tuple[float, ...] = ()
    #: The same on several cores, as ``wide_ms``.
    native_wide_ms: tuple[float, ...] = ()
    #: The largest error of the native kernel's outputs, relative to the largest output, if it multiplies in bfloat16.
    native_error: float = 0.0

    @property
    def is_native(self) -> bool:
        """True if the native kernel was measured to be faster than onnxruntime's, however many cores are busy."""
        pairs = zip(self.native_ms, self.cpu_ms, strict=False)
        return bool(self.native_ms) and all(own <= _NATIVE_SHARE * other for own, other in pairs)

    @property
    def by_width(self) -> dict[int, float]:
        """The measured times of onnxruntime's kernel by width."""
        return self._by_width(self.wide_ms)

    def native_at(self, widths: Sequence[int]) -> tuple[float, ...]:
        """Return the times of the native kernel at widths of 2 or more; infinite where it is not the faster one."""
        if not self.native_wide_ms:
            return (math.inf,) * len(widths)
        others = times_at(self.cpu_ms[0], self.by_width, widths)
        own = times_at(self.native_ms[0], self._by_width(self.native_wide_ms), widths)
        return tuple(ms if ms <= _NATIVE_SHARE * other else math.inf for ms, other in zip(own, others, strict=True))

    def best_at(self, widths: Sequence[int]) -> tuple[float, ...]:
        """Return the times of the faster kernel at widths of 2 or more."""
        return tuple(map(min, times_at(self.cpu_ms[0], self.by_width, widths), self.native_at(widths)))

    def _by_width(self, times_ms: Sequence[float]) -> dict[int, float]:
        return dict(zip(measured_widths(len(self.cpu_ms)), times_ms, strict=True)) if times_ms else {}


@dataclass(frozen=True, slots=True)
class PlainLatency:
    """The fastest plain session of a whole model on the CPU."""

    threads: int
    latency_ms: float


@dataclass(frozen=True)
class Profile:
    """The costs of operators on a machine, from which :meth:`costs` builds the matrices of a graph."""

    machine: Machine
    #: The number of CPU cores that were measured, k.
    cores: int
    #: The execution provider that was measured as the accelerator, or None.
    accelerator: str | None
    #: The costs of operators by signature.
    operators: Mapping[str, OperatorCost]
    upload: CopyCost = FREE
    download: CopyCost = FREE
    #: Copies from and to pageable host memory; None if ``upload`` and ``download`` also use pageable memory.
    pageable_upload: CopyCost | None = None
    pageable_download: CopyCost | None = None
    handoff_ms: float = 0.0
    dispatch_ms: float = 0.0
    base_memory_mb: float = 0.0
    cache_bytes: int = 0
    reload_ms_per_byte: float = 0.0
    wake_ms: float = 0.0
    #: The fastest plain session of whole models on the CPU, by the digest of their graph.
    plain: Mapping[str, PlainLatency] = field(default_factory=dict)
    #: The origin of figures that were not measured, and their assumptions.
    notes: tuple[str, ...] = ()
    #: The precision of products in native kernels.
    precision: Precision = "float32"
    #: Why that is not the precision that was asked for; empty if it is. Not compared, not stored.
    other_precision: str = field(default="", compare=False)
    #: Whether other processes used the cores while operators were measured. Not compared, not stored.
    interference: bool = field(default=False, compare=False)
    _estimators: dict[int, Estimator] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"<Profile of {format_count(len(self.operators), 'operator')} on {self.machine}>"

    @property
    def memory_measured(self) -> bool:
        """True if accelerator memory was measured: ``chrion profile`` measures it, and leaves no notes."""
        return self.accelerator is not None and not self.notes

    def missing(self, dag: Dag) -> tuple[int, ...]:
        """Return the operators of a graph that were not measured, and whose costs are therefore estimated."""
        if self.machine.hardware:
            return tuple(range(len(dag)))
        return tuple(i for i, signature in enumerate(dag.signatures) if signature not in self.operators)

    def extrapolated(self, dag: Dag) -> tuple[int, ...]:
        """Return the operators of a graph of which the profile has none of the type, or none of comparable work."""
        largest: dict[str, float] = {}
        for known in self.operators.values():
            largest[known.op_type] = max(largest.get(known.op_type, 0.0), known.flops)
        types, flops = dag.op_types, dag.flops
        return tuple(
            i for i in self.missing(dag) if types[i] not in largest or flops[i] > _COMPARABLE * largest[types[i]] > 0
        )

    def unmeasured(self, dag: Dag) -> frozenset[str]:
        """Return the signatures of a graph that the profile lacks, except those of operators without arithmetic."""
        known = self.operators
        return frozenset(s for s, flops in zip(dag.signatures, dag.flops, strict=True) if flops and s not in known)

    def is_native(self, signature: str, width: int) -> bool:
        """Return whether the native kernel of operators was measured to be faster than onnxruntime's on some cores."""
        cost = self.operators.get(signature)
        if cost is None or width == 1:
            return cost is not None and cost.is_native
        return cost.native_at([width])[0] < math.inf

    def costs(
        self,
        dag: Dag,
        cores: int | None = None,
        streams: int | None = None,
        widths: Sequence[int] = (),
        *,
        native: bool = True,
    ) -> Costs:
        """Return the cost matrices of a graph on this machine.

        Times are expected times: those of operators that not every request uses, such as experts that a router selects,
        are multiplied by their probability (see :mod:`chrion.graph.usage`).

        Args:
            dag: The graph. Operators that the profile lacks are estimated from those of the same type, or from all
                operators of non-zero time if there are none.
            cores: The number of CPU cores to use; all that were measured if None.
            streams: The largest number of lanes of the accelerator to use.
            widths: Further numbers of cores of a lane, for example those of a plan.
            native: Whether operators have the time of their native kernel where that is faster.

        Raises:
            ProfileError: More cores are requested than were measured, or the profile has no operators.
        """
        core_count = self.cores if cores is None else cores
        if not 0 <= core_count <= self.cores:
            raise wrong_value("cores", f"at most {self.cores}, those of the profile", core_count, failure=ProfileError)
        if not self.operators and len(dag):
            raise ProfileError("the profile has no operators", hint="measure a profile with: chrion profile MODEL")
        rows = {s: self._row(dag, i) for i, s in enumerate(dag.signatures)}
        table = [rows[s] for s in dag.signatures]
        is_wide = any(row.wide_ms or row.native_wide_ms for row in rows.values())
        planned = planned_widths(core_count) if is_wide else ()
        widths = tuple(sorted({*planned, *widths} - {1}))
        wide = {
            s: row.best_at(widths) if native else times_at(row.cpu_ms[0], row.by_width, widths)
            for s, row in rows.items()
        }
        single = {s: self._faster_ms(row) if native else row.cpu_ms for s, row in rows.items()}
        accelerator, shares = self._on_accelerator(dag, table)
        return Costs(
            accelerator_ms=accelerator,
            cpu_ms=tuple(_expected(dag, (single[s][j] for s in dag.signatures)) for j in range(core_count)),
            memory=_memory(dag, table),
            widths=widths,
            wide_ms=tuple(_expected(dag, (wide[s][at] for s in dag.signatures)) for at in range(len(widths))),
            upload=self.upload,
            download=self.download,
            handoff_ms=self.handoff_ms,
            dispatch_ms=self.dispatch_ms,
            wake_ms=self.wake_ms,
            base_memory_mb=self.base_memory_mb,
            buffers=BufferSupport.of(self.accelerator),
            cache_bytes=self.cache_bytes,
            reload_ms_per_byte=self.reload_ms_per_byte,
            streams=STREAMS if streams is None else streams,
            accelerator_share=shares,
        )

    def _faster_ms(self, cost: OperatorCost) -> tuple[float, ...]:
        """Return the times of the faster kernel on one core; native lanes call a native one without a dispatch."""
        if not cost.is_native:
            return cost.cpu_ms
        saved_ms = 0.0 if self.accelerator else self.dispatch_ms
        return tuple(max(0.0, ms - saved_ms) for ms in cost.native_ms)

    def _on_accelerator(
        self, dag: Dag, table: Sequence[OperatorCost]
    ) -> tuple[tuple[float, ...] | None, tuple[float, ...]]:
        """Return the operators' expected times on the accelerator, and the share of it that each occupies."""
        if self.accelerator is None:
            return None, ()
        times = tuple(math.inf if row.accelerator_ms is None else row.accelerator_ms for row in table)
        return _expected(dag, times), Roofline.of(dag, times).shares

    def describe_width_fit(self) -> str:
        """Return the error of Amdahl's law for operators on several cores; empty if fewer than two widths exist."""
        return describe_fit(fit_errors([(o.cpu_ms[0], o.by_width) for o in self.operators.values()]))

    def _row(self, dag: Dag, i: int) -> OperatorCost:
        known = self.operators.get(dag.signatures[i])
        if known is not None:
            return known
        work = OperatorWork(dag.op_types[i], dag.flops[i], operator_bytes(dag, i))
        accelerator = self._estimator(0).time_ms(work) if self._runs_on_accelerator(work.op_type) else None
        return OperatorCost(
            op_type=work.op_type,
            cpu_ms=tuple(self._estimator(j).time_ms(work) for j in range(1, self.cores + 1)),
            accelerator_ms=accelerator,
            flops=work.flops,
            bytes=int(work.bytes),
        )

    def _runs_on_accelerator(self, op_type: str) -> bool:
        """Return whether the accelerator ran an operator of the type, or no operator of the type was measured."""
        same = [o.accelerator_ms for o in self.operators.values() if o.op_type == op_type]
        return self.accelerator is not None and (not same or any(ms is not None for ms in same))

    def _estimator(self, busy: int) -> Estimator:
        """Return the estimator for ``busy`` CPU cores, or for the accelerator if 0."""
        if busy not in self._estimators:
            known = [
                OperatorWork(o.op_type, o.flops, o.bytes, ms)
                for o in self.operators.values()
                if (ms := o.cpu_ms[busy - 1] if busy else o.accelerator_ms) is not None
            ]
            self._estimators[busy] = Estimator(known)
        return self._estimators[busy]

    def save(self, path: str | Path) -> None:
        """Write the profile to a JSON file, atomically."""
        write_atomically(Path(path), self.to_json())

    def to_json(self) -> str:
        """Return the profile as JSON text with one line per operator."""
        content = {"schema": SCHEMA, "machine": machine_to_json(self.machine), "fingerprint": self.machine.fingerprint}
        content |= {name: getattr(self, name) for name in ("cores", "accelerator", *_FIGURES, "notes", "precision")}
        for name in _COPIES:
            if (cost := getattr(self, name)) is not None:
                content[name] = asdict(cost)
        content["plain"] = {digest: asdict(latency) for digest, latency in self.plain.items()}
        content["operators"] = {}
        lines = [
            f"  {json.dumps(signature)}: {json.dumps(asdict(cost))}"
            for signature, cost in sorted(self.operators.items())
        ]
        head = json.dumps(content, indent=1)
        return head.removesuffix("{}\n}") + "{\n" + ",\n".join(lines) + "\n }\n}\n"

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile.

        Args:
            path: A file, or the name of a profile that is part of Chrion (:func:`stored_profiles`).

        Raises:
            ProfileError: The file does not exist, cannot be read or is damaged.
        """
        content = read_json(_find(Path(path)), SCHEMA, ProfileError)
        try:
            return _from_json(content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProfileError(f"{path}: damaged profile: {type(error).__name__}: {error}") from error


def stored_profiles() -> list[str]:
    """Return the names of the profiles that are part of Chrion."""
    return sorted(path.stem for path in bundled_folder("profiles").glob("*.json"))


def _find(path: Path) -> Path:
    """Return the file of a profile for its path or name."""
    if path.exists() or path.suffix or path.name != str(path):
        return path
    names = stored_profiles()
    if path.name not in names:
        hint = did_you_mean(path.name, names, f"stored: {', '.join(names)}")
        raise ProfileError(f"profile {path.name!r} not found: neither a file nor a stored profile", hint=hint)
    return bundled_folder("profiles") / f"{path.name}.json"


def _expected(dag: Dag, times: Iterable[float]) -> tuple[float, ...]:
    """Return the expected times of operators, given those of operators that a request uses."""
    return tuple(ms * used for ms, used in zip(times, dag.usage, strict=True)) if dag.usage else tuple(times)


def _memory(dag: Dag, table: Sequence[OperatorCost]) -> tuple[OperatorMemory, ...]:
    """Return the memory of operators on the accelerator."""
    return tuple(
        OperatorMemory(
            inputs_mb=dag.input_bytes[i] / 1e6,
            outputs_mb=dag.output_bytes[i] / 1e6,
            ephemeral_mb=row.ephemeral_bytes / 1e6,
            weights_mb=dag.weight_total(i) / 1e6,
        )
        for i, row in enumerate(table)
    )


def operator_cost_from_json(content: Mapping[str, Any]) -> OperatorCost:
    """Return the costs of an operator from the output of ``dataclasses.asdict``.

    Raises:
        ValueError: A field is missing, unknown, or not a valid number.
    """
    cost = read_fields(content, OperatorCost)
    if unknown := content.keys() - OperatorCost.__dataclass_fields__.keys():
        raise ValueError(f"{cost.op_type} has unknown fields: {', '.join(sorted(unknown))}")
    if cost.native_ms and len(cost.native_ms) != len(cost.cpu_ms):
        raise ValueError(f"{cost.op_type} has times of a native kernel for {len(cost.native_ms)} cores")
    for times in (cost.wide_ms, cost.native_wide_ms):
        if times and len(times) != len(widths := measured_widths(len(cost.cpu_ms))):
            raise ValueError(f"{cost.op_type} has times for {len(times)} widths, expected {len(widths)}")
    if cost.native_wide_ms and not cost.native_ms:
        raise ValueError(f"{cost.op_type} has times of a native kernel on several cores only")
    times = (*cost.cpu_ms, *cost.wide_ms, *cost.native_ms, *cost.native_wide_ms, cost.accelerator_ms or 0.0)
    _require_figures(cost.op_type, *times, cost.ephemeral_bytes, cost.flops, cost.bytes, cost.native_error)
    return cost


def _require_figures(subject: str, *figures: float) -> None:
    if not all(0 <= figure <= _LARGEST for figure in figures):
        raise ValueError(f"the figures of {subject} must be between 0 and {_LARGEST:g}, found {list(figures)}")


def _from_json(content: Mapping[str, Any]) -> Profile:
    operators = {signature: operator_cost_from_json(cost) for signature, cost in content["operators"].items()}
    if missing := [name for name in _REQUIRED if name not in content]:
        raise ValueError(f"{missing[0]} is missing")
    stored = {name: content[name] for name in _STORED if name in content}
    profile = replace(read_fields({**stored, "operators": {}}, Profile), operators=operators)
    for signature, cost in operators.items():
        if len(cost.cpu_ms) != profile.cores:
            raise ValueError(f"{signature} has {len(cost.cpu_ms)} CPU times for {profile.cores} cores")
    own = (getattr(profile, name) for name in _FIGURES)
    _require_figures("the machine", *own, profile.cores, profile.machine.cores, profile.machine.memory_mb)
    for copies in filter(None, (getattr(profile, name) for name in _COPIES)):
        _require_figures("copies", copies.latency_ms, copies.ms_per_byte)
    for latency in profile.plain.values():
        _require_figures("plain sessions", latency.latency_ms, latency.threads)
        if not (latency.threads and latency.latency_ms):
            raise ValueError("plain sessions must have a thread, and a latency above 0")
    return profile
