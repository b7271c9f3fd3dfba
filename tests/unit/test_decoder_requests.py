"""Requests to decoders: distributions of arrivals and lengths, traces, and what a table cannot have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chrion.errors import ChrionError
from chrion.serving.simulator.decoder_requests import DecoderWorkload
from chrion.serving.simulator.decoder_scenario import build_decoder_scenario
from chrion.serving.simulator.iterations import draw_requests, simulate_decoder
from chrion.serving.simulator.scenario import ScenarioSource

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.5000000,374,44
2023-11-16 18:15:50.0000000,396,109
2023-11-16 18:15:51.0000000,879,55
2023-11-16 18:15:52.5000000,91,16
"""
CSV = """time_s,new_tokens,session,prompt_tokens,prefix,prefix_tokens
0,4,ann,30,system,20
1.5,5,,40,,
2,6,bob,50,system,20
9,7,ann,60,other,8
"""


def draw(folder: Path, **requests: Any) -> DecoderWorkload:
    """Return the requests of a table ``[requests]``."""
    content = {"decoder": {}, "requests": requests, "seed": 3}
    return draw_requests(build_decoder_scenario(ScenarioSource("test", content, folder)))


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    """Return the folder of a trace in the format of the Azure LLM inference traces."""
    (tmp_path / "trace.csv").write_text(AZURE, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(("kind", "variation"), [("poisson", 1.0), ("uniform", 0.0), ("gamma", 2.5)])
def test_times_between_arrivals(tmp_path: Path, kind: str, variation: float) -> None:
    """They have the mean of the rate, and a standard deviation over mean of 1, 0, or as given."""
    others = {"burst_cv": variation} if kind == "gamma" else {}
    gaps_ms = np.diff(draw(tmp_path, kind=kind, rate_per_s=4.0, requests=60_000, **others).arrivals_ms)
    assert gaps_ms.mean() == pytest.approx(250.0, rel=0.04)
    assert gaps_ms.std() / gaps_ms.mean() == pytest.approx(variation, rel=0.04, abs=1e-9)


def test_arrivals_follow_a_curve(tmp_path: Path) -> None:
    """Counts by hour are those of the Poisson process whose rate is the curve's; lengths are as without it."""
    curve = [[0, 0.5], [3600, 0.5], [3600, 4.0], [7200, 4.0], [7200, 1.0], [10_800, 2.0]]
    found = draw(tmp_path, rate_per_s=2.0, requests=86_400, curve=curve)
    counts = np.histogram(found.arrivals_ms, bins=3.6e6 * np.arange(7))[0]
    expected = np.array([3600, 28_800, 10_800] * 2)
    assert np.abs((counts - expected) / np.sqrt(expected)).max() < 3.5
    plain = draw(tmp_path, rate_per_s=2.0, requests=86_400)
    np.testing.assert_array_equal(found.prompts, plain.prompts)
    even = draw(tmp_path, kind="uniform", rate_per_s=1.0, requests=8, curve=[[0, 1], [2, 1], [2, 4], [4, 4]])
    assert even.arrivals_ms == pytest.approx([1000, 2000, 2250, 2500, 2750, 3000, 3250, 3500])


@pytest.mark.parametrize("lengths", ["lognormal", "gamma"])
def test_lengths_have_their_mean_and_variation(tmp_path: Path, lengths: str) -> None:
    """Within wide ends, both are as given; narrow ends clip lengths, and the mean is their middle if none is given."""
    shape = {"prompt_mean": 500.0, "prompt_cv": 0.8, "new_mean": 200.0, "new_cv": 1.5}
    wide = {"prompt_least": 1, "prompt_most": 10**6, "new_most": 10**6}
    drawn = draw(tmp_path, lengths=lengths, requests=60_000, **wide, **shape)
    for values, mean, variation in ((drawn.prompts, 500.0, 0.8), (drawn.new, 200.0, 1.5)):
        assert values.mean() == pytest.approx(mean, rel=0.03)
        assert values.std() / values.mean() == pytest.approx(variation, rel=0.06)
    clipped = draw(tmp_path, lengths=lengths, requests=5000, prompt_cv=0.1)
    assert clipped.prompts.mean() == pytest.approx((32 + 512) / 2, rel=0.02)
    assert 1 <= clipped.new.min() < clipped.new.max() == 128


def test_a_trace_is_replayed(azure: Path) -> None:
    """Times are relative to the part, scaled; tokens are those of the trace."""
    found = draw(azure, kind="azure-llm-2023", path="trace.csv")
    assert found.arrivals_ms == pytest.approx([0.0, 3500.0, 4500.0, 6000.0])
    assert found.prompts.tolist() == [374, 396, 879, 91]
    assert found.new.tolist() == [44, 109, 55, 16]
    part = draw(azure, kind="azure-llm-2023", path="trace.csv", start_s=3.0, length_s=2.0, time_scale=0.5)
    assert part.arrivals_ms == pytest.approx([250.0, 750.0])
    assert part.new.tolist() == [109, 55]


def test_a_rate_scale_copies_or_thins_requests(tmp_path: Path) -> None:
    """Twice the rate has two requests for each one, with its tokens and in order; a half has half of them."""
    lines = [f"{at},{at + 1},{at + 2}" for at in range(2000)]
    (tmp_path / "trace.csv").write_text("\n".join(["time_s,prompt_tokens,new_tokens", *lines]), encoding="utf-8")
    twice, half = (draw(tmp_path, kind="csv", path="trace.csv", rate_scale=scale) for scale in (2.0, 0.5))
    assert np.bincount(twice.prompts)[1:].tolist() == [2] * 2000
    assert (np.diff(twice.arrivals_ms) >= 0).all()
    assert (twice.new == twice.prompts + 1).all()
    assert len(half.arrivals_ms) == pytest.approx(1000, abs=100)


def test_lengths_of_a_trace_at_any_rate(azure: Path) -> None:
    """Requests with the tokens of random rows arrive at a rate of their own; a pair of lengths stays together."""
    drawn = draw(azure, lengths="azure-llm-2023", path="trace.csv", rate_per_s=50.0, requests=4000)
    pairs, counts = np.unique(np.stack([drawn.prompts, drawn.new], axis=1), axis=0, return_counts=True)
    assert pairs.tolist() == [[91, 16], [374, 44], [396, 109], [879, 55]]
    assert counts == pytest.approx([1000] * 4, rel=0.1)
    assert drawn.arrivals_ms[-1] == pytest.approx(80_000, rel=0.1)


def test_columns_of_a_csv_trace(tmp_path: Path) -> None:
    """Columns may have any order; sessions and prefixes are numbered, empty cells are none."""
    (tmp_path / "trace.csv").write_text(CSV, encoding="utf-8")
    found = draw(tmp_path, kind="csv", path="trace.csv")
    groups = [found.sessions, found.prefixes, found.prefix_tokens]
    assert [None if group is None else group.tolist() for group in groups] == [
        [0, -1, 1, 0],
        [0, -1, 0, 1],
        [20, 0, 20, 8],
    ]
    assert found.prompts.tolist() == [30, 40, 50, 60]


def test_sessions_and_prefixes_are_equally_likely(tmp_path: Path) -> None:
    """Each request has one of each; they change neither arrivals nor lengths."""
    content = {"sessions": 4, "prefixes": 5, "prefix_tokens": 16, "requests": 8000}
    source = ScenarioSource(
        "test",
        {"decoder": {}, "policies": ["iteration"], "batching": {"block": 16}, "requests": content},
        tmp_path,
    )
    found = draw_requests(build_decoder_scenario(source))
    plain = draw_requests(build_decoder_scenario(source.changed({"sessions": 0, "prefixes": 0, "prefix_tokens": 0})))
    assert found.sessions is not None
    assert found.prefixes is not None
    assert np.bincount(found.sessions) == pytest.approx([2000] * 4, rel=0.1)
    assert np.bincount(found.prefixes) == pytest.approx([1600] * 5, rel=0.1)
    np.testing.assert_array_equal(found.arrivals_ms, plain.arrivals_ms)
    np.testing.assert_array_equal(found.new, plain.new)


def test_a_prompt_longer_than_the_memory_is_refused(azure: Path) -> None:
    """Only the request of 879 + 55 tokens needs more than 800 slots; the others are served."""
    content = {
        "decoder": {"slots": 800},
        "requests": {"kind": "azure-llm-2023", "path": "trace.csv"},
    }
    for result in simulate_decoder(build_decoder_scenario(ScenarioSource("test", content, azure))):
        assert np.isnan(result.ends_ms).tolist() == [False, False, True, False]
        assert result.replicas.tolist() == [0, 0, -1, 0]


@pytest.mark.parametrize(
    ("requests", "trace", "message"),
    [
        ({"kind": "csv"}, "", "test.toml: requests.path is missing: 'csv' requires a trace file"),
        ({"kind": "csv", "path": "none.csv"}, "", "test.toml: requests.path: "),
        ({"kind": "csv", "path": "trace.csv"}, "time_s,prompt_tokens,new_tokens\n", "the trace has no requests"),
        ({"kind": "csv", "path": "trace.csv"}, "", "line 1: expected the header time_s or timestamp"),
        ({"kind": "csv", "path": "trace.csv"}, "time_s\n1\n", "expected columns prompt_tokens and new_tokens"),
        (
            {"kind": "csv", "path": "trace.csv"},
            "time_s,prompt_tokens,new_tokens\n1,5,0\n",
            "line 2, column new_tokens: expected a whole number of at least 1, found '0'",
        ),
        (
            {"kind": "csv", "path": "trace.csv"},
            "time_s,prompt_tokens,new_tokens\n1,,3\n",
            "line 2, column prompt_tokens: expected a whole number of at least 1, found ''",
        ),
        (
            {"kind": "csv", "path": "trace.csv"},
            "time_s,prompt_tokens,new_tokens,prefix,prefix_tokens\n1,5,3,a,-1\n",
            "line 2, column prefix_tokens: expected a whole number of at least 0, found '-1'",
        ),
        (
            {"kind": "azure-llm-2023", "path": "trace.csv"},
            AZURE.replace(",44", ",0"),
            "request 1 has no new tokens: expected at least one",
        ),
        (
            {"kind": "azure-llm-2023", "path": "trace.csv", "start_s": 60},
            AZURE,
            "requests: the trace has no requests from 60 s to its end",
        ),
        (
            {"kind": "azure-llm-2023", "path": "trace.csv", "rate_scale": 1e9},
            AZURE,
            "requests: 4e+09 requests: expected at most 1e+07",
        ),
        (
            {"kind": "azure-llm-2023", "path": "trace.csv", "rate_scale": 1e-9},
            AZURE,
            "requests.rate_scale = 1e-09: no request of the trace is left",
        ),
        (
            {"kind": "azure-llm-2023", "path": "trace.csv", "rate_per_s": 3},
            AZURE,
            "requests.rate_per_s: has no effect with kind = 'azure-llm-2023'",
        ),
        ({"path": "trace.csv"}, AZURE, "requests.path: has no effect with kind = 'poisson' and lengths = 'uniform'"),
        ({"rate_scale": 2}, "", "requests.rate_scale: has no effect with kind = 'poisson'"),
        (
            {"curve": [[5, 1], [9, 1]]},
            "",
            "requests.curve: expected two or more points [time_s, factor] from time 0 on",
        ),
        (
            {"kind": "azure-llm-2023", "path": "trace.csv", "curve": [[0, 1], [9, 1]]},
            AZURE,
            "requests.curve: has no effect with kind = 'azure-llm-2023'",
        ),
        ({"burst_cv": 2}, "", "requests.burst_cv: has no effect with kind = 'poisson'"),
        ({"new_mean": 20}, "", "requests.new_mean: has no effect with kind = 'poisson' and lengths = 'uniform'"),
        ({"lengths": "zipf"}, "", "requests.lengths: expected one of uniform, lognormal, gamma, csv, azure-llm-2023"),
    ],
)
def test_errors_say_what_is_wrong(tmp_path: Path, requests: dict[str, Any], trace: str, message: str) -> None:
    """Traces that are missing, damaged or empty, and keys without an effect, are refused in one line."""
    (tmp_path / "trace.csv").write_text(trace, encoding="utf-8")
    with pytest.raises(ChrionError) as found:
        draw(tmp_path, **requests)
    assert message in str(found.value)
    assert "\n" not in str(found.value)
