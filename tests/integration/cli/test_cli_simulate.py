"""``chrion simulate`` as a command, in a separate process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chrion import __version__


def chrion(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from chrion.cli import main; main()", "simulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)  # noqa: S603 # own words


def test_tables(tmp_path: Path) -> None:
    """A bundled scenario prints its three tables and one line of progress on stderr."""
    done = chrion("table7", "--set", "requests=500", folder=tmp_path)
    assert done.returncode == 0
    assert "table7: 9 models on 1 server" in done.stdout
    assert "By model" in done.stdout
    assert "By server" in done.stdout
    assert done.stderr == "chrion: simulating table7, 2000 requests ...\n"


def test_json_and_plot(tmp_path: Path) -> None:
    """``--json`` prints one object and nothing else; ``--plot`` writes a picture as well."""
    (tmp_path / "s.toml").write_text('[workload]\nkind = "csv"\npath = "t.csv"\n')
    (tmp_path / "t.csv").write_text("time_s,model\n0,baseline\n1,batch-1\n2,baseline\n")
    done = chrion("s.toml", "--json", "--plot", "p.png", folder=tmp_path)
    assert done.returncode == 0
    body = json.loads(done.stdout)
    assert [pattern["arrivals"] for pattern in body["patterns"]] == [3, 3, 3]
    assert [pattern["loads"] for pattern in body["patterns"]] == [2, 2, 2]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_sweep(tmp_path: Path) -> None:
    """A sweep runs its grid in two processes and lists the points in order."""
    options = ["--set", "requests=300", "--sweep", "gpu_memory_gb=9,12", "--sweep", "seed=1,2", "--workers", "2"]
    done = chrion("table7", *options, "--json", "--plot", "p.png", folder=tmp_path)
    assert done.returncode == 0
    values = [point["values"] for point in json.loads(done.stdout)["points"]]
    assert values == [{"gpu_memory_gb": memory, "seed": seed} for memory in (9, 12) for seed in (1, 2)]
    assert (tmp_path / "p.png").exists()


def test_sweep_table(tmp_path: Path) -> None:
    """Without ``--json`` a sweep is printed as a table with a column for the swept key."""
    done = chrion("table7", "--set", "requests=300", "--sweep", "cpu_cores=4,8", folder=tmp_path)
    assert done.returncode == 0
    assert "cpu_cores" in done.stdout
    assert "memory-optimal" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonesuch.toml"], "scenario 'nonesuch.toml' not found"),
        (["table7", "--set", "rate_per_s=-1"], "workload.rate_per_s = -1: expected a number above 0"),
        (["table7", "--set", "gpu_memory_gb=5"], "needs 1643 MB, the largest server has 1000 MB for models"),
        (["table7", "--sweep", "gpu_memory_gb"], "expected key=value,value"),
        (["table7", "--ray", "local"], "--ray: only a sweep runs on a cluster"),
        (["table7", "--plot", "no/such/folder.png"], "cannot be written"),
        (["table7", "--find", "servers"], "--find: --until is missing"),
        (["table7", "--until", "p99<=5ms"], "--until: --find is missing"),
        (["table7", "--find", "cores", "--until", "p99<=5ms"], "--find 'cores': expected one of servers, memory"),
        (["table7", "--replications", "1"], "--replications 1: expected at least 2"),
        (["table7", "--replications", "3", "--sweep", "seed=1,2"], "--sweep and --replications cannot be combined"),
        (["table7", "--replications", "3", "--export", "r.csv"], "--export cannot be combined with --replications"),
        (["table7", "--sweep", "seed=1,2", "--sweep", "seed=3"], "--sweep: key 'seed' occurs twice"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    """Bad input ends with exit code 2, one line on stderr and nothing on stdout."""
    done = chrion(*arguments, "--set", "requests=100", "--json", folder=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_find(tmp_path: Path) -> None:
    """``--find`` prints the limit of each pattern, as a table or as JSON."""
    words = ["table7", "--set", "requests=300", "--find", "servers", "--until", "swapping<=1%"]
    done = chrion(*words, "--json", folder=tmp_path)
    assert done.returncode == 0
    body = json.loads(done.stdout)
    assert [limit["pattern"] for limit in body["limits"]] == ["gpu", "latency-optimal", "memory-optimal", "shrink"]
    assert body["limits"][2]["found"]["amount"] == 1
    table = chrion(*words, "--set", "cost_per_hour=2", folder=tmp_path).stdout
    assert "memory-optimal" in table
    assert "2.00" in table


def test_replications(tmp_path: Path) -> None:
    """``--replications`` prints an interval of each figure, as a table or as JSON."""
    words = ["table7", "--set", "requests=300", "--replications", "3", "--workers", "1"]
    assert "95 % confidence" in chrion(*words, folder=tmp_path).stdout
    body = json.loads(chrion(*words, "--json", folder=tmp_path).stdout)
    assert body["intervals"]["gpu"]["violations"]["half_width"] > 0
    assert len(body["replications"]) == 3


def test_json_describes_its_scenario_and_export_writes_requests(tmp_path: Path) -> None:
    """The JSON of a run has the version and all values of the scenario; ``--export`` writes a line for each request."""
    done = chrion("table7", "--set", "requests=30", "--json", "--export", "r.csv", folder=tmp_path)
    body = json.loads(done.stdout)
    assert body["version"] == __version__
    assert body["content"]["workload"]["requests"] == 30
    assert len(body["content"]["models"]) == 9
    lines = (tmp_path / "r.csv").read_text().splitlines()
    assert len(lines) == 1 + 4 * 30
    assert chrion("table7", "--set", "requests=20", "--export", "r.csv", folder=tmp_path).returncode == 0
    (tmp_path / "other.csv").write_text("a,b\n")
    refused = chrion("table7", "--set", "requests=20", "--export", "other.csv", folder=tmp_path)
    assert refused.returncode == 2
    assert "add --force" in refused.stderr
