"""Engines and scenarios for tests of the simulator."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chrion.serving.manager.policies import EVICTION, LOAD_ORDER, ROUTING
from chrion.serving.manager.policy_settings import ServerPolicies
from chrion.serving.simulator.engine import ClusterEngine, EngineConfig
from chrion.serving.simulator.scenario import Scenario, ScenarioSource
from chrion.serving.simulator.settings import ServerSpec
from chrion.serving.variants import Variant


def engine_of(  # every test sets another parameter
    variants: Sequence[Variant],
    *,
    spec: ServerSpec | None = None,
    eviction: str = "lru",
    admission: str = "none",
    slo_ms: float = math.inf,
    seed: int = 1,
    rules: Mapping[str, Any] | None = None,
    **setting: Any,
) -> ClusterEngine:
    """Return an engine of one server with simple policies, and some others."""
    size = len(variants)
    policies = ServerPolicies(
        rank=EVICTION[eviction],
        order=LOAD_ORDER["fifo"],
        deadlines=admission == "deadline",
        slo_ms=[slo_ms] * size,
        weights=[1.0] * size,
        pinned=[False] * size,
        **(rules or {}),
    )
    servers = [spec or ServerSpec()]
    return ClusterEngine(EngineConfig(servers, variants, policies, ROUTING["least-loaded"], seed, **setting))


def scenario_of(
    variant: dict[str, Any], models: int = 1, tables: Mapping[str, Any] | None = None, **sets: Any
) -> Scenario:
    """Return a scenario of equal models on one server without fixed times of loads, with further tables."""
    entries = [{"name": f"m{i}", "variants": {"gpu": variant}} for i in range(models)]
    content = {"servers": [{"load_fixed_ms": 0.0}], "models": entries, "slo": {"latency_ms": 1e9}, **(tables or {})}
    return ScenarioSource("test", content, Path()).changed(sets).build()
