"""Plan an LSTM for several budgets of GPU memory, from a stored profile of the paper's machine.

No GPU is needed: all figures are predictions. Operators that the profile does not contain are estimated.
"""

from __future__ import annotations

from pathlib import Path

import chrion
from chrion.zoo import build

PROFILE = Path(__file__).parent.parent / "profiles" / "gtx1080ti-paper.json"

graph = chrion.load(build("lstm", {"layers": 12, "batch": 8, "seq": 4, "io": 512}))
profile = chrion.Profile.load(PROFILE)

for budget in (None, "440MB", "0MB"):
    plan = chrion.partition(graph, profile, gpu_budget=budget)
    predicted = plan.predicted
    print(
        f"budget {budget or 'none':>5}: {predicted.latency_ms:4.1f} ms, {predicted.resident_mb:5.1f} MB resident, "
        f"{plan.on_cpu:2} of {len(plan.operators)} operators on CPU cores, fits: {plan.meets_budget}"
    )
