"""Output files: checked before any work; only Chrion's own files are replaced without ``--force``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chrion import Plan
from command_line import Chrion, assert_refused

#: Commands with an option that names an output file.
OUTPUTS = [
    ("profile", "m.onnx", "-o"),
    ("partition", "m.onnx", "-o"),
    ("sweep", "m.onnx", "-o"),
    ("sweep", "m.onnx", "--png"),
    ("compare", "m.onnx", "--plot"),
    ("simulate", "table7", "--plot"),
    ("report", "p.json", "--html"),
    ("report", "p.json", "--png"),
    ("report", "p.json", "--trace"),
    ("model", "rnn", "-o"),
    ("demo", "-o"),
]


@pytest.fixture
def _files(cli: Chrion, model: Path) -> None:
    assert cli("partition", str(model), "-o", "p.json")[0] == 0


@pytest.fixture
def _no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("worked before the output was checked")

    for name in ("steps.load", "demo.zoo.build", "model.zoo.build", "simulate.find_scenario", "report.show"):
        monkeypatch.setattr(f"chrion.cli.{name}", refuse)


@pytest.mark.parametrize("command", OUTPUTS, ids=" ".join)
@pytest.mark.parametrize(
    ("path", "about"),
    [
        ("missing/x.png", "there is no folder missing (create it first: mkdir -p missing)"),
        ("m.onnx/x.png", "there is no folder m.onnx"),
        ("folder.png", "it is a folder"),
        ("/dev/null", "not a regular file"),
        ("mine.png", "the file exists, and this command did not write it (add --force to replace it)"),
        ("/proc/x.png", "cannot be written: folder /proc accepts no new file"),
    ],
)
@pytest.mark.usefixtures("_files", "_no_work")
def test_an_output_that_cannot_be_written_is_detected_first(
    cli: Chrion, tmp_path: Path, command: tuple[str, ...], path: str, about: str
) -> None:
    """The command fails before it loads, measures or replaces anything; the message names the option and the file."""
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "mine.png").write_text("mine")
    result = cli(*command, path)
    assert_refused(result, about)
    assert f"{command[-1]}: {path}" in result[2]
    assert (tmp_path / "mine.png").read_text() == "mine"


@pytest.mark.parametrize("command", [c for c in OUTPUTS if c[-1] in {"--png", "--plot"}], ids=" ".join)
@pytest.mark.usefixtures("_files", "_no_work")
def test_a_picture_of_another_format_is_detected_first(cli: Chrion, command: tuple[str, ...]) -> None:
    """A picture file with an unsupported suffix is refused first, and the message lists the formats."""
    assert_refused(cli(*command, "x.txt"), ".png, .svg, .pdf")


def test_plans_and_profiles_are_replaced_by_their_kind(cli: Chrion, model: Path) -> None:
    """A plan replaces a plan and a profile a profile, and the output says so.

    A file of another kind is not replaced.
    """
    assert "written: m.plan.json" in cli("partition", str(model))[1]
    assert "replaced: m.plan.json" in cli("partition", str(model))[1]
    assert "written: m.profile.json" in cli("profile", str(model))[1]
    assert "replaced: m.profile.json" in cli("profile", str(model))[1]
    assert_refused(cli("profile", str(model), "-o", "m.plan.json"), "--force")
    assert_refused(cli("partition", str(model), "-o", "m.onnx"), "--force")
    Plan.load("m.plan.json")


def test_force_replaces_any_file(cli: Chrion, model: Path) -> None:
    """With ``--force`` any file is replaced; an empty file is replaced without it."""
    Path("mine.json").write_text("mine")
    Path("empty.json").touch()
    assert cli("partition", str(model), "-o", "empty.json")[0] == 0
    assert cli("partition", str(model), "-o", "mine.json", "--force")[0] == 0
    assert Plan.load("mine.json").operators == Plan.load("empty.json").operators


def test_a_model_is_only_replaced_by_force(cli: Chrion) -> None:
    """An .onnx file, which may be the user's own, is replaced with ``--force`` only, and the new model is described."""
    options = ("model", "rnn", "--seq", "2", "--layers", "1", "-o", "r.onnx")
    assert cli(*options)[0] == 0
    before = Path("r.onnx").read_bytes()
    assert_refused(cli(*options, "--io", "8"), "--force")
    assert Path("r.onnx").read_bytes() == before
    code, out, _ = cli(*options, "--io", "8", "--force", "--json")
    assert code == 0
    assert json.loads(out)["bytes"] == len(Path("r.onnx").read_bytes()) != len(before)


@pytest.mark.usefixtures("_files")
def test_pages_pictures_traces_and_points_are_replaced_too(cli: Chrion) -> None:
    """A page, picture, trace or list of points replaces an earlier one that the command recognises."""
    for word in ("written", "replaced"):
        out = cli("report", "p.json", "--html", "t.html", "--png", "t.svg", "--trace", "t.json")[1]
        assert out.count(f"{word}: ") == 3
        out = cli("sweep", "m.onnx", "--alpha", "0,0.1", "-o", "s.json", "--png", "s.pdf")[1]
        assert out.count(f"{word}: ") == 2
