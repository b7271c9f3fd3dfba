"""Compare the datasheet estimate of this machine with measurements, and plans made from both.

    python scripts/bench_hardware.py --page docs/hardware.md

Measures the operators of models of the zoo, which takes some minutes unless they are in the cache; then times the plans
made from estimates and from measurements in turn. Fills the section ``measured`` of a page, or prints it.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from page_markers import fill_sections, markdown_table

from chrion.benchmark.latency import hybrid_candidate, time_candidates
from chrion.graph import Graph, load
from chrion.hardware import hardware
from chrion.profiler import OperatorCost, Profile, profile
from chrion.profiler.corrections import correct_profile
from chrion.profiler.hardware_profile import estimate_profile
from chrion.profiler.synthetic_inputs import synthetic_inputs
from chrion.scheduler import partition
from chrion.zoo import build

Parameters = Mapping[str, int | float]
Model = tuple[str, Parameters]

#: Models with whose measurements the constants of ``Kernels`` were chosen.
CHOSEN: tuple[Model, ...] = (
    *((name, {}) for name in ("lstm-baseline", "lstm-batch-1", "lstm-batch-16", "lstm-io-32", "lstm-io-128")),
    *((name, {}) for name in ("gru", "rnn", "deepfm", "squeezenet", "googlenet", "inception-v3", "nasnet-a-mobile")),
    *((name, {}) for name in ("darts-imagenet", "randwire-small", "bert-base", "t5-small", "seq2seq-luong")),
    *((name, {}) for name in ("squeezenet-batch-32", "googlenet-batch-32", "nasnet-a-large", "randwire-regular")),
    ("seq2seq", {"vocabulary": 8000, "hidden": 512}),
    ("lstm", {"io": 128, "layers": 6, "seq": 32, "chunk": 32}),
    ("gru", {"io": 256, "layers": 4, "seq": 32}),
)
#: Models that had no part in that.
OTHERS: tuple[Model, ...] = (
    ("dlrm", {}),
    ("moe", {"hidden": 512, "inner": 1792}),
    ("llama", {"layers": 2, "seq": 32}),
    ("lstm", {"io": 192, "layers": 4, "seq": 24, "batch": 4}),
    ("gru", {"io": 96, "layers": 4, "seq": 24, "chunk": 24}),
    ("googlenet", {"resolution": 160, "batch": 2}),
    ("squeezenet", {"resolution": 160, "batch": 4}),
    ("darts", {"resolution": 160}),
    ("bert", {"layers": 2, "hidden": 512, "heads": 8, "inner": 2048, "seq": 48}),
    ("seq2seq", {"hidden": 384, "vocabulary": 4000, "seq": 20}),
)
#: Models whose plans are timed.
PLANNED: tuple[Model, ...] = (
    ("lstm-baseline", {}),
    ("lstm-io-128", {}),
    ("lstm", {"io": 256, "layers": 4, "seq": 32}),
    ("gru", {"io": 256, "layers": 4, "seq": 32}),
    ("lstm", {"io": 128, "layers": 6, "seq": 32, "bidirectional": True}),
    ("googlenet", {}),
    ("inception-v3", {}),
    ("squeezenet", {}),
    ("randwire-small", {}),
    ("deepfm", {}),
)
#: Measured operators of each type from which corrections are fitted.
FEW = 3


@dataclass(frozen=True, slots=True)
class Judged:
    """One operator: its type, and its estimated, corrected and measured time on one core."""

    op_type: str
    estimated_ms: float
    measured_ms: float
    #: None if the correction was fitted from this operator.
    corrected_ms: float | None = None

    @property
    def error(self) -> float:
        """The relative error of the estimate."""
        return abs(self.estimated_ms / self.measured_ms - 1)


def judge(models: Iterable[Model], machine: str) -> dict[str, Judged]:
    """Return the distinct operators of some models by signature, estimated and measured."""
    found: dict[str, Judged] = {}
    for name, parameters in models:
        graph = load(build(name, parameters))
        start = time.perf_counter()
        measured = profile(graph)
        took_s = time.perf_counter() - start
        print(f"{graph.name}: {len(measured.operators)} operators measured in {took_s:.0f} s", file=sys.stderr)
        estimated = estimate_profile(graph, hardware(machine), measured.cores)
        for signature, cost in measured.operators.items():
            if cost.cpu_ms[0] > 0 and signature in estimated.operators:
                own_ms = estimated.operators[signature].cpu_ms[0]
                found.setdefault(signature, Judged(cost.op_type, own_ms, cost.cpu_ms[0]))
    return found


def correct(judged: Mapping[str, Judged], seed: int = 0) -> dict[str, Judged]:
    """Return the operators with corrected times; a few of each type, drawn at random, are measured for the fit."""
    pick = random.Random(seed)  # noqa: S311 - which operators are measured
    few = set[str]()
    for op_type in sorted({j.op_type for j in judged.values()}):
        same = sorted(s for s, j in judged.items() if j.op_type == op_type)
        few.update(pick.sample(same, min(FEW, len(same) // 2)))
    estimated = _as_profile({s: j.estimated_ms for s, j in judged.items()}, judged)
    measured = _as_profile({s: judged[s].measured_ms for s in few}, judged)
    corrected = correct_profile(estimated, measured).operators
    return {
        s: dataclasses.replace(j, corrected_ms=None if s in few else corrected[s].cpu_ms[0]) for s, j in judged.items()
    }


def _as_profile(times_ms: Mapping[str, float], judged: Mapping[str, Judged]) -> Profile:
    empty = estimate_profile(load(build("lstm", {"layers": 1, "seq": 1})), hardware("epyc-16"), 1)
    operators = {s: OperatorCost(judged[s].op_type, (ms,)) for s, ms in times_ms.items()}
    return dataclasses.replace(empty, operators=operators, _estimators={})


def error_table(judged: Mapping[str, Judged]) -> str:
    """Return the errors by operator type, the most frequent type first."""
    by_type: dict[str, list[Judged]] = {}
    for each in judged.values():
        by_type.setdefault(each.op_type, []).append(each)
    head = ("operator type", "operators", "median", "90th percentile", "estimated / measured, median")
    corrected_head = ("median before correction", "after")
    rows: list[Sequence[str]] = [(*head, *corrected_head)]
    ordered = sorted(by_type.items(), key=lambda item: (-len(item[1]), item[0]))
    for op_type, own in [("all", list(judged.values())), *ordered]:
        rows.append((op_type, *_error_cells(own)))
    return markdown_table(rows)


def _error_cells(own: Sequence[Judged]) -> tuple[str, ...]:
    ratio = statistics.median(j.estimated_ms / j.measured_ms for j in own)
    rest = [j for j in own if j.corrected_ms is not None]
    before = _percent([j.error for j in rest], 0.5)
    after = _percent([abs((j.corrected_ms or 0.0) / j.measured_ms - 1) for j in rest], 0.5)
    errors = [j.error for j in own]
    return str(len(own)), _percent(errors, 0.5), _percent(errors, 0.9), f"{ratio:.2f}", before, after


def _percent(errors: Sequence[float], share: float) -> str:
    """Return a quantile of errors as a percentage; empty without errors."""
    if not errors:
        return ""
    ordered = sorted(errors)
    at = share * (len(ordered) - 1)
    low, part = int(at), at - int(at)
    value = ordered[low] + part * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])
    return f"{value:.0%}"


def plan_table(models: Iterable[Model], machine: str, rounds: int) -> str:
    """Return the latencies of plans made from estimates and from measurements, timed in turn."""
    rows: list[Sequence[str]] = [
        ("model", "plan from measurements", "plan from estimates", "ratio", "predicted from estimates / measured")
    ]
    for name, parameters in models:
        graph = load(build(name, parameters))
        measured = profile(graph)
        estimated = estimate_profile(graph, hardware(machine), measured.cores)
        first, second, predicted_ms = _time_plans(graph, measured, estimated, rounds)
        label = " ".join([name, *(key if value is True else f"{key} {value}" for key, value in parameters.items())])
        figures = f"{first:.3f} ms", f"{second:.3f} ms", f"{second / first:.2f}", f"{predicted_ms / second:.2f}"
        rows.append((label, *figures))
        print(*rows[-1], sep="  ", file=sys.stderr)
    return markdown_table(rows)


def _time_plans(graph: Graph, measured: Profile, estimated: Profile, rounds: int) -> tuple[float, float, float]:
    """Return the latency of the plan from measurements, of that from estimates, and the latter's prediction."""
    feed = synthetic_inputs(graph)
    plans = {"measurements": partition(graph, measured), "estimates": partition(graph, estimated)}
    candidates = {name: hybrid_candidate(graph, plan, feed) for name, plan in plans.items()}
    timings = {timing.name: timing.median_ms for timing in time_candidates(candidates, rounds=rounds)}
    return timings["measurements"], timings["estimates"], plans["estimates"].predicted.latency_ms


