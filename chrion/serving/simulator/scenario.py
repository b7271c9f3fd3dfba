"""Scenarios: read from TOML files, completed with defaults and checked.

All errors are found before the simulation starts: names, ranges, plan and trace files, and models that fit no server.
All keys have defaults; an empty file simulates the paper's nine models. ``docs/simulation.md`` lists the keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from chrion.common.files import bundled_folder, read_toml
from chrion.common.records import read_record, refuse_unknown
from chrion.common.suggestions import did_you_mean
from chrion.common.units import format_count
from chrion.common.wrong_values import wrong_value
from chrion.errors import PlanError, ScenarioError
from chrion.serving.manager.policies import Route, SpeedRoute
from chrion.serving.manager.policy_settings import PolicySpec, route_of
from chrion.serving.manager.ready_queue import BatchLimits
from chrion.serving.manager.records import MAX_DELAY_MS
from chrion.serving.manager.scaling import AutoscalingSpec
from chrion.serving.simulator.eligibility import check_fit
from chrion.serving.simulator.engine import EngineConfig, read_ahead
from chrion.serving.simulator.overrides import TOP_KEYS, apply_sets
from chrion.serving.simulator.planned import with_planned
from chrion.serving.simulator.scenario_models import (
    PLANNED,
    SHRINK,
    Family,
    ServedModel,
    check_shrink,
    read_family,
    read_patterns,
    served_models,
    with_memory,
    with_total,
)
from chrion.serving.simulator.server_hardware import DatasheetFigures, complete_server
from chrion.serving.simulator.settings import (
    SYNTHETIC,
    DomainSpec,
    ModelSpec,
    ScenarioFile,
    ServerSpec,
    SloSpec,
    StoreSpec,
    WorkloadSpec,
)
from chrion.serving.simulator.workload import ClassifiedWorkload, MinuteReplay, Workload, build_workload

_DEFAULT_CATALOGUE = "table6"
#: Keys whose values are paths of files.
_FILES = ("path", "plan", "durations_path", "memory_path")


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
    #: The number of servers of each ``[[servers]]`` table.
    groups: tuple[int, ...]
    #: What datasheets provide, for each of these tables that names its hardware.
    datasheets: tuple[DatasheetFigures, ...]
    policies: PolicySpec
    #: None if all servers are always on.
    autoscaling: AutoscalingSpec | None
    #: Groups of servers that fail together.
    domains: tuple[DomainSpec, ...]
    #: The network store of weights; None if each server has a disk.
    store: StoreSpec | None
    #: The latency that is compared with the objective: ``response`` or ``execution``.
    measure: str
    models: tuple[ServedModel, ...]
    workload: Workload
    #: The names of the classes of requests; empty without classes.
    classes: tuple[str, ...]
    #: The variant to whose latency the objectives of models refer; empty for the first variant of each model.
    reference: str
    #: The content of the scenario file with all changes and the models of its catalogue.
    content: Mapping[str, Any] = field(repr=False)

    def levels(self, pattern: str) -> tuple[str, ...]:
        """Return the variants of a pattern: one, or those of ``shrink``."""
        return self.shrink if pattern == SHRINK and self.shrink else (pattern,)

    @property
    def size(self) -> str:
        """The number of requests, in words; every pattern receives all of them."""
        requests = format_count(self.workload.requests, "request")
        patterns = len(self.patterns)
        return requests if patterns == 1 else f"{requests} in each of {patterns} patterns"

    @property
    def gpus(self) -> list[ServerSpec]:
        """The server of each GPU."""
        return [spec for spec in self.servers for _ in range(spec.gpus)]

    @property
    def estimated_hardware(self) -> tuple[str, ...]:
        """The hardware of servers whose figures are from datasheets."""
        return tuple(dict.fromkeys(spec.hardware for spec in self.servers if spec.hardware))

    @property
    def is_steady(self) -> bool:
        """Whether the rate of arrivals is the same at all times."""
        workload = self.content.get("workload", {})
        return workload.get("kind", WorkloadSpec().kind) in SYNTHETIC and not workload.get("curve")

    @property
    def _batches(self) -> bool:
        return any(model.spec.max_batch > 1 for model in self.models)

    @property
    def _route(self) -> Route:
        policies = self.policies
        if not policies.by_speed:
            return route_of(policies)
        return SpeedRoute(
            [spec.gpu_speed for spec in self.gpus], policies.spill if policies.routing == "resident-first" else None
        )

    def engine_config(self, pattern: str) -> EngineConfig:
        """Return the inputs of an engine that runs one pattern."""
        names = self.policies
        first, *smaller = [[model.variants[name] for model in self.models] for name in self.levels(pattern)]
        specs = [model.spec for model in self.models]
        policies = names.rules(
            slo_ms=[model.slo_ms for model in self.models],
            weights=[spec.weight for spec in specs],
            pinned=[spec.pinned for spec in specs],
            max_queue=[spec.max_queue for spec in specs],
            batching=[BatchLimits(spec.max_batch, spec.max_delay_ms if spec.max_batch > 1 else 0.0) for spec in specs]
            if self._batches
            else (),
            batch_cost=[[variant.batch_cost for variant in level] for level in (first, *smaller)],
            fail_together=bool(self.domains),
        )
        return EngineConfig(
            servers=self.servers,
            variants=first,
            smaller=smaller,
            policies=policies,
            route=self._route,
            seed=self.seed,
            from_arrival=self.measure == "response",
            preload=self.preload,
            reference_ms=[model.reference_ms for model in self.models],
            autoscaling=self.autoscaling,
            domains=self.domains,
            store=self.store,
            oracle=read_ahead(self.workload.chunks()) if names.eviction == "belady" else None,
        )


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
        with self.named():
            content = apply_sets(with_catalogue({**self.content, **top}, self.folder), given)
            return _build(content, self.name, self.folder)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Name the file in an error about its content that is raised within the context.

        Raises:
            ScenarioError: The one that was raised, with the file.
            PlanError: The same.
        """
        try:
            yield
        except (ScenarioError, PlanError) as error:
            path = str(self.folder / f"{self.name}.toml")
            shown = self.name if self.folder == bundled_folder("scenarios") else path
            sets = ", ".join(f"{key}={value}" for key, value in self.sets.items())
            where = f"{shown} with {sets}" if sets else shown
            raise type(error)(f"{where}: {error.message.removeprefix(f'{path}: ')}", hint=error.hint) from error


