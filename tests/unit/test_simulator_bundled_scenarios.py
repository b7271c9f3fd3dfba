"""Descriptions of the scenarios that come with Chrion."""

import tomllib

import pytest

from chrion.common.files import bundled_folder
from chrion.serving.simulator import ScenarioDescription, find_scenario, scenario_descriptions

DESCRIPTIONS = scenario_descriptions()


def test_every_file_is_described_in_one_line() -> None:
    """Each file in ``scenarios/`` has an entry with a short description of its own."""
    files = sorted(bundled_folder("scenarios").glob("*.toml"))
    assert [entry.name for entry in DESCRIPTIONS] == [path.stem for path in files]
    assert len({entry.description for entry in DESCRIPTIONS}) == len(files)
    for entry in DESCRIPTIONS:
        assert 10 < len(entry.description) <= 110
        assert "\n" not in entry.description


@pytest.mark.parametrize("entry", DESCRIPTIONS, ids=lambda entry: entry.name)
def test_sizes_are_those_of_the_scenario(entry: ScenarioDescription) -> None:
    """Servers, models and requests equal those of the built scenario; a trace has no known number of requests."""
    text = (bundled_folder("scenarios") / f"{entry.name}.toml").read_text(encoding="utf-8")
    if tomllib.loads(text)["workload"]["kind"] == "azure-functions-2019":
        assert (entry.servers, entry.models, entry.requests) == (8, 9, None)
        return
    scenario = find_scenario(entry.name).build()
    assert entry.servers == len(scenario.servers)
    assert entry.models == len(scenario.models)
    assert entry.requests == scenario.workload.requests
