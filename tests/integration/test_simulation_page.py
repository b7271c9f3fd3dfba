"""Tests that the scenarios and commands of the page on simulation run as printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import onnx
import pytest

from chrion.cli import main
from chrion.simulator import find_scenario, scenario_descriptions, simulate
from chrion.simulator.overrides import PLAN_KEYS, TOP_KEYS, VARIANT_KEYS
from chrion.simulator.settings import SECTIONS
from chrion.zoo import build
from code_blocks import Block, blocks, commands

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "simulation.md"
SCENARIOS = [block for block in blocks(PAGE) if block.language == "toml"]
COMMANDS = [command for block in blocks(PAGE) if block.language == "console" for command in commands(block)]
TRACE = "HashOwner,HashApp,HashFunction,Trigger,1,2\n" + "".join(f"o,a,f{i},http,{i},1\n" for i in range(20))


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command line and return its exit code."""
    if ">" in words:
        words = words[: words.index(">")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the page assumes: a model, its plan, profiles, a scenario and a trace."""
    made = tmp_path_factory.mktemp("page")
    onnx.save(build("lstm-baseline"), made / "lstm.onnx")
    (made / "profiles").symlink_to(ROOT / "profiles")
    (made / "mine.toml").write_text(SCENARIOS[0].body, encoding="utf-8")
    (made / "invocations.csv").write_text(TRACE, encoding="utf-8")
    partition = next(command.words for command in COMMANDS if "partition" in command.words)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        assert run(partition, patch) == 0
    return made


def test_the_page_has_scenarios_and_commands() -> None:
    """The search for blocks finds scenarios and commands on the page."""
    assert len(SCENARIOS) == 2
    assert len([command for command in COMMANDS if "simulate" in command.words]) == 11


@pytest.mark.parametrize("block", SCENARIOS, ids=str)
def test_a_scenario_runs_as_printed(block: Block, folder: Path) -> None:
    """Each scenario of the page is valid without changes and serves all its requests."""
    path = folder / f"scenario{block.line}.toml"
    path.write_text(block.body, encoding="utf-8")
    results = simulate(find_scenario(str(path)).build())
    assert all(result.total.completed == result.total.arrivals > 0 for result in results)


def test_the_template_names_every_key() -> None:
    """The first scenario lists all keys of all sections, in the form of a key or in a comment."""
    text = SCENARIOS[0].body
    keys = {*TOP_KEYS, *VARIANT_KEYS} - {*PLAN_KEYS, "plan"}
    keys |= {name for section in SECTIONS.values() for name in section.__dataclass_fields__}
    assert {key for key in keys if f"\n{key} =" not in text and f"\n# {key} =" not in text} == set()


@pytest.mark.parametrize("words", [c.words for c in COMMANDS if "simulate" in c.words], ids=" ".join)
def test_a_command_works_as_printed(
    words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each command of the page ends with exit code 0, prints its result and writes its picture."""
    if "--plot" in words:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(folder)
    assert run(words, monkeypatch) == 0
    printed = capfd.readouterr().out
    assert "violations" in printed or json.loads(printed)["patterns"]
    if "--export" in words:
        assert Path(words[words.index("--export") + 1]).is_file()
    if "--plot" in words:
        assert Path(words[words.index("--plot") + 1]).stat().st_size > 1000


def test_the_page_lists_the_bundled_scenarios() -> None:
    """The page's table has a row for each bundled scenario, with the numbers of servers and models."""
    text = PAGE.read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    sizes = {row[0].strip("`"): row[2:4] for row in rows if len(row) == 5}
    assert sizes == {entry.name: [str(entry.servers), str(entry.models)] for entry in scenario_descriptions()}
