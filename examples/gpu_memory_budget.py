"""Plan the paper's LSTM for several budgets of GPU memory, from a stored profile of the paper's machine.

No GPU is needed: all figures are predictions.
"""

from __future__ import annotations

from pathlib import Path

import chrion
from chrion.zoo import build

PROFILE = Path(__file__).parent.parent / "profiles" / "gtx1080ti-paper.json"

graph = chrion.load(build("lstm", {"layers": 12, "batch": 8, "seq": 24}))
profile = chrion.Profile.load(PROFILE)

for budget in (None, "320MB", "300MB", "0MB"):
    plan = chrion.partition(graph, profile, gpu_budget=budget, policy="heft")
    predicted = plan.predicted
    print(
        f"budget {budget or 'none':>6}: {predicted.latency_ms:5.1f} ms, {predicted.resident_mb:6.1f} MB resident, "
        f"{plan.on_cpu} of {len(plan.operators)} operators on CPU cores, fits: {plan.meets_budget}"
    )
