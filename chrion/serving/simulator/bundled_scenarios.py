"""The scenarios that come with Chrion, with a description and the size of each."""

from __future__ import annotations

from dataclasses import dataclass

from chrion.common.records import read_record
from chrion.serving.simulator.scenario import find_scenario, scenario_names, with_catalogue
from chrion.serving.simulator.settings import SYNTHETIC, ModelSpec, ServerSpec, WorkloadSpec


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
