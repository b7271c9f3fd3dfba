"""``chrion multi``: predicted and measured figures of several models."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from chrion.zoo import build
from command_line import Chrion, assert_each_refused

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
            (["multi", "absent.onnx", "--rates", "1"], "absent.onnx"),
            (["multi", *models, "--rates", "1", "--trace", "none/x.json"], "no folder"),
        ],
    )
