"""Profile files, and the cost matrices of a profile for a graph."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.errors import ProfileError
from chrion.graph import Dag
from chrion.profiler import CopyCost, OperatorCost, Profile
from chrion.profiler.profiles import PlainLatency
from helpers import MACHINE

NAN, INFINITE = float("nan"), float("inf")
PROFILE = Profile(
    machine=MACHINE,
    cores=2,
    accelerator="SomeExecutionProvider",
    operators={
        "0": OperatorCost("Relu", (1.0, 1.5), 0.25, 1_000_000, 0.125, 8.0, 16),
        "1": OperatorCost("LSTM", (2.0, 3.0), None, wide_ms=(1.25,)),
    },
    upload=CopyCost(0.5, 1e-6),
    download=CopyCost(0.25, 2e-6),
    handoff_ms=0.01,
    dispatch_ms=0.02,
    base_memory_mb=345.0,
    cache_bytes=1 << 20,
    reload_ms_per_byte=5e-8,
    wake_ms=0.03,
    plain={"a digest": PlainLatency(2, 1.5)},
    notes=("a note",),
)
DAG = Dag.from_edges(2, [(0, 1)], [4_000_000])


def test_the_repr_of_a_profile_is_one_line() -> None:
    """It has the number of operators and the machine, but no costs."""
    assert repr(PROFILE) == f"<Profile of 2 operators on {MACHINE}>"


def test_a_profile_is_read_as_written(tmp_path: Path) -> None:
    """The profile that is read equals the one that was written."""
    PROFILE.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == PROFILE
    assert json.loads((tmp_path / "p.json").read_text())["fingerprint"] == MACHINE.fingerprint


def test_a_profile_without_operators_is_read_as_written(tmp_path: Path) -> None:
    """A profile with an empty table of operators is valid."""
    empty = replace(PROFILE, operators={}, accelerator=None)
    empty.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == empty


TIMES = st.floats(0, 1e9)


@given(
    costs=st.dictionaries(
        st.text(max_size=9),
        st.builds(
            OperatorCost,
            st.text(max_size=5),
            st.tuples(TIMES, TIMES),
            st.none() | TIMES,
            st.integers(0, 2**62),
            TIMES,
            TIMES,
            st.integers(0, 2**62),
            st.just(()) | st.tuples(TIMES),
        ),
        max_size=4,
    ),
    handoff_ms=TIMES,
)
def test_any_profile_is_read_as_written(
    tmp_path_factory: pytest.TempPathFactory, costs: dict[str, OperatorCost], handoff_ms: float
) -> None:
    """Profiles with any signatures and figures are read as they were written."""
    profile = replace(PROFILE, operators=costs, handoff_ms=handoff_ms)
    path = tmp_path_factory.mktemp("profiles") / "p.json"
    profile.save(path)
    assert Profile.load(path) == profile


def test_costs_are_the_matrices() -> None:
    """W, M, C and b of measured signatures equal the measurements."""
    costs = PROFILE.costs(DAG)
    assert costs.accelerator_ms == (0.25, INFINITE)
    assert costs.cpu_ms == ((1.0, 2.0), (1.5, 3.0))
    assert (costs.memory[0].inputs_mb, costs.memory[0].outputs_mb, costs.memory[0].ephemeral_mb) == (0.0, 4.0, 1.0)
    assert (costs.memory[1].inputs_mb, costs.memory[1].outputs_mb) == (4.0, 0.0)
    assert (costs.upload.ms(4_000_000), costs.download.ms(4_000_000)) == (4.5, 8.25)
    assert (costs.handoff_ms, costs.dispatch_ms, costs.base_memory_mb, costs.cores) == (0.01, 0.02, 345.0, 2)
    assert (costs.widths, costs.wide_ms, costs.wake_ms) == ((2,), ((1.0, 1.25),), 0.03)
    assert PROFILE.costs(DAG, 1).cpu_ms == ((1.0, 2.0),)
    assert PROFILE.costs(DAG, 1).widths == ()
    assert PROFILE.missing(DAG) == ()


@pytest.mark.parametrize("cores", [-1, 3])
def test_more_cores_than_measured_are_refused(cores: int) -> None:
    """Costs for more cores than a profile has measured are refused."""
    with pytest.raises(ProfileError, match="cores"):
        PROFILE.costs(DAG, cores)


def test_a_profile_without_operators_has_no_costs() -> None:
    """Costs of a profile without operators are refused, since estimates have no basis."""
    with pytest.raises(ProfileError, match="no operator"):
        replace(PROFILE, operators={}).costs(DAG)


def test_missing_signatures_are_estimated_from_their_type() -> None:
    """Relus of 1 and 2 ms for 100 and 200 bytes predict 4 ms for 400; the time of unsupported LSTMs stays infinite."""
    known = {
        "a": OperatorCost("Relu", (1.0, 2.0), 0.5, bytes=100),
        "b": OperatorCost("Relu", (2.0, 4.0), 1.0, bytes=200),
        "c": OperatorCost("LSTM", (50.0, 60.0), None, bytes=100),
    }
    dag = replace(
        Dag.from_edges(2, []), op_types=("Relu", "LSTM"), input_bytes=(400, 100), signatures=("new relu", "new lstm")
    )
    profile = replace(PROFILE, operators=known)
    costs = profile.costs(dag)
    assert profile.missing(dag) == (0, 1)
    assert costs.cpu_ms[0] == pytest.approx((4.0, 50.0))
    assert costs.cpu_ms[1] == pytest.approx((8.0, 60.0))
    assert costs.accelerator_ms is not None
    assert costs.accelerator_ms[0] == pytest.approx(2.0)
    assert math.isinf(costs.accelerator_ms[1])


def test_estimates_without_comparable_measurements_are_extrapolated() -> None:
    """They are of a type that was not measured, or of far more arithmetic than the largest one measured of the type."""
    known = {"a": OperatorCost("LSTM", (1.0, 2.0), 0.5, flops=100.0), "b": OperatorCost("Concat", (2.0, 4.0), 1.0)}
    dag = replace(
        Dag.from_edges(5, []),
        op_types=("LSTM", "LSTM", "LSTM", "Conv", "Concat"),
        flops=(100.0, 200.0, 9600.0, 1.0, 1.0),
        signatures=("a", "twice", "96 steps", "conv", "concat"),
    )
    assert replace(PROFILE, operators=known).extrapolated(dag) == (2, 3)


#: The fingerprint follows from the machine, and files of the first release have no figures of caches.
NOT_NEEDED = {"fingerprint", "plain", "wake_ms", "precision", "cache_bytes", "reload_ms_per_byte"}


@pytest.mark.parametrize("key", [k for k in json.loads(PROFILE.to_json()) if k not in NOT_NEEDED])
def test_a_missing_key_is_refused(tmp_path: Path, key: str) -> None:
    """A profile without any one of its required keys is refused."""
    content = json.loads(PROFILE.to_json())
    del content[key]
    assert_refused(tmp_path, json.dumps(content))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema", "chrion.plan/1"),
        ("cores", 3),
        ("cores", "two"),
        ("cores", INFINITE),
        ("machine", {"cpu": "x"}),
        ("machine", []),
        ("operators", []),
        ("operators", {"0": 7}),
        ("upload", 7),
        ("upload", {"latency_ms": NAN, "ms_per_byte": 0.0}),
        ("download", {"latency_ms": -1.0, "ms_per_byte": 0.0}),
        ("download", {"latency_ms": 0.0}),
        ("handoff_ms", NAN),
        ("handoff_ms", -0.1),
        ("handoff_ms", "fast"),
        ("dispatch_ms", INFINITE),
        ("base_memory_mb", -1),
        ("cache_bytes", -1),
        ("cache_bytes", "1M"),
        ("reload_ms_per_byte", NAN),
        ("notes", 7),
        ("precision", "half"),
        ("plain", []),
        ("plain", {"a digest": {"threads": 0, "latency_ms": 1.0}}),
        ("plain", {"a digest": {"threads": 1, "latency_ms": NAN}}),
        ("plain", {"a digest": {"threads": 1}}),
    ],
)
def test_a_damaged_value_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    """Values of a wrong type, negative values, and infinite values are refused."""
    assert_refused(tmp_path, json.dumps(json.loads(PROFILE.to_json()) | {key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cpu_ms", [1.0]),
        ("cpu_ms", [1.0, NAN]),
        ("cpu_ms", [1.0, -1.0]),
        ("cpu_ms", [1.0, "x"]),
        ("cpu_ms", None),
        ("accelerator_ms", NAN),
        ("accelerator_ms", -1),
        ("accelerator_ms", "x"),
        ("ephemeral_bytes", -5),
        ("flops", 2**64),
        ("flops", 1e308),
        ("surplus", 1),
    ],
)
def test_a_damaged_operator_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    """The figures of operators must be finite and not negative, and times given for each number of cores."""
    content = json.loads(PROFILE.to_json())
    content["operators"]["0"][key] = value
    assert_refused(tmp_path, json.dumps(content))


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    """The first half of a profile is refused."""
    text = PROFILE.to_json()
    assert_refused(tmp_path, text[: len(text) // 2])


def assert_refused(tmp_path: Path, content: str) -> None:
    """Check that a file is refused with an error that names it."""
    (tmp_path / "damaged.json").write_text(content)
    with pytest.raises(ProfileError, match=r"damaged\.json"):
        Profile.load(tmp_path / "damaged.json")
