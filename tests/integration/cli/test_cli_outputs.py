"""Output files: checked before any work; replaced with ``--force`` only."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from chrion import Plan, Profile, load
from chrion.scheduler import fixed_plan
from chrion.zoo import build
from command_line import PAPER, Chrion, assert_each_refused, assert_refused
from helpers import alternating_lanes, branches
from seams.execution import interfere_at

#: Commands with an option that names an output file.
OUTPUTS = (
    ("profile", "m.onnx", "-o"),
    ("profile", "m.onnx", "--plot"),
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
)


def save_plan(folder: Path) -> None:
    """Write a plan, ``p.json``."""
    graph = load(branches())
    fixed_plan(graph, alternating_lanes(graph)).save(folder / "p.json")


@pytest.mark.usefixtures("model")
def test_an_output_that_cannot_be_written_is_detected_first(cli: Chrion, tmp_path: Path) -> None:
    """The command fails before it begins a step or replaces anything; the message names the option and the file."""
    cases = {
        "missing/x.png": "there is no folder missing (create it first: mkdir -p missing)",
        "folder.png/x/x.png": "there is no folder folder.png/x",
        "mine.png/x.png": "there is no folder mine.png",
        "folder.png": "it is a folder",
        "/dev/null": "not a regular file",
        "mine.png": "the file exists (add --force to replace it)",
        "/proc/x.png": "cannot be written: folder /proc accepts no new file",
    }
    save_plan(tmp_path)
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "mine.png").write_text("mine")
    for command in OUTPUTS:
        for path, about in cases.items():
            code, out, err = cli(*command, path)
            assert (code, out, err.count("\n")) == (2, "", 1), (command, path, err)
            assert err.startswith(f"chrion: error: {command[-1]}: {path}: "), (command, err)
            assert about in err, (command, path)
    assert (tmp_path / "mine.png").read_text() == "mine"


def test_a_wrong_input_is_named_before_an_output_that_exists(cli: Chrion, tmp_path: Path) -> None:
    """The file that exists would have to be replaced only if the command could run."""
    (tmp_path / "mine.png").write_text("mine")
    (tmp_path / "none.plan.json").write_text("mine")
    inputs = {"m.onnx": "none.onnx", "table7": "none", "p.json": "none.json"}
    commands = [(command[0], inputs[command[1]], command[2]) for command in OUTPUTS if command[1:2][0] in inputs]
    assert_each_refused(cli, [((*command, "mine.png"), command[1]) for command in commands])
    assert_refused(cli("partition", "none.onnx"), "none.onnx: cannot be read")
    assert_refused(cli("partition", "none.onnx", "--profile", "none.json"), "none.json: cannot be read")


def test_a_name_that_was_not_given_is_no_option_in_the_message(cli: Chrion, model: Path) -> None:
    """The message has the file alone, and the option that names another."""
    Path("m.plan.json").write_text("mine")
    assert_refused(
        cli("partition", str(model)),
        "error: m.plan.json: the file exists (add --force to replace it, or name another file with -o)",
    )
    assert Path("m.plan.json").read_text() == "mine"


@pytest.mark.usefixtures("model")
def test_a_picture_of_another_format_is_detected_first(cli: Chrion, tmp_path: Path) -> None:
    """A picture file with an unsupported suffix is refused first, and the message lists the formats."""
    save_plan(tmp_path)
    pictures = [command for command in OUTPUTS if command[-1] in {"--png", "--plot"}]
    assert_each_refused(cli, [((*command, "x.txt"), ".png, .svg, .pdf") for command in pictures])


def test_a_profile_measured_beside_other_processes_is_reported(
    cli: Chrion, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands profile and partition warn of unreliable costs on stderr, until they are measured undisturbed."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "cache"))
    warning = "warning: other processes or virtual machines used the cores; costs may be unreliable and are not cached"
    for command in ("profile", "partition"):
        with monkeypatch.context() as patch:
            interfere_at(patch, range(99))
            code, _, err = cli(command, str(model), "--cores", "1")
        assert (code, warning in err) == (0, True)
    for command in ("profile", "partition"):
        code, _, err = cli(command, str(model), "--cores", "1", "--force")
        assert (code, warning in err) == (0, False)


def test_a_stored_profile_is_drawn_and_not_written(cli: Chrion, model: Path) -> None:
    """With a stored profile only the picture is written; a measured one is written beside it."""
    code, out, _ = cli("profile", str(model), "--profile", PAPER, "--plot", "p.svg")
    assert code == 0
    assert "GTX 1080 Ti" in out
    assert "written: p.svg" in out
    assert not Path("m.profile.json").exists()
    assert "GTX 1080 Ti" in Path("p.svg").read_text(encoding="utf-8")
    out = cli("profile", str(model), "--cores", "1", "--plot", "p.svg", "--force")[1]
    assert "written: m.profile.json" in out
    assert "replaced: p.svg" in out


def test_a_profile_counts_the_operators_of_the_model(cli: Chrion, tmp_path: Path) -> None:
    """Chunks of recurrent layers are costed too, but the distinct operators that are counted are those of the model."""
    onnx.save(build("lstm", {"layers": 2, "seq": 8, "batch": 1, "io": 8, "chunk": 8}), tmp_path / "folded.onnx")
    graph = load("folded.onnx")
    out = cli("profile", "folded.onnx", "--hardware", "epyc-16")[1]
    assert out.startswith(f"{len(graph.dag)} operators, {len(set(graph.dag.signatures))} of them distinct, on ")
    assert len(Profile.load("folded.profile.json").operators) > len(graph.dag)


def test_force_replaces_plans_profiles_and_models(cli: Chrion, model: Path) -> None:
    """Each command refuses to replace its own file, and the weights beside it, and does with ``--force``."""
    for line in (
        ("partition", str(model), "--profile", PAPER, "--policy", "heft"),
        ("profile", str(model)),
        ("model", "rnn", "--seq", "2", "--layers", "1"),
    ):
        assert "written: " in cli(*line)[1]
        assert_refused(cli(*line), "add --force")
        assert "replaced: " in cli(*line, "--force")[1]
    Plan.load("m.plan.json")
    Path("d.onnx.data").write_bytes(b"mine")
    assert_refused(cli("model", "llama", "--layers", "1", "-o", "d.onnx", "--seq", "2"), "d.onnx.data: the file exists")


@pytest.mark.parametrize(("vocabulary", "stored"), [("300", False), ("4096", True)])
def test_a_file_of_weights_is_named_if_there_is_one(cli: Chrion, vocabulary: str, *, stored: bool) -> None:
    """Weights of a small decoder are all in the model's file."""
    out = cli("model", "llama-decoder", "-o", "d.onnx", "--layers", "1", "--vocabulary", vocabulary)[1]
    assert (Path("d.onnx.data").exists(), "weights in d.onnx.data" in out) == (stored, stored)


def test_force_replaces_pages_pictures_traces_and_points(cli: Chrion, model: Path, tmp_path: Path) -> None:
    """A page, picture, trace or list of points replaces an earlier one."""
    save_plan(tmp_path)
    options = (str(model), "--profile", PAPER, "--policy", "heft", "--alpha", "0,0.1", "--force")
    for word in ("written", "replaced"):
        out = cli("report", "p.json", "--html", "t.html", "--png", "t.svg", "--trace", "t.json", "--force")[1]
        assert out.count(f"{word}: ") == 3
        out = cli("sweep", *options, "-o", "s.json", "--png", "s.pdf")[1]
        assert out.count(f"{word}: ") == 2
