"""``chrion multi``: predicted and measured figures of several models."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from chrion.zoo import build
from command_line import Chrion, assert_each_refused, assert_refused
from helpers import FLOAT, free_branches, make_model, node, value
from seams.commands import watch_runs

SMALL = {"resolution": 64, "width": 0.25}


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    paths = [str(tmp_path / f"{name}.onnx") for name in ("squeezenet", "googlenet")]
    for path in paths:
        onnx.save(build(Path(path).stem, SMALL), path)
    return paths


def test_light_loads_are_sustained(cli: Chrion, models: list[str], tmp_path: Path) -> None:
    """Slow rates with long deadlines miss nothing, as predicted and as measured; the trace has all blocks."""
    options = ["--rates", "20,10", "--deadline", "5s", "--duration", "1s", "--block", "0.5ms"]
    code, out, err = cli("multi", *models, *options, "--json", "--trace", "trace.json")
    assert code == 0, err
    content = json.loads(out)
    assert (content["policy"], content["rates"]) == ("edf", {"squeezenet": 20.0, "googlenet": 10.0})
    for title in ("predicted", "measured"):
        result = content[title]
        assert result["sustained"]
        assert {name: own["tasks"] for name, own in result["models"].items()} == {"squeezenet": 20, "googlenet": 10}
        assert all(own["missed"] == 0 and own["p99_ms"] >= own["p50_ms"] > 0 for own in result["models"].values())
        assert 0 < result["utilisation"] <= 1
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["name"] for e in events if e["ph"] == "X"} == {"squeezenet", "googlenet"}


@pytest.mark.parametrize("busy", [False, True])
def test_other_processes_on_the_cores_are_reported(
    cli: Chrion, models: list[str], monkeypatch: pytest.MonkeyPatch, *, busy: bool
) -> None:
    """Whoever reads that rates are not sustained learns that the machine may be the reason."""
    watch_runs(monkeypatch, busy=busy)
    words = ["multi", models[0], "--rates", "10", "--duration", "200ms"]
    assert ("the machine was too busy for a reliable comparison: repeat it" in cli(*words)[1]) is busy
    content = json.loads(cli(*words, "--json")[1])
    assert content["interference"] is busy
    assert content["shapes"] == {"squeezenet": {"X": [1, 3, 64, 64]}}


def test_priorities_decide(cli: Chrion, models: list[str]) -> None:
    """Beside a model that takes all of the time, one of a higher priority misses less than of a lower one."""
    words = ["--rates", "40,20000", "--deadline", "50ms,1s", "--duration", "200ms", "--cores", "1"]
    words += ["--policy", "priority"]

    def missed(priorities: str) -> float:
        out = cli("multi", models[1], models[0], *words, "--priorities", priorities, "--queue", "2000", "--json")[1]
        return float(json.loads(out)["predicted"]["models"]["googlenet"]["missed"])

    assert missed("0,1") < missed("1,0")
    assert_refused(cli("multi", *models, "--rates", "1", "--priorities", "0,1"), "only with --policy priority")
    wrong = ("--policy", "priority", "--priorities", "0,-1")
    assert_refused(cli("multi", *models, "--rates", "1", *wrong), "'-1' is not a whole number")


def test_free_dimensions_have_the_sizes_that_are_given(cli: Chrion, models: list[str]) -> None:
    """A warning names those that have none; a name of no model is refused."""
    onnx.save(free_branches(), "free.onnx")
    words = ["multi", "free.onnx", models[0], "--rates", "10", "--duration", "200ms"]
    _, _, err = cli(*words)
    assert "warning: free: free dimensions have size 1: x (" in err
    code, out, err = cli(*words, "--shape", "x=3x4")
    assert code == 0, err
    assert "warning" not in err
    assert "free dimensions" not in out
    assert_refused(cli(*words, "--shape", "q=3"), "no model in blocks has an input or a free dimension 'q'")


def test_a_model_that_never_runs_is_an_error(cli: Chrion, models: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """One line names the model, the operator and what may help; onnxruntime's own lines do not come before it."""
    nodes = [node("Reshape", ["x", "shape"], ["y"], name="pairs")]
    shape = {"shape": np.array([2, 3])}
    onnx.save(make_model(nodes, [value("x", FLOAT, ["n"])], [value("y", FLOAT, [2, 3])], shape), "pairs.onnx")
    words = ["--rates", "10", "--duration", "200ms"]
    code, out, err = cli("multi", "pairs.onnx", models[0], *words)
    assert (code, out) == (2, "")
    error = err.splitlines()[-1]
    assert error.startswith("chrion: error: pairs: the model does not run on synthetic inputs: Reshape node 'pairs'")
    assert "--shape" in error
    assert "onnxruntime" not in capfd.readouterr().err
    assert cli("multi", "pairs.onnx", *words, "--shape", "x=6")[0] in {0, 3}
    table = {"keys_strings": ["a", "b"], "values_int64s": [0, 1]}
    lookup = [node("LabelEncoder", ["x"], ["k"], domain="ai.onnx.ml", default_int64=9, **table)]
    lookup += [node("Gather", ["w", "k"], ["y"], name="row")]
    model = make_model(lookup, [value("x", TensorProto.STRING, [1])], [value("y", FLOAT, [1])], {"w": np.ones(2, "f4")})
    model.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 2))
    onnx.save(model, "words.onnx")
    wrong = cli("multi", "words.onnx", *words)
    assert_refused(wrong, "words: the model does not run on synthetic inputs: Gather node 'row'")
    assert "--shape" not in wrong[2]


