"""Memory of plans, measured in a process of its own."""

from __future__ import annotations

import pytest

from chrion import load
from chrion.graph.opened_model import OpenedModel
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.footprint import can_measure, measure_footprint
from chrion.scheduler import fixed_plan
from helpers import alternating_lanes, free_branches


@pytest.mark.skipif(not can_measure(), reason="only Linux reports the memory of a process")
def test_the_footprint_is_that_of_a_new_process() -> None:
    """A plan takes memory beside the plain session, and more so if its weights are large."""
    found = {}
    for size in (4, 1024):
        content = free_branches(size=size).SerializeToString()
        graph = load(content, {"x": (2, size)})
        config = SessionConfig(OpenedModel(content))
        found[size] = measure_footprint(config, graph, fixed_plan(graph, alternating_lanes(graph)))
        weights_mb = sum(graph.dag.weight_bytes) / 1e6
        assert found[size].plan_mb > 0.9 * weights_mb
        assert found[size].plain_mb > 1.0 + 0.9 * weights_mb
    assert found[1024].plan_mb > found[4].plan_mb
