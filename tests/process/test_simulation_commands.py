"""The scenarios and commands of the page on simulation, run as printed."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

import chrion
from chrion.serving.simulator import find_scenario, simulate
from chrion.zoo import build
from code_blocks import ROOT, Block, blocks, commands
from command_line import PAPER, Chrion

PAGE = ROOT / "docs" / "simulation.md"
SCENARIOS = [block for block in blocks(PAGE) if block.language == "toml"]
COMMANDS = [command.words for block in blocks(PAGE) if block.language == "console" for command in commands(block)]
TRACE = "HashOwner,HashApp,HashFunction,Trigger,1,2\n" + "".join(f"o,a,f{i},http,{i},1\n" for i in range(20))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the page assumes: a model, its plan, profiles, a scenario and a trace."""
    made = tmp_path_factory.mktemp("page")
    model = build("lstm-baseline")
    onnx.save(model, made / "lstm.onnx")
    plan = chrion.partition(chrion.load(model), chrion.Profile.load(PAPER), slo="60ms", policy="chrion-paper")
    plan.save(made / "simulated.plan.json")
    (made / "profiles").symlink_to(ROOT / "profiles")
    (made / "mine.toml").write_text(SCENARIOS[0].body, encoding="utf-8")
    (made / "invocations.csv").write_text(TRACE, encoding="utf-8")
    return made


@pytest.mark.parametrize("block", SCENARIOS, ids=str)
def test_a_scenario_runs_as_printed(block: Block, folder: Path) -> None:
    """Each scenario of the page is valid without changes and serves all its requests."""
    path = folder / f"scenario{block.line}.toml"
    path.write_text(block.body, encoding="utf-8")
    results = simulate(find_scenario(str(path)).build())
    assert all(result.total.completed == result.total.arrivals > 0 for result in results)


@pytest.mark.parametrize("words", [words for words in COMMANDS if "simulate" in words], ids=" ".join)
def test_a_command_works_as_printed(
    words: list[str], cli: Chrion, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command of the page ends with exit code 0, prints its result and writes its picture.

    The fleet's day has fewer requests, since all of them take minutes.
    """
    if "--plot" in words:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(folder)
    shorter = ["--set", "requests=1000000"] if "fleet-day" in words else []
    code, printed, _ = cli(*words[1 : words.index(">") if ">" in words else None], *shorter)
    assert code == 0
    assert "violations" in printed or json.loads(printed)["patterns"]
    if "--export" in words:
        assert Path(words[words.index("--export") + 1]).is_file()
    if "--plot" in words:
        assert Path(words[words.index("--plot") + 1]).stat().st_size > 1000
