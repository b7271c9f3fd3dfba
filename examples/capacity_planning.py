"""Find out how many copies of a model fit on one GPU, with and without a plan, by simulation."""

from __future__ import annotations

import tempfile
from pathlib import Path

import chrion
from chrion.serving.simulator import find_scenario, simulate
from chrion.zoo import build

PROFILE = Path(__file__).parent.parent / "profiles" / "gtx1080ti-paper.json"
SCENARIO = """
[[servers]]
gpu_memory_gb = 4.0

[workload]
rate_per_s = 5.0
requests = 4000

[slo]
factor = 2.0
of = "gpu"

[[models]]
name = "lstm"
copies = 1
variants.gpu = {plan = "lstm.plan.json", part = "accelerator_only"}
variants.hybrid = {plan = "lstm.plan.json"}
"""

# One plan file gives both variants: the plan itself, and the whole model on the GPU, which it was compared with.
folder = Path(tempfile.mkdtemp())
graph = chrion.load(build("lstm", {"layers": 12, "batch": 8, "seq": 24}))
plan = chrion.partition(graph, chrion.Profile.load(PROFILE), policy="heft")
plan.save(folder / "lstm.plan.json")
(folder / "scenario.toml").write_text(SCENARIO, encoding="utf-8")

source = find_scenario(str(folder / "scenario.toml"))
for copies in (2, 4, 6, 8, 12):
    results = simulate(source.changed({"models.lstm.copies": copies}).build())
    shown = ", ".join(f"{r.pattern}: {r.total.violation_rate:6.2%} violations" for r in results)
    print(f"{copies:2} models   {shown}")