def test_overload_is_found(cli: Chrion, models: list[str]) -> None:
    """At a rate that no machine sustains, the exit code is 3 and the table says so."""
    code, out, err = cli("multi", models[0], "--rates", "20000", "--duration", "200ms", "--queue", "5")
    assert code == 3, err
    assert "not sustained" in out
    assert "squeezenet" in out


def test_rates_that_fit_are_found(cli: Chrion, models: list[str]) -> None:
    """``--find`` keeps the proportion of the rates, and predicts that they are sustained."""
    options = ["--rates", "10,5", "--deadline", "1s", "--duration", "500ms", "--find", "--json"]
    _, out, err = cli("multi", *models, *options)
    content = json.loads(out)
    assert content["predicted"]["sustained"], err
    assert content["rates"]["squeezenet"] == pytest.approx(2 * content["rates"]["googlenet"])


@pytest.mark.parametrize("load", ["random", "bursty", "stepping"])
def test_loads_are_served(cli: Chrion, models: list[str], load: str) -> None:
    """Every load has tasks of each model, predicted and measured alike."""
    options = ["--rates", "40", "--deadline", "5s", "--duration", "500ms", "--load", load, "--json"]
    _, out, err = cli("multi", *models, *options)
    content = json.loads(out)
    assert content["predicted"]["sustained"], err
    counts = [{n: own["tasks"] for n, own in content[t]["models"].items()} for t in ("predicted", "measured")]
    assert counts[0] == counts[1]
    assert all(count > 0 for count in counts[0].values())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
def test_models_in_the_background_are_predicted(cli: Chrion, models: list[str]) -> None:
    """Whole models run side by side on threads of their classes, as predicted; rates that fit are found."""
    options = ["--rates", "20,10", "--deadline", "5s,10s", "--duration", "500ms", "--background"]
    code, out, err = cli("multi", *models, *options, "--json", "--find")
    content = json.loads(out)
    assert content["predicted"]["sustained"], err
    assert content["rates"]["squeezenet"] == pytest.approx(2 * content["rates"]["googlenet"])
    code, out, err = cli("multi", *models, *options)
    assert (code, "niceness 19" in out) == (0, True), err


def test_a_model_runs_on_an_accelerator(cli: Chrion, models: list[str]) -> None:
    """The provider of each model is chosen by its position; ``cpu`` stands in for an accelerator."""
    options = ["--rates", "10", "--duration", "500ms", "--accelerator", "none,cpu"]
    code, out, err = cli("multi", *models, *options)
    assert code == 0, err
    assert "on CPUExecutionProvider" in out


