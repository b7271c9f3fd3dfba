"""The page on simulation: its scenarios, commands and tables."""

from __future__ import annotations

from chrion.serving.simulator import scenario_descriptions
from chrion.serving.simulator.overrides import TOP_KEYS, VARIANT_KEYS
from chrion.serving.simulator.settings import SECTIONS
from chrion.serving.variants import PLAN_KEYS
from code_blocks import ROOT, blocks, commands

PAGE = ROOT / "docs" / "simulation.md"
SCENARIOS = [block for block in blocks(PAGE) if block.language == "toml"]


def test_the_page_has_scenarios_and_commands() -> None:
    """The search for blocks finds scenarios and commands on the page."""
    consoles = [block for block in blocks(PAGE) if block.language == "console"]
    assert len(SCENARIOS) == 2
    assert len([command for block in consoles for command in commands(block) if "simulate" in command.words]) == 11


def test_the_template_names_every_key() -> None:
    """The first scenario lists all keys of all sections, in the form of a key or in a comment."""
    text = SCENARIOS[0].body
    keys = {*TOP_KEYS, *VARIANT_KEYS} - {*PLAN_KEYS, "plan"}
    keys |= {name for section in SECTIONS.values() for name in section.__struct_fields__}
    assert {key for key in keys if f"\n{key} =" not in text and f"\n# {key} =" not in text} == set()


def test_the_page_lists_the_bundled_scenarios() -> None:
    """The page's table has a row for each bundled scenario, with the numbers of servers and models."""
    text = PAGE.read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    sizes = {row[0].strip("`"): row[2:4] for row in rows if len(row) == 5}
    assert sizes == {entry.name: [str(entry.servers), str(entry.models)] for entry in scenario_descriptions()}
