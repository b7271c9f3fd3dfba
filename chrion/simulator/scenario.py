"""Scenarios: read from TOML files, completed with defaults and checked.

All errors are found before the simulation starts: names, ranges, plan and trace files, and models that fit no server.
All keys have defaults; an empty file simulates the paper's nine models. ``docs/simulation.md`` lists the keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from chrion.errors import PlanError, ScenarioError
from chrion.files import bundled_folder, read_toml
from chrion.manager.policies import ADMISSION, EVICTION, LOAD_ORDER, ROUTING, SPILL, Route, route_resident_first
from chrion.simulator.engine import EngineConfig, eligible_servers, read_ahead
from chrion.simulator.overrides import MEASURED_KEYS, PLAN_KEYS, TOP_KEYS, VARIANT_KEYS, WORD_KEYS, apply_sets
from chrion.simulator.server import ServerPolicies
from chrion.simulator.settings import (
    LARGEST,
    SECTIONS,
    ModelSpec,
    PolicySpec,
    ServerSpec,
    SloSpec,
    WorkloadSpec,
    read_section,
    refuse_unknown,
)
from chrion.simulator.variants import PLAN_MEMORY, PLAN_PARTS, Variant, from_plan, from_table
from chrion.simulator.workload import Workload, build_workload

_DEFAULT_CATALOGUE = "table6"
#: The pattern in which models change to smaller variants before they are evicted.
SHRINK = "shrink"
#: Keys whose values are paths of files.
_FILES = ("path", "plan")
_MODEL_KEYS = (*(f.name for f in fields(ModelSpec)), "variants")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model of the cluster; copies of one ``[[models]]`` entry share its name as their family."""

    name: str
    family: str
    spec: ModelSpec
    #: The variants that serve it, by pattern.
    variants: Mapping[str, Variant]
    slo_ms: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """A checked scenario: a cluster, its models and its requests."""

    name: str
    seed: int
    #: True if models are loaded before the first request.
    preload: bool
    #: The patterns to compare, each with the same requests.
    patterns: tuple[str, ...]
    #: The variants of the pattern ``shrink``, the largest first; empty without this pattern.
    shrink: tuple[str, ...]
    #: One entry for each server.
    servers: tuple[ServerSpec, ...]
    policies: PolicySpec
    #: The latency that is compared with the objective: ``response`` or ``execution``.
    measure: str
    models: tuple[ServedModel, ...]
    workload: Workload
    #: The variant to whose latency the objectives of models refer.
    reference: str
    #: The content of the scenario file with all changes and the models of its catalogue.
    content: Mapping[str, Any] = field(repr=False)

    def levels(self, pattern: str) -> tuple[str, ...]:
        """Return the variants of a pattern: one, or those of ``shrink``."""
        return self.shrink if pattern == SHRINK and self.shrink else (pattern,)

    def engine_config(self, pattern: str) -> EngineConfig:
        """Return the inputs of an engine that runs one pattern."""
        names = self.policies
        first, *smaller = [[model.variants[name] for model in self.models] for name in self.levels(pattern)]
        policies = ServerPolicies(
            rank=EVICTION[names.eviction],
            order=LOAD_ORDER[names.load_order],
            admit=ADMISSION[names.admission],
            deadlines=names.admission == "deadline",
            slo_ms=[model.slo_ms for model in self.models],
            weights=[model.spec.weight for model in self.models],
            pinned=[model.spec.pinned for model in self.models],
        )
        return EngineConfig(
            servers=self.servers,
            variants=first,
            smaller=smaller,
            policies=policies,
            route=route_of(names),
            seed=self.seed,
            from_arrival=self.measure == "response",
            preload=self.preload,
            oracle=read_ahead(self.workload.chunks()) if names.eviction == "belady" else None,
        )


def route_of(policies: PolicySpec) -> Route:
    """Return the routing function of a scenario's policies."""
    if policies.routing == "resident-first" and policies.spill != SPILL:
        return partial(route_resident_first, spill=policies.spill)
    return ROUTING[policies.routing]