def test_loads_are_estimated_for_another_machine(cli: Chrion, models: list[str]) -> None:
    """On 16 cores of a datasheet a task alone takes as long as its plan on one of them, and nothing is measured."""
    options = ["--hardware", "epyc-16", "--rates", "1", "--json"]
    code, out, err = cli("multi", *models, *options)
    assert code == 0, err
    content = json.loads(out)
    assert (content["lanes"], "measured" in content) == (16, False)
    assert "measuring" not in err
    for path in models:
        _, out, _ = cli("partition", path, *options[:2], "--cores", "1", "--policy", "heft", "--json", "--force")
        expected = json.loads(out)["latency_ms"]
        assert content["estimated"]["models"][Path(path).stem]["p50_ms"] == pytest.approx(expected, rel=0.1)
    words = ["multi", *models, *options[:2], "--cores", "1", "--rates", "10,5", "--deadline", "1s", "--duration", "5s"]
    found = json.loads(cli(*words, "--find", "--json")[1])["rates"]["squeezenet"]
    rates = f"{3 * found},{1.5 * found}"
    code, out, err = cli(*words, "--rates", rates)
    assert (code, "estimated: not sustained" in out) == (3, True), err
    assert "all times are estimated from datasheets: epyc-16" in out


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (("cam/1/model.onnx", "lidar/2/model.onnx"), ["cam", "lidar"]),
        (("cam/model.onnx", "x/../lidar/model.onnx"), ["cam", "lidar"]),
        (("a.onnx", "a.onnx"), ["a", "a-2"]),
        (("b/1.onnx", "c/2.onnx"), ["1", "2"]),
        (("a.onnx", "b/c.onnx"), ["a", "c"]),
    ],
)
def test_models_are_named(cli: Chrion, models: list[str], files: tuple[str, ...], names: list[str]) -> None:
    """By their files; in a repository, by their folders."""
    for file in files:
        Path("x").mkdir(exist_ok=True)
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_bytes(Path(models[0]).read_bytes())
    code, out, err = cli("multi", *files, "--rates", "1", "--duration", "1s", "--hardware", "epyc-16", "--json")
    assert code == 0, err
    assert list(json.loads(out)["rates"]) == names


def test_wrong_options_are_refused(cli: Chrion, models: list[str]) -> None:
    """Rates, deadlines, policies and files are checked; each error is one line."""
    assert_each_refused(
        cli,
        [
            (["multi", *models, "--rates", "1,2,3"], "expected 1 or 2 values"),
            (["multi", *models, "--rates", "fast"], "'fast' is not a number above zero"),
            (["multi", *models, "--rates", "1", "--deadline", "soon"], "deadline"),
            (["multi", *models, "--rates", "1", "--policy", "eddf"], "did you mean 'edf'"),
            (["multi", *models, "--rates", "1", "--drop", "all"], "drop"),
            (["multi", *models, "--rates", "1", "--load", "burst"], "did you mean 'bursty'"),
            (["multi", *models, "--rates", "1", "--background"], "different priorities or deadlines"),
            (["multi", *models, "--rates", "1", "--block", "10us"], "block: expected at least 0.1 ms"),
            (["multi", *models, "--rates", "1", "--accelerator", "a,b,c"], "expected 1 or 2 values"),
            (["multi", *models, "--rates", "1", "--accelerator", "gpux"], "unknown accelerator 'gpux'"),
            (["multi", *models, "--rates", "1", "--hardware", "epyc-17"], "epyc-16"),
            (["multi", *models, "--rates", "1", "--hardware", "epyc-16", "--cores", "17"], "cores"),
            (["multi", *models, "--rates", "1", "--hardware", "epyc-16", "--trace", "x.json"], "--trace: not allowed"),
            (["multi", *models, "--rates", "1", "--hardware", "epyc-16", "--accelerator", "cuda"], "runs no model"),
            (["multi", "absent.onnx", "--rates", "1"], "absent.onnx"),
            (["multi", *models, "--rates", "1", "--trace", "none/x.json"], "no folder"),
        ],
    )