def find_scenario(name: str) -> ScenarioSource:
    """Return the source of a scenario, given its file or the name of a bundled scenario.

    Raises:
        ScenarioError: The file does not exist, or is not TOML.
    """
    path = Path(name)
    if not path.is_file() and not name.endswith(".toml"):
        path = bundled_folder("scenarios") / f"{name}.toml"
    if not path.is_file():
        hint = did_you_mean(name, scenario_names(), f"bundled: {', '.join(scenario_names())}")
        raise ScenarioError(f"scenario {name!r} not found: neither a file nor a bundled scenario", hint=hint)
    return ScenarioSource(path.stem, _read_toml(path), path.parent)


def scenario_names() -> list[str]:
    """Return the names of the bundled scenarios."""
    return sorted(path.stem for path in bundled_folder("scenarios").glob("*.toml"))


@dataclass(frozen=True, slots=True)
class ScenarioDescription:
    """The subject and the size of a scenario."""

    #: The name that ``chrion simulate`` accepts.
    name: str
    #: The subject of the scenario, in one line.
    description: str
    servers: int
    #: Models in the cluster; every copy counts.
    models: int
    #: Requests of one pattern; None if they come from a trace file that the user names.
    requests: int | None


def scenario_descriptions() -> tuple[ScenarioDescription, ...]:
    """Return the description of every scenario that comes with Chrion, sorted by name. No trace file is read."""
    return tuple(_describe(name) for name in scenario_names())