@dataclass(frozen=True, slots=True)
class ScenarioSource:
    """The content of a scenario file and changes to it; :meth:`build` makes the scenario."""

    name: str
    content: Mapping[str, Any]
    #: The folder that relative paths in the file refer to.
    folder: Path
    #: Values by key that replace the file's, as ``--set`` takes them.
    sets: Mapping[str, Any] = field(default_factory=dict)

    def changed(self, sets: Mapping[str, Any]) -> ScenarioSource:
        """Return a copy with some values set; paths among the values are relative to the current folder."""
        files = {k: str(Path(v).absolute()) for k, v in sets.items() if k.rsplit(".", 1)[-1] in _FILES and v}
        return replace(self, sets={**self.sets, **sets, **files})

    def build(self) -> Scenario:
        """Return the scenario, with all changes and defaults, checked.

        Raises:
            OptionError: The key of a change is unknown or ambiguous.
            ScenarioError: The scenario is invalid.
            PlanError: A plan file cannot be read, is damaged, or lacks the figures of its ``part``.
            TraceError: A row of the trace is malformed.
        """
        given = dict(self.sets)
        top = {key: given.pop(key) for key in list(given) if key in TOP_KEYS}
        content = apply_sets(with_catalogue({**self.content, **top}, self.folder), given)
        return _build(content, self.name, self.folder)


def find_scenario(name: str) -> ScenarioSource:
    """Return the source of a scenario, given its file or the name of a bundled scenario.

    Raises:
        ScenarioError: The file does not exist, or is not TOML.
    """
    path = Path(name)
    if not path.is_file() and not name.endswith(".toml"):
        path = bundled_folder("scenarios") / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(scenario_names())
        raise ScenarioError(
            f"scenario {name!r} not found: neither a file nor a bundled scenario", hint=f"bundled: {known}"
        )
    return ScenarioSource(path.stem, _read_toml(path), path.parent)


def scenario_names() -> list[str]:
    """Return the names of the bundled scenarios."""
    return sorted(path.stem for path in bundled_folder("scenarios").glob("*.toml"))


