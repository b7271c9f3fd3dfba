"""The model repository: folders ``NAME/VERSION/model.onnx`` with optional plans and ``NAME/model.toml``.

:func:`scan` reads it. A model that cannot be served becomes a :class:`BadVersion` with the reason, and does not affect
the others. Files that have not changed since the previous scan are not read again.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from chrion.errors import ChrionError, ModelError, OptionError
from chrion.graph.assemble import weight_size
from chrion.graph.external import external_files
from chrion.graph.file_states import stat_state
from chrion.graph.reading import read_model
from chrion.scheduler.plan import Plan
from chrion.serving.manager import ManagedModel, ManagedVariant
from chrion.serving.manager.records import ACCELERATOR, HOST
from chrion.serving.server.settings import ModelSettings, VariantSettings, read_settings
from chrion.serving.server.tensors import DTYPES, RENAMED, TensorSpec, fragile_operators
from chrion.serving.variants import VariantTable, from_plan

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_VERSION = re.compile(r"[1-9][0-9]{0,17}")
#: The files of a repository, in words.
EXPECTED_FILES = "NAME/VERSION/model.onnx, resnet/1/model.onnx for example"
#: Why a version whose files are not those that were read is not opened.
FILES_CHANGED = (
    "its files have changed since it was added: restart the server, or load the model again with --model-control "
    "explicit, and replace files by renaming new ones over them"
)
_MODEL, _SETTINGS, _PLANS = "model.onnx", "model.toml", "*.plan.json"
#: Host memory of a session: its weights times a factor for those that are prepacked, and a constant for the session
#: itself, in bytes. Models with other needs state them as ``host_mb``.
_HOST_FACTOR, _HOST_CONSTANT = 1.1, 4_000_000
#: Expected latency of a variant before its first request, and loading speed before its first load; measurements
#: replace both.
_GUESSED_MS, _GUESSED_GB_PER_S = 10.0, 0.5

#: A file's path, device, inode, size and modification time.
FileState = tuple[str, int, int, int, int]
#: A model's name and version.
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class VariantSource:
    """The files that a variant's session is opened from."""

    name: str
    model: Path
    plan: Path | None
    accelerated: bool
    #: The cores that a request leases; 0 for those in blocks, which have lanes of their own.
    cores: int
    #: The model's file and those of its external weights, wherever links lead.
    files: tuple[Path, ...]
    #: The bytes of packed weights that native kernels of the plan have, and of those that several blocks may have.
    packed_bytes: int = 0
    #: Limit of a block's time; None if a request runs whole.
    block_ms: float | None = None

    @property
    def model_bytes(self) -> int:
        """The bytes of these files."""
        return sum(size for *_, size, _ in file_states(*self.files))


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A version of a model that can be served."""

    name: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    settings: ModelSettings
    sources: tuple[VariantSource, ...]
    managed: ManagedModel
    #: State of all files, external weights elsewhere included; if it changes, the version is read again.
    files: tuple[FileState, ...]

    @property
    def key(self) -> Key:
        """Name and version."""
        return self.name, self.version

    def require_unchanged(self) -> None:
        """Raise an error unless its files are still those that were read."""
        if file_states(*(Path(path) for path, *_ in self.files)) != self.files:
            raise ModelError(FILES_CHANGED)

    def interface(self) -> str:
        """Return the inputs and outputs in words."""
        inputs, outputs = (
            ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape or ())}" for spec in specs)
            for specs in (self.inputs, self.outputs)
        )
        return f"{inputs} -> {outputs}"


@dataclass(frozen=True, slots=True)
class BadVersion:
    """A version that cannot be served; the version is empty if the whole model cannot."""

    name: str
    version: str
    reason: str
    files: tuple[FileState, ...]

    @property
    def key(self) -> Key:
        """Name and version."""
        return self.name, self.version


Versions = dict[Key, ServedVersion | BadVersion]


def scan(root: Path, *, accelerator: bool, before: Mapping[Key, ServedVersion | BadVersion] | None = None) -> Versions:
    """Read a repository.

    Args:
        root: The repository.
        accelerator: Whether there is an accelerator; without one, variants that need it are left out.
        before: The result of the previous scan.

    Raises:
        OptionError: The folder cannot be read.
    """
    try:
        folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise OptionError(f"repository {root}: {error.strerror}") from error
    versions: Versions = {}
    for folder in folders:
        for entry in _scan_model(folder, before or {}, accelerator=accelerator):
            versions[entry.key] = entry
    return versions


def find_misplaced(root: Path) -> list[str]:
    """Return the names of model files in the root of a repository, which are not served."""
    return sorted(path.name for path in root.glob("*.onnx") if path.is_file())


def file_states(*folders_and_files: Path) -> tuple[FileState, ...]:
    """Return the state of files, and of all files below folders; what cannot be read is left out."""
    states = []
    for given in folders_and_files:
        # Unlike Path.rglob, os.walk goes on if a folder is removed while it reads.
        below = [Path(top, name) for top, _, names in os.walk(given) for name in names]
        for path in sorted(below) if given.is_dir() else [given]:
            try:
                status = path.stat()
            except OSError:
                continue
            if not stat.S_ISDIR(status.st_mode):
                states.append((str(path), *stat_state(status)))
    return tuple(states)


def _scan_model(
    folder: Path, before: Mapping[Key, ServedVersion | BadVersion], *, accelerator: bool
) -> list[ServedVersion | BadVersion]:
    toml = folder / _SETTINGS
    states = file_states(toml)
    if not _NAME.fullmatch(folder.name):
        expected = "expected letters, digits and ._- after a letter, a digit or _"
        return [BadVersion(folder.name, "", f"folder name: {expected}", states)]
    try:
        settings = read_settings(toml)
        versions = sorted((p for p in folder.iterdir() if p.is_dir() and _VERSION.fullmatch(p.name)), key=_number)
    except (ChrionError, OSError) as error:
        return [BadVersion(folder.name, "", str(error), states)]
    if not versions:
        hint = ", to which model.onnx has to be moved" if (folder / _MODEL).is_file() else ""
        return [BadVersion(folder.name, "", f"no folder of a version, such as 1{hint}", states)]
    entries: list[ServedVersion | BadVersion] = []
    if settings.versions == "latest":
        versions = versions[-1:]
    elif settings.versions != "all":
        versions = [path for path in versions if _number(path) in settings.versions]
        if missing := sorted(set(settings.versions) - set(map(_number, versions))):
            reason = f"{_SETTINGS}: versions: no folder {', '.join(map(str, missing))}"
            entries.append(BadVersion(folder.name, "", reason, states))
    for path in versions:
        known = before.get((folder.name, path.name))
        elsewhere = [Path(file) for file, *_ in known.files if folder not in Path(file).parents] if known else []
        now = file_states(toml, path, *elsewhere)
        if known is None or known.files != now:
            try:
                known = _read_version(path, settings, now, accelerator=accelerator)
            except (ChrionError, OSError, ValueError) as error:
                known = BadVersion(folder.name, path.name, " ".join(str(error).split()), now)
        entries.append(known)
    return entries


def _read_version(
    folder: Path, settings: ModelSettings, states: tuple[FileState, ...], *, accelerator: bool
) -> ServedVersion:
    proto = read_model(folder / _MODEL)[0]
    inputs, outputs = _interface(proto)
    chosen = [
        (name, variant)
        for name, variant in _variants(folder, settings, accelerator=accelerator).items()
        if accelerator or not _accelerated(folder, variant)
    ]
    if not chosen:
        raise ModelError("variants: all of them need an accelerator, and there is none")
    sources = tuple(_source(folder, name, variant, settings) for name, variant in chosen)
    models = [proto]
    for source in sources:
        if source.model.name != _MODEL:
            models.append(read_model(source.model)[0])
            if _interface(models[-1]) != (inputs, outputs):
                raise ModelError(f"variant {source.name}: its inputs or outputs differ from those of {_MODEL}")
    inputs = tuple(replace(spec, fragile=fragile_operators(models, spec.name)) for spec in inputs)
    managed = [_managed(source, variant) for source, (_, variant) in zip(sources, chosen, strict=True)]
    device = ACCELERATOR if accelerator else HOST
    if not settings.variants:
        order = sorted(range(len(managed)), key=lambda at: -managed[at].bytes[device])
        sources, managed = tuple(sources[at] for at in order), [managed[at] for at in order]
    _check_order(managed, device)
    first = _first_by_alpha(managed, settings.alpha)
    root = folder.parent.resolve()
    elsewhere = {file for source in sources for file in source.files[1:] if root not in file.parents}
    batching = settings.batching
    if batching:
        _check_batching(inputs, outputs)
    if settings.blocks and (batching or settings.generation):
        raise ModelError("blocks: requests are served one by one, without [batching] and [generation]")
    if settings.blocks and any(spec.datatype == "BF16" for spec in (*inputs, *outputs)):
        raise ModelError("blocks: inputs and outputs of BF16 are not supported")
    return ServedVersion(
        folder.parent.name,
        folder.name,
        inputs,
        outputs,
        settings,
        sources[first:],
        ManagedModel(
            tuple(managed[first:]),
            settings.slo_ms,
            settings.weight,
            settings.pinned,
            settings.priority,
            batching.max_size if batching else 1,
            batching.max_delay_ms if batching else 0.0,
            settings.max_queue,
        ),
        (*states, *file_states(*sorted(elsewhere))),
    )


def _variants(folder: Path, settings: ModelSettings, *, accelerator: bool) -> Mapping[str, VariantSettings]:
    """Return the variants of the settings; by default the accelerator alone, the plans and the CPU, unsorted."""
    if settings.variants or settings.blocks:
        return settings.variants or {"cpu": VariantSettings()}
    plans = {path.name.removesuffix(".plan.json"): path.name for path in sorted(folder.glob(_PLANS))}
    if taken := sorted({"gpu", "cpu"} & plans.keys()):
        raise ModelError(f"{plans[taken[0]]}: the variant {taken[0]!r} has no plan; rename the file")
    variants = {"gpu": VariantSettings(device="accelerator")} if accelerator else {}
    variants |= {name: VariantSettings(plan=file) for name, file in plans.items()}
    return variants | {"cpu": VariantSettings()}


def _accelerated(folder: Path, variant: VariantSettings) -> bool:
    if not variant.plan:
        return variant.device == "accelerator"
    accelerator = Plan.load(_inside(folder, variant.plan)).accelerator
    return accelerator is not None and accelerator != "CPUExecutionProvider"


def _source(folder: Path, name: str, variant: VariantSettings, settings: ModelSettings) -> VariantSource:
    model, file = _inside(folder, variant.model or _MODEL), _inside(folder, variant.plan) if variant.plan else None
    plan = Plan.load(file) if file else None
    if plan and plan.precision not in {"float32", settings.precision}:
        wanted = f'precision = "{plan.precision}"'
        raise ModelError(f"variant {name}: {variant.plan} is in {plan.precision}: {_SETTINGS} allows that by {wanted}")
    proto, path = read_model(model)
    cores = len(from_plan(name, file, VariantTable()).core_busy_ms) if file else variant.cores or settings.cores
    packed = round(plan.packed_mb * 1e6) if plan else 0
    block_ms = settings.block_ms
    if block_ms is not None:
        if file or variant.device == "accelerator" or cores > 1:
            raise ModelError(f"blocks: each runs on one core of the CPU, which does not fit variant {name}")
        cores, packed = 0, _shared_bytes(proto)
    accelerated, files = _accelerated(folder, variant), (model, *external_files(proto, path or model))
    return VariantSource(name, model, file, accelerated, cores, files, packed, block_ms)


def _shared_bytes(proto: onnx.ModelProto) -> int:
    """Return the most bytes that blocks hold beyond the model's files: each packs the weights that it reads.

    A weight that n operators read is in at most n blocks. Look-ups read it where it is, and with free dimensions the
    model is one block.
    """
    if any(spec.shape is None or -1 in spec.shape for spec in _interface(proto)[0]):
        return 0
    readers = Counter(name for node in proto.graph.node if node.op_type != "Gather" for name in {*node.input})
    return sum(max(readers[t.name] - 1, 0) * weight_size(t) for t in proto.graph.initializer)


def session_bytes(weights: int) -> int:
    """Return the bytes of host memory of a session with weights of that many bytes."""
    return round(weights * _HOST_FACTOR) + _HOST_CONSTANT


def _managed(source: VariantSource, variant: VariantSettings) -> ManagedVariant:
    weights = source.model_bytes
    figures = from_plan(source.name, source.plan, VariantTable(memory="resident")) if source.plan else None
    accelerator_mb = variant.memory_mb or (figures.memory_mb if figures else weights * _HOST_FACTOR / 1e6)
    alone = source.accelerated and not source.plan
    host = round(variant.host_mb * 1e6) or session_bytes(0 if alone else weights) + source.packed_bytes
    return ManagedVariant(
        source.name,
        {ACCELERATOR: round(accelerator_mb * 1e6) if source.accelerated else 0, HOST: host},
        variant.latency_ms or (figures.latency_ms if figures else _GUESSED_MS),
        weights / 1e6 / _GUESSED_GB_PER_S + 1.0,
        0 if alone else source.cores,
        slots=int(source.accelerated),
    )


def _first_by_alpha(variants: list[ManagedVariant], alpha: float) -> int:
    """Return the index of the variant with the least L + alpha * M; variants before it are not used."""
    if not alpha:
        return 0
    prices = [v.latency_ms + alpha * v.bytes[ACCELERATOR] / 1e6 for v in variants]
    return prices.index(min(prices))


def _check_order(variants: list[ManagedVariant], device: str) -> None:
    for larger, smaller in itertools.pairwise(variants):
        if smaller.bytes[device] > larger.bytes[device]:
            sizes = ", ".join(f"{v.name}: {v.bytes[device] / 1e6:g} MB" for v in (larger, smaller))
            raise ModelError(f"variants: each must need at most the {device} memory of the one before it ({sizes})")


def _interface(proto: onnx.ModelProto) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    weights = {tensor.name for tensor in proto.graph.initializer}
    weights |= {tensor.values.name for tensor in proto.graph.sparse_initializer}
    inputs = tuple(_spec(info, "input") for info in proto.graph.input if info.name not in weights)
    return inputs, tuple(_spec(info, "output") for info in proto.graph.output)


def _spec(info: onnx.ValueInfoProto, role: str) -> TensorSpec:
    kind = info.type.WhichOneof("value")
    tensor = info.type.tensor_type
    word = onnx.TensorProto.DataType.Name(tensor.elem_type) if kind == "tensor_type" else str(kind)
    datatype = RENAMED.get(word, word)
    if datatype not in DTYPES:
        hint = (
            "converters of classifiers write a tensor with the option zipmap=False" if kind == "sequence_type" else ""
        )
        raise ModelError(f"{role} {info.name!r}: type {word} has no datatype in the protocol", hint=hint)
    if not tensor.HasField("shape"):
        return TensorSpec(info.name, datatype, None)
    shape = tuple(d.dim_value if d.HasField("dim_value") and d.dim_value > 0 else -1 for d in tensor.shape.dim)
    return TensorSpec(info.name, datatype, shape, tuple(d.dim_param for d in tensor.shape.dim))


def _check_batching(inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
    for spec in (*inputs, *outputs):
        if not spec.shape or spec.shape[0] != -1:
            raise ModelError(f"batching: the first dimension of {spec.name!r} is not free")


def _inside(folder: Path, name: str) -> Path:
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ModelError(f"{name}: expected a file in the folder of the version")
    if not path.is_file():
        raise ModelError(f"{name}: file not found")
    return path


def _number(path: Path) -> int:
    return int(path.name)
