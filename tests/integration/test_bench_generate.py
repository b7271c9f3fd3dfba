"""The benchmark of generation: what it compares computes the same, and a run under load gives its numbers."""

from __future__ import annotations

import bench_generate
import numpy as np
import pytest
from bench_generate import draw_shapes, plain_session, rectangle_run, run_load, selective_run

import chrion
from chrion import Generator
from chrion.generation.generator import open_engine
from decoder_support import small_decoder


@pytest.mark.parametrize("share", bench_generate.WORKLOADS.values())
def test_a_rectangle_computes_what_selective_batching_does(share: float) -> None:
    """The last logits of every request are equal, so that the times are those of the same work."""
    model = small_decoder("llama-decoder", context=256)
    engine, session = open_engine(chrion.load(model), threads=1), plain_session(model, 1)
    shapes = draw_shapes(np.random.default_rng(0), 8, share)
    assert sum(shape.past == 0 for shape in shapes) == round(8 * share)
    found = selective_run(engine, shapes)()
    expected = rectangle_run(session, engine.signature, shapes)()
    assert isinstance(found, list)
    assert isinstance(expected, list)
    np.testing.assert_allclose(np.stack(found), expected[0][:, -1], atol=1e-4)


def test_a_run_under_load_counts_all_requests() -> None:
    """Ten requests at a thousand per second end, at a positive latency per token."""
    with Generator(small_decoder("gpt2-decoder", context=256), threads=1) as generator:
        result = run_load(generator, 1000.0, 10, 8)
        assert generator.statistics().finished_requests == 10
    assert result.requests_per_s > 0
    assert result.median_ms_per_token > 0
