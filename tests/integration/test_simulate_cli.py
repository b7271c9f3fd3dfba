"""``chrion simulate`` as a command, in a separate process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


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
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    """Bad input ends with exit code 2, one line on stderr and nothing on stdout."""
    done = chrion(*arguments, "--set", "requests=100", "--json", folder=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