def _describe(name: str) -> ScenarioDescription:
    source = find_scenario(name)
    content = with_catalogue(source.content, source.folder)
    servers = [read_record(ServerSpec, group, "servers") for group in content.get("servers", [{}])]
    specs = [{key: value for key, value in entry.items() if key != "variants"} for entry in content["models"]]
    workload = read_record(WorkloadSpec, content.get("workload", {}), "workload")
    return ScenarioDescription(
        name=name,
        description=str(content.get("description", "")),
        servers=sum(spec.count for spec in servers),
        models=content.get("total_models") or sum(read_record(ModelSpec, spec, "models").copies for spec in specs),
        requests=workload.requests if workload.kind in SYNTHETIC else None,
    )


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
        raise wrong_value("use", "a list of names", use, failure=ScenarioError)
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
    groups = content.get("servers")
    datasheets: list[DatasheetFigures] = []
    if isinstance(groups, list):
        completed = [complete_server(group, folder) for group in groups]
        groups = [table for table, _ in completed]
        datasheets = [figures for _, figures in completed if figures]
    file = read_record(ScenarioFile, content if groups is None else {**content, "servers": groups})
    policies, slo = file.policies, file.slo
    if policies.keep_alive_s and policies.prefetch:
        if "prefetch" in content.get("policies", {}):
            raise ScenarioError("policies.prefetch: not with keep_alive_s, after which models would be loaded again")
        policies = structs.replace(policies, prefetch=False)
    _check_policies(policies, slo)
    servers = _servers(file.servers)
    families = [read_family(entry, file.variants, folder) for entry in file.models]
    refuse_unknown(
        file.variants, list(dict.fromkeys(name for _, variants in families for name in variants)), "variants"
    )
    _check_batches([spec for spec, _ in families])
    shrink = file.shrink
    check_shrink(shrink, families)
    patterns = read_patterns(file.patterns, families, shrink)
    reference = slo.of or _reference(patterns[0], shrink, families)
    models = served_models(with_total(families, file.total_models), slo, reference)
    gpus = [spec for spec in servers for _ in range(spec.gpus)]
    planned = PLANNED in patterns and not all(PLANNED in variants for _, variants in families)
    workload = build_workload(
        file.workload,
        [model.name for model in models],
        [model.spec.share for model in models],
        file.seed,
        folder,
    )
    if isinstance(workload, MinuteReplay) and workload.memory_mb is not None:
        models = with_memory(models, workload.memory_mb.tolist(), reference)
    for pattern in patterns:
        if not (planned and pattern == PLANNED):
            check_fit(models, gpus, shrink if pattern == SHRINK and shrink else (pattern,))
    if planned:
        models = with_planned(models, gpus, workload)
        check_fit(models, gpus, (PLANNED,))
    if file.classes:
        names = [own.name for own in file.classes]
        if len(set(names)) < len(names):
            raise ScenarioError(f"classes: duplicate name {max(names, key=names.count)!r}")
        workload = ClassifiedWorkload(workload, file.classes, file.seed)
    return Scenario(
        name=content.get("name", name),
        seed=file.seed,
        preload=file.preload,
        patterns=patterns,
        shrink=shrink,
        servers=servers,
        groups=tuple(group.count for group in file.servers),
        datasheets=tuple(datasheets),
        policies=policies,
        autoscaling=_autoscaling(file.autoscaling, servers),
        domains=file.domains,
        store=_store(file.store, servers, policies),
        measure=slo.measure,
        models=models,
        workload=workload,
        classes=tuple(own.name for own in file.classes),
        reference=reference,
        content=content,
    )


def _reference(pattern: str, shrink: tuple[str, ...], families: Sequence[Family]) -> str:
    """Return the variant of the first pattern; empty if it has no common one."""
    if pattern == SHRINK and shrink:
        return shrink[0]
    return pattern if all(pattern in variants for _, variants in families) else ""


def _servers(groups: Sequence[ServerSpec]) -> tuple[ServerSpec, ...]:
    for spec in groups:
        if spec.budget_bytes < 0:
            raise ScenarioError(f"servers.reserved_gb = {spec.reserved_gb:g}: exceeds gpu_memory_gb")
    return tuple(spec for spec in groups for _ in range(spec.count))


def _autoscaling(spec: AutoscalingSpec | None, servers: Sequence[ServerSpec]) -> AutoscalingSpec | None:
    if spec and spec.min_servers > len(servers):
        expected = f"at most {len(servers)}, the number of servers"
        raise wrong_value("autoscaling.min_servers", expected, spec.min_servers, failure=ScenarioError)
    return spec


def _store(spec: StoreSpec | None, servers: Sequence[ServerSpec], policies: PolicySpec) -> StoreSpec | None:
    if spec and not any(server.host_memory_gb for server in servers):
        raise ScenarioError("store: has no effect: every host memory holds all weights", hint="set host_memory_gb")
    if spec and policies.admission == "deadline":
        raise ScenarioError("store: not with policies.admission = 'deadline'", hint="set admission = 'none'")
    return spec


def _check_policies(policies: PolicySpec, slo: SloSpec) -> None:
    if policies.admission == "deadline" and slo.measure != "response":
        raise ScenarioError("policies.admission = 'deadline' requires slo.measure = 'response'")
    if policies.by_speed and policies.routing == "random":
        raise ScenarioError("policies.by_speed: has no effect with routing = 'random'", hint="leave it out")


def _check_batches(specs: Sequence[ModelSpec]) -> None:
    for spec in specs:
        if spec.max_batch == 1 and spec.max_delay_ms not in {0.0, MAX_DELAY_MS}:
            raise ScenarioError(f"models.{spec.name}.max_delay_ms = {spec.max_delay_ms:g}: only with max_batch above 1")