def with_catalogue(content: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a copy of a scenario's content with the models of its catalogue.

    Keys of a scenario's own entry override those of the catalogue's entry of the same name.

    Raises:
        ScenarioError: There is no such catalogue, or the models or the entries of ``use`` are invalid.
    """
    own = content.get("models", [])
    if not isinstance(own, list) or not all(isinstance(entry, Mapping) for entry in own):
        raise ScenarioError("models: expected [[models]] tables")
    name = content.get("catalogue", "" if own else _DEFAULT_CATALOGUE)
    merged = {entry["name"]: dict(entry) for entry in (_catalogue(str(name), folder) if name else [])}
    use = content.get("use", list(merged))
    if not isinstance(use, list) or not all(isinstance(entry, str) for entry in use):
        raise ScenarioError(f"use = {use!r}: expected a list of names")
    refuse_unknown(dict.fromkeys(use), merged, f"use: catalogue {name}")
    models = {key: merged[key] for key in use}
    names = [str(entry.get("name")) for entry in own]
    if len(set(names)) < len(names):
        raise ScenarioError(
            f"models: duplicate name {max(names, key=names.count)!r}", hint="use copies for equal models"
        )
    for key, entry in zip(names, own, strict=True):
        models[key] = {**models.get(key, {}), **entry}
    rest = {key: value for key, value in content.items() if key not in ("catalogue", "use")}
    return {**rest, "models": list(models.values())}


def _catalogue(name: str, folder: Path) -> list[dict[str, Any]]:
    path = folder / name if name.endswith(".toml") else bundled_folder("scenarios") / "catalogues" / f"{name}.toml"
    if not path.is_file():
        raise ScenarioError(f"catalogue = {name!r}: {path.name} not found")
    entries = _read_toml(path).get("models", [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) and "name" in e for e in entries):
        raise ScenarioError(f"{path}: expected [[models]] tables with names")
    return entries


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path)
    except (OSError, ValueError) as error:
        raise ScenarioError(f"{path}: not a scenario: {error}") from error


def _build(content: Mapping[str, Any], name: str, folder: Path) -> Scenario:
    refuse_unknown(content, (*TOP_KEYS, *SECTIONS, "variants"), "scenario")
    seed, preload = content.get("seed", 0), content.get("preload", False)
    if type(seed) is not int or seed < 0:
        raise ScenarioError(f"seed = {seed!r}: expected a whole number of at least 0")
    if type(preload) is not bool:
        raise ScenarioError(f"preload = {preload!r}: expected true or false")
    for key in ("name", "description"):
        if not isinstance(content.get(key, ""), str):
            raise ScenarioError(f"{key} = {content[key]!r}: expected text")
    slo = read_section(SloSpec, content.get("slo", {}), "slo")
    policies = read_section(PolicySpec, content.get("policies", {}), "policies")
    if policies.admission == "deadline" and slo.measure != "response":
        raise ScenarioError("policies.admission = 'deadline' requires slo.measure = 'response'")
    servers = _servers(content.get("servers", [{}]))
    defaults = content.get("variants", {})
    families = [_family(entry, defaults, folder) for entry in content["models"]]
    refuse_unknown(defaults, list(dict.fromkeys(name for _, variants in families for name in variants)), "variants")
    shrink = _shrink(content.get("shrink", []), families)
    patterns = _patterns(content.get("patterns"), families, shrink)
    reference = slo.of or (shrink[0] if patterns[0] == SHRINK and shrink else patterns[0])
    models = _models(families, slo, reference)
    for pattern in patterns:
        check_fit(models, servers, shrink if pattern == SHRINK and shrink else (pattern,))
    workload = build_workload(
        read_section(WorkloadSpec, content.get("workload", {}), "workload"),
        [model.name for model in models],
        [model.spec.share for model in models],
        seed,
        folder,
    )
    title = content.get("name", name)
    return Scenario(
        name=title,
        seed=seed,
        preload=preload,
        patterns=patterns,
        shrink=shrink,
        servers=servers,
        policies=policies,
        measure=slo.measure,
        models=models,
        workload=workload,
        reference=reference,
        content=content,
    )


def _servers(groups: Any) -> tuple[ServerSpec, ...]:
    if not isinstance(groups, list) or not groups:
        raise ScenarioError("servers: expected [[servers]] tables")
    specs = [read_section(ServerSpec, group, "servers") for group in groups]
    for spec in specs:
        if spec.budget_bytes < 0:
            raise ScenarioError(f"servers.reserved_gb = {spec.reserved_gb:g}: exceeds gpu_memory_gb")
    return tuple(spec for spec in specs for _ in range(spec.count))


def _family(entry: Mapping[str, Any], defaults: Any, folder: Path) -> tuple[ModelSpec, dict[str, Variant]]:
    """Return the record of a ``[[models]]`` entry and its variants."""
    where = f"models.{entry.get('name', '?')}"
    refuse_unknown(entry, _MODEL_KEYS, where)
    spec = read_section(ModelSpec, {k: v for k, v in entry.items() if k != "variants"}, where)
    tables = entry.get("variants", {})
    if not isinstance(tables, Mapping) or not tables:
        raise ScenarioError(f"{where}: expected tables [models.variants.NAME]")
    if not isinstance(defaults, Mapping):
        raise ScenarioError("variants: expected tables [variants.NAME]")
    return spec, {name: _variant(name, table, defaults.get(name, {}), where, folder) for name, table in tables.items()}


def _variant(name: str, table: Any, defaults: Any, where: str, folder: Path) -> Variant:
    if not isinstance(table, Mapping) or not isinstance(defaults, Mapping):
        raise ScenarioError(f"{where}.variants.{name}: expected a table")
    full = {**defaults, **table}
    _check_variant(full, f"{where}.variants.{name}")
    try:
        return from_plan(name, folder / full["plan"], full) if "plan" in full else from_table(name, full)
    except PlanError:
        raise
    except ValueError as error:
        raise ScenarioError(f"{where}: {error}") from error


def _check_variant(table: Mapping[str, Any], where: str) -> None:
    """Refuse unknown keys, wrong types, and figures beside the plan that provides them."""
    refuse_unknown(table, VARIANT_KEYS, where)
    for key, value in table.items():
        types = (str,) if key in WORD_KEYS else (int,) if key == "cores" else (int, float)
        if not isinstance(value, types) or isinstance(value, bool):
            expected = "text" if key in WORD_KEYS else "a whole number" if key == "cores" else "a number"
            raise ScenarioError(f"{where}.{key} = {value!r}: expected {expected}")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ScenarioError(f"{where}.{key}: expected a number of at most {LARGEST:g}")
        if key in MEASURED_KEYS and "plan" in table:
            raise ScenarioError(f"{where}.{key}: the plan file provides it", hint="leave out the key or the plan")
    for key, words in zip(PLAN_KEYS, (PLAN_PARTS, PLAN_MEMORY), strict=True):
        if key in table and "plan" not in table:
            raise ScenarioError(f"{where}.{key} = {table[key]!r}: only for a variant with the key 'plan'")
        if key in table and table[key] not in words:
            raise ScenarioError(f"{where}.{key} = {table[key]!r}: expected one of {', '.join(words)}")


def _shrink(given: Any, families: Sequence[tuple[ModelSpec, dict[str, Variant]]]) -> tuple[str, ...]:
    """Return the variants of the pattern ``shrink``; all models must have them, and memory must not increase."""
    words = isinstance(given, list) and all(isinstance(name, str) for name in given)
    if not words or len(given) == 1 or len(set(given)) < len(given):
        raise ScenarioError(f"shrink = {given!r}: expected a list of two or more names of variants, the largest first")
    for spec, variants in families:
        for name in given:
            if name not in variants:
                hint = f"known: {', '.join(variants)}"
                raise ScenarioError(f"shrink: models.{spec.name} has no variant {name!r}", hint=hint)
        for before, after in pairwise(given):
            if variants[after].memory_bytes > variants[before].memory_bytes:
                raise ScenarioError(
                    f"shrink: models.{spec.name}: variant {after!r} needs {variants[after].memory_mb:g} MB, "
                    f"more than {before!r} with {variants[before].memory_mb:g} MB",
                    hint="list the largest variant first",
                )
        if given and SHRINK in variants:
            raise ScenarioError(f"models.{spec.name}: a variant cannot have the name {SHRINK!r}", hint="rename it")
    return tuple(given)


def _patterns(
    given: Any, families: Sequence[tuple[ModelSpec, dict[str, Variant]]], shrink: tuple[str, ...]
) -> tuple[str, ...]:
    if not families:
        raise ScenarioError("models: expected at least one model")
    common = [name for name in families[0][1] if all(name in variants for _, variants in families)]
    if given is None and shrink:
        common.append(SHRINK)
    if given is None and not common:
        names = "; ".join(f"{spec.name}: {', '.join(variants)}" for spec, variants in families)
        raise ScenarioError(f"models: no variant is common to all models ({names})", hint="rename variants")
    patterns = common if given is None else given
    words = isinstance(patterns, list) and all(isinstance(pattern, str) for pattern in patterns)
    if not words or not patterns or len(set(patterns)) < len(patterns):
        raise ScenarioError(f"patterns = {given!r}: expected a list of distinct names of variants")
    for spec, variants in families:
        for pattern in patterns:
            if pattern == SHRINK and not (shrink or SHRINK in variants):
                raise ScenarioError("patterns: 'shrink' needs the key shrink, a list of variants, the largest first")
            if pattern not in variants and not (pattern == SHRINK and shrink):
                known = ", ".join(variants)
                raise ScenarioError(
                    f"models.{spec.name}: pattern {pattern!r} is not one of its variants", hint=f"known: {known}"
                )
    return tuple(patterns)


def _models(
    families: Sequence[tuple[ModelSpec, dict[str, Variant]]], slo: SloSpec, reference: str
) -> tuple[ServedModel, ...]:
    """Return all models, the first copy of every family before the second, so that ranks alternate between families."""
    models = []
    for copy in range(max(spec.copies for spec, _ in families)):
        for spec, variants in families:
            if copy >= spec.copies:
                continue
            if reference not in variants:
                raise ScenarioError(f"slo.of = {reference!r}: model {spec.name} has no variant of that name")
            objective = spec.slo_ms or slo.latency_ms or slo.factor * variants[reference].latency_ms
            name = spec.name if spec.copies == 1 else f"{spec.name}#{copy + 1}"
            models.append(ServedModel(name, spec.name, spec, variants, objective))
    return tuple(models)


def check_fit(models: Sequence[ServedModel], servers: Sequence[ServerSpec], levels: Sequence[str]) -> None:
    """Refuse models that fit no server, alone or beside the pinned models.

    Args:
        models: The models.
        servers: The servers.
        levels: The variants of a pattern; with several, the last and smallest one has to fit, and the first one of a
            pinned model.

    Raises:
        ScenarioError: A model does not fit.
    """
    most_bytes = max(spec.budget_bytes for spec in servers)
    pinned = [0] * len(servers)
    fitting: set[tuple[int, ...]] = set()
    for model in sorted(models, key=lambda m: not m.spec.pinned):
        variants = [model.variants[name] for name in levels]
        key = tuple(map(id, variants))
        if key in fitting and not model.spec.pinned:  # a copy of a model that fits
            continue
        fitting.add(key)
        variant = variants[0 if model.spec.pinned else -1]
        where = f"models.{model.name}: variant {variant.name}"
        eligible = eligible_servers(variants, servers)
        if not eligible and variant.memory_bytes > most_bytes:
            available = f"the largest server has {most_bytes / 1e6:g} MB for models"
            raise ScenarioError(f"{where} needs {variant.memory_mb:g} MB, {available}")
        if not eligible:
            raise ScenarioError(f"{where} needs {_needs(variants)}; no server has all of them")
        for i in eligible:
            if pinned[i] + variant.memory_bytes > servers[i].budget_bytes:
                raise ScenarioError(f"{where} needs {variant.memory_mb:g} MB, too much beside the pinned models")
            pinned[i] += variant.memory_bytes if model.spec.pinned else 0


def _needs(variants: Sequence[Variant]) -> str:
    cores = max(variant.cores for variant in variants)
    needs = [f"{variants[-1].memory_mb:g} MB"]
    needs += ["a GPU slot"] if any(variant.gpu_busy_ms for variant in variants) else []
    needs += ["1 core" if cores == 1 else f"{cores} cores"] if cores else []
    return ", ".join(needs)