def main() -> None:
    """Measure, and fill the page or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="epyc-9655-2", help="this machine, as --hardware names it")
    parser.add_argument("--rounds", type=int, default=9, help="trials of each plan (default: %(default)s)")
    parser.add_argument("--page", type=Path, help="page to fill")
    options = parser.parse_args()
    judged = judge(CHOSEN, options.machine)
    others = {s: j for s, j in judge(OTHERS, options.machine).items() if s not in judged}
    plans = plan_table(PLANNED, options.machine, options.rounds)
    content = _section(options.machine, error_table(correct(judged)), error_table(correct(others)), plans)
    if options.page:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(fill_sections(page, {"measured": content}), encoding="utf-8")
    else:
        print(content)


def _section(machine: str, chosen: str, others: str, plans: str) -> str:
    part = hardware(machine)
    return f"""
Estimates for {part.title} (`{machine}`) beside measurements on such a machine: the relative error of the time of each
distinct operator on one core. *Before* and *after* are for corrections fitted from at most {FEW} measured operators
of each type, over all other operators of the type.

Models with whose measurements the constants were chosen:

{chosen}

Other models, by the operators that the former do not have:

{others}

Plans of the default policy for two cores, made from measurements and from estimates, timed in turn:

{plans}
"""


if __name__ == "__main__":
    main()
