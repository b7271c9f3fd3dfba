"""Workloads: their rates, spreads and popularity, and the requests of traces."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from chrion.errors import ScenarioError
from chrion.serving.simulator.settings import WorkloadSpec
from chrion.serving.simulator.workload import (
    SyntheticWorkload,
    Workload,
    build_workload,
    map_functions,
    popularity,
    scale_counts,
)

NAMES = ("a", "b", "c")


def arrivals(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    chunks = list(workload.chunks())
    return np.concatenate([chunk.times_ms for chunk in chunks]), np.concatenate([chunk.models for chunk in chunks])


def replay(folder: Path, text: str, **spec: object) -> tuple[np.ndarray, np.ndarray]:
    """Return the arrivals of a trace in ms, and their models."""
    (folder / "t.csv").write_text(text)
    settings = WorkloadSpec(**{"kind": "csv", "path": "t.csv", **spec})  # type: ignore[arg-type]
    return arrivals(build_workload(settings, NAMES, [1.0] * 3, 4, folder))


@pytest.mark.parametrize(("kind", "cv"), [("uniform", 0.0), ("poisson", 1.0), ("gamma", 3.0)])
def test_gaps(kind: str, cv: float) -> None:
    """Gaps have the mean of the rate and the spread of their distribution; times do not decrease."""
    times, _ = arrivals(SyntheticWorkload(kind, 200_000, 25.0, 3.0, np.ones(1), 0))
    gaps = np.diff(times, prepend=0.0)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(40.0, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.05 * max(cv, 1e-6))


def test_zipf() -> None:
    """The model of rank r is requested in proportion to its share over r to the exponent."""
    chances = popularity([1.0, 1.0, 2.0], 1.0)
    assert chances == pytest.approx(np.array([1, 1 / 2, 2 / 3]) / (13 / 6))
    assert popularity([1.0, 1e12, 1.0], 1e12).tolist() == [1.0, 0.0, 0.0]
    _, models = arrivals(SyntheticWorkload("poisson", 100_000, 1.0, 1.0, chances, 0))
    assert np.bincount(models) / len(models) == pytest.approx(chances, abs=0.006)


def test_a_workload_is_the_same_each_time() -> None:
    """Iterating twice gives the same requests, so all patterns have the same ones."""
    workload = SyntheticWorkload("gamma", 70_000, 5.0, 2.0, np.ones(4) / 4, 9)
    first, second = arrivals(workload), arrivals(workload)
    assert np.array_equal(first[0], second[0])
    assert np.array_equal(first[1], second[1])


def test_csv_by_name(tmp_path: Path) -> None:
    """Functions are mapped to models by name, and seconds are converted to milliseconds."""
    times, models = replay(tmp_path, "time_s,model\n0.5,c\n2,a\n")
    assert times.tolist() == [500.0, 2000.0]
    assert models.tolist() == [2, 0]


def test_csv_of_an_unknown_model(tmp_path: Path) -> None:
    """A function that is not the name of a model is refused, with a hint at other mappings."""
    with pytest.raises(ScenarioError, match=r"requests 'x'.*round-robin"):
        replay(tmp_path, "time_s,model\n0.5,x\n")


def test_part_and_time_scale(tmp_path: Path) -> None:
    """The part extends from its start to before start + length; its times are then scaled."""
    text = "time_s,model\n0,a\n10,b\n15,c\n20,a\n"
    times, models = replay(tmp_path, text, start_s=10.0, length_s=10.0, time_scale=0.5)
    assert times.tolist() == [0.0, 2500.0]
    assert models.tolist() == [1, 2]


def test_an_empty_part_is_refused(tmp_path: Path) -> None:
    """A part of the trace without requests is refused."""
    with pytest.raises(ScenarioError, match="no requests from 5 s"):
        replay(tmp_path, "time_s,model\n0,a\n", start_s=5.0)


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.5])
def test_rate_scale(tmp_path: Path, scale: float) -> None:
    """The number of requests is scaled, models keep their shares, and copies precede the next request."""
    rows = "".join(f"{i},{NAMES[i % 3]}\n" for i in range(3000))
    times, models = replay(tmp_path, "time_s,model\n" + rows, rate_scale=scale)
    assert len(times) == pytest.approx(3000 * scale, rel=0.1)
    assert (np.diff(times) >= 0).all()
    assert (models == np.floor(times / 1000) % 3).all()


def test_minutes(tmp_path: Path) -> None:
    """Each request is within its minute, and counts are exact."""
    head = "HashOwner,HashApp,HashFunction,Trigger,480,481,482\n"
    text = head + "o,a,f,http,0,2,7\no,a,g,http,5,0,300\n"
    times, models = replay(tmp_path, text, kind="azure-functions-2019", mapping="round-robin")
    counts, _, _ = np.histogram2d(models, times, bins=[[0, 1, 2], [0, 60_000, 120_000, 180_000]])
    assert counts.tolist() == [[0, 2, 7], [5, 0, 300]]
    assert (np.diff(times) >= 0).all()


def test_part_of_minutes(tmp_path: Path) -> None:
    """A part of whole minutes is replayed; other parts are refused."""
    text = "HashOwner,HashApp,HashFunction,Trigger,1,2,3\no,a,f,http,1,2,4\n"
    spec = {"kind": "azure-functions-2019", "time_scale": 0.1}
    times, _ = replay(tmp_path, text, start_s=60.0, length_s=60.0, **spec)
    assert len(times) == 2
    assert times.max() <= 6000
    with pytest.raises(ScenarioError, match="whole minutes"):
        replay(tmp_path, text, start_s=30.0, **spec)


def test_llm_draws_models(tmp_path: Path) -> None:
    """The models of a trace without functions are drawn by share; other mappings are refused."""
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:46.68,1,1\n" * 3000
    times, models = replay(tmp_path, text, kind="azure-llm-2023")
    assert (times == 0).all()
    assert np.bincount(models) / 3000 == pytest.approx(np.ones(3) / 3, abs=0.04)
    with pytest.raises(ScenarioError, match="names no functions"):
        replay(tmp_path, text, kind="azure-llm-2023", mapping="rank")


def test_mappings() -> None:
    """``round-robin`` maps in the order of the file, ``rank`` by number of requests, ``hash`` by name alone."""
    totals = np.array([1, 50, 7, 9])
    functions = ("w", "x", "y", "z")
    assert map_functions(functions, totals, "round-robin", NAMES).tolist() == [0, 1, 2, 0]
    assert map_functions(functions, totals, "rank", NAMES).tolist() == [0, 0, 2, 1]
    whole = map_functions(functions, totals, "hash", NAMES)
    assert whole[2:].tolist() == map_functions(functions[2:], totals[2:], "hash", NAMES).tolist()


def test_scaled_counts_have_the_right_mean() -> None:
    """Integer parts are kept; fractions are rounded up with a probability equal to them."""
    scaled = scale_counts(np.full(20_000, 5.0), 0.45, np.random.default_rng(0))
    assert set(scaled.tolist()) == {2, 3}
    assert scaled.mean() == pytest.approx(2.25, abs=0.02)


def test_a_trace_needs_a_path(tmp_path: Path) -> None:
    """A trace without a path is refused."""
    with pytest.raises(ScenarioError, match=r"workload.path is missing"):
        build_workload(WorkloadSpec(kind="csv"), NAMES, [1.0] * 3, 0, tmp_path)


@pytest.mark.parametrize("rows", ["0,a\n1,b\n", "0,a\n"])
def test_a_large_scale_comes_in_bounded_chunks(tmp_path: Path, rows: str) -> None:
    """A scale of 1e9 yields chunks that fit into memory, in order of time and from the first request on."""
    (tmp_path / "t.csv").write_text(f"time_s,model\n{rows}")
    workload = build_workload(WorkloadSpec(kind="csv", path="t.csv", rate_scale=1e9), NAMES, [1.0] * 3, 4, tmp_path)
    first = [times for times, *_ in itertools.islice(workload.chunks(), 20)]
    assert max(map(len, first)) < 200_000
    assert (np.diff(np.concatenate(first)) >= 0).all()


def test_the_parts_of_a_large_minute_have_all_its_requests(tmp_path: Path) -> None:
    """A minute with 500 000 requests comes in parts, which are uniform over the minute and complete."""
    header = "HashOwner,HashApp,HashFunction,Trigger,1,2\n"
    (tmp_path / "t.csv").write_text(f"{header}o,a,f,http,400000,0\no,a,g,http,100000,7\n")
    spec = WorkloadSpec(kind="azure-functions-2019", path="t.csv")
    workload = build_workload(spec, NAMES, [1.0] * 3, 4, tmp_path)
    assert max(len(times) for times, *_ in workload.chunks()) < 100_000
    times, models = arrivals(workload)
    assert np.bincount(models).tolist() == [400_000, 100_007]
    assert np.histogram(times[:-7], 10, (0, 60_000))[0] == pytest.approx(np.full(10, 50_000), rel=0.02)
    assert (np.diff(times) >= 0).all()


@pytest.mark.parametrize("spec", [{"kind": "poisson", "requests": 10**11}, {"kind": "csv", "rate_scale": 1e11}])
def test_a_workload_that_never_ends_is_refused(tmp_path: Path, spec: dict[str, object]) -> None:
    """More than ten thousand million requests are refused, with the key to reduce."""
    (tmp_path / "t.csv").write_text("time_s,model\n0,a\n")
    settings = WorkloadSpec(path="t.csv", **spec)  # type: ignore[arg-type]
    with pytest.raises(ScenarioError, match=r"1e\+11 requests: expected at most 1e\+10 \(reduce r"):
        build_workload(settings, NAMES, [1.0] * 3, 4, tmp_path)


def test_a_default_model(tmp_path: Path) -> None:
    """Requests without a model are for the default model, or are drawn; without either they are refused."""
    assert replay(tmp_path, "time_s,model\n0,b\n1,\n", default_model="c")[1].tolist() == [1, 2]
    assert replay(tmp_path, "time_s\n0\n1\n2\n", default_model="a")[1].tolist() == [0, 0, 0]
    assert len(replay(tmp_path, "time_s\n0\n1\n", mapping="draw")[1]) == 2
    with pytest.raises(ScenarioError, match=r"requests without a model \(set workload.default_model"):
        replay(tmp_path, "time_s\n0\n1\n")
    with pytest.raises(ScenarioError, match=r"default_model = 'x': not a model \(known: a, b, c"):
        replay(tmp_path, "time_s\n0\n", default_model="x")
