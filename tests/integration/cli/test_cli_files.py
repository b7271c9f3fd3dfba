"""``chrion model``, ``chrion devices``, ``chrion cache`` and ``chrion simulate --list``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from chrion import HybridSession
from chrion.cli.model import model_descriptions
from chrion.common.files import cache_folder
from chrion.zoo import build, names
from command_line import Chrion, assert_refused
from helpers import branches
from seams.commands import answer_on_a_terminal, offer_providers, set_driver


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an empty cache."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what a session stores in an empty cache."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHRION_CACHE", str(folder))
        HybridSession(branches(), tune="now").close()
    return folder


@pytest.mark.parametrize("has_driver", [False, True])
def test_devices_describes_the_machine(cli: Chrion, monkeypatch: pytest.MonkeyPatch, *, has_driver: bool) -> None:
    """The command lists lanes and providers, as a table and as JSON; a reason comes with what to install."""
    reason = "libcublasLt.so.13: cannot open"
    offer_providers(monkeypatch, {"CUDAExecutionProvider": reason, "CPUExecutionProvider": None})
    set_driver(monkeypatch, exists=has_driver)
    code, out, _ = cli("devices", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["cores"] == len(found["lanes"])
    cuda, cpu = found["providers"]
    assert (cpu["name"], cpu["works"], cpu["reason"]) == ("CPUExecutionProvider", True, None)
    assert (cuda["works"], cuda["reason"]) == (False, reason)
    assert ("pip install 'chrion[cuda]'" in cuda["remedy"]) == has_driver
    assert ("this machine has no GPU" in cuda["remedy"]) != has_driver
    assert found["provider"] is None
    out = cli("devices")[1]
    assert "CPUExecutionProvider" in out
    assert reason in out


def test_models_are_listed_with_descriptions_and_sizes(cli: Chrion) -> None:
    """Every builder and specification is listed, as a table and as JSON."""
    found = {m["name"]: m for m in json.loads(cli("model", "--list", "--json")[1])["models"]}
    assert list(found) == names()
    assert all(m["description"] and m["operators"] > 0 and m["size_mb"] > 0 for m in found.values())
    code, out, err = cli("model", "--list")
    assert (code, err) == (0, "")
    assert all(name in out for name in found)
    assert "LSTM layers" in out


@pytest.mark.parametrize("name", ["lstm", "lstm-io-32", "gru", "squeezenet", "googlenet"])
def test_stored_sizes_are_those_of_the_models(name: str) -> None:
    """The stored sizes equal the number of operators, and the megabytes of the file to one decimal."""
    built = build(name)
    (found,) = (entry for entry in model_descriptions() if entry["name"] == name)
    assert (found["operators"], found["size_mb"]) == (len(built.graph.node), round(built.ByteSize() / 1e6, 1))


def test_scenarios_are_listed_with_descriptions(cli: Chrion) -> None:
    """Every scenario is listed with its description, as a table and as JSON."""
    code, out, err = cli("simulate", "--list")
    assert (code, err) == (0, "")
    assert "table7" in out
    found = {s["name"]: s for s in json.loads(cli("simulate", "--list", "--json")[1])["scenarios"]}
    assert found["table7"]["models"] == 9
    assert "Azure" in found["azure-capacity"]["description"]


def test_the_cache_is_listed_by_kind_and_machine(cli: Chrion, cache: Path, entries: Path) -> None:
    """The list counts measurements of a profile and the files of a decision, with their sizes in bytes."""
    assert json.loads(cli("cache", "size", "--json")[1]) == {"entries": 0, "bytes": 0}
    shutil.copytree(entries, cache, dirs_exist_ok=True)
    found = json.loads(cli("cache", "list", "--json")[1])
    assert found["folder"] == str(cache) == str(cache_folder())
    kinds = {entry["kind"]: entry for entry in found["entries"]}
    assert set(kinds) == {"measurements", "decisions"}
    assert kinds["decisions"]["entries"] == 2  # by the graph, and by the model
    files = [path for path in cache.rglob("*.json") if path.is_file()]
    assert sum(entry["entries"] for entry in found["entries"]) == len(files)
    assert sum(entry["bytes"] for entry in found["entries"]) == sum(path.stat().st_size for path in files)
    assert str(cache) in cli("cache")[1]
    assert f"{len(files)} files" in cli("cache", "size")[1]


def test_the_cache_is_cleared_by_kind_after_a_confirmation(cli: Chrion, cache: Path, entries: Path) -> None:
    """Without a terminal ``--yes`` is required; files that are not Chrion's are kept."""
    shutil.copytree(entries, cache)
    (cache / "decisions" / "notes.json").write_text("mine")
    (cache / "mine.json").write_text("mine")
    assert_refused(cli("cache", "clear"), "--yes")
    code, _, err = cli("cache", "clear", "decisions", "--yes")
    assert (code, "deleted 2 files" in err) == (0, True)
    assert json.loads(cli("cache", "size", "decisions", "--json")[1])["entries"] == 0
    assert json.loads(cli("cache", "size", "measurements", "--json")[1])["entries"] > 0
    assert cli("cache", "clear", "--yes")[0] == 0
    kept = {path.name for path in cache.rglob("*") if path.is_file()}
    assert kept - {"tuning.lock"} == {"mine.json", "notes.json"}  # a process that tunes may hold the lock
    assert "nothing to delete" in cli("cache", "clear", "--yes")[2]


def test_a_negative_answer_deletes_nothing(cli: Chrion, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the answer is "no", nothing is deleted, and the exit code is 1."""
    entry = cache / "decisions" / f"{'0' * 32}.json"
    entry.parent.mkdir(parents=True)
    entry.write_text("{}")
    for answer, code in (("n", 1), ("y", 0)):
        answer_on_a_terminal(monkeypatch, answer)
        assert cli("cache", "clear")[0] == code
        assert entry.exists() == bool(code)


def test_a_model_without_large_weights_has_one_file(cli: Chrion, tmp_path: Path) -> None:
    """The command leaves no empty file of weights."""
    assert cli("model", "dlrm", "--rows", "50", "-o", str(tmp_path / "m.onnx"))[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_a_foreign_file_of_weights_is_not_replaced(cli: Chrion, tmp_path: Path) -> None:
    """The command refuses to replace the file of weights too, unless it is forced."""
    (tmp_path / "m.onnx.data").write_text("mine")
    command = ("model", "dlrm", "--rows", "50", "-o", str(tmp_path / "m.onnx"))
    assert_refused(cli(*command), "m.onnx.data")
    assert (tmp_path / "m.onnx.data").read_text() == "mine"
