"""Compare the datasheet estimate of this machine with measurements, and plans made from both.

    python scripts/bench_hardware.py -o docs/data

Measures the operators of models of the zoo, which takes some minutes unless they are in the cache; then times the plans
made from estimates and from measurements in turn. Writes the results ``hardware-errors``,
``hardware-corrections`` and ``hardware-plans``, or prints them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from command_arguments import add_output
from page_markers import markdown_table
from result_files import write_results

from chrion.graph import Graph, load
from chrion.graph.recurrent import unroll
from chrion.graph.work import NodeWork, node_work
from chrion.hardware import Processor, hardware
from chrion.profiler import Profile, profile
from chrion.profiler.chunk_costs import measured_chunks
from chrion.profiler.corrections import CorrectionSample, Factors, fit_factors
from chrion.profiler.datasheet import processor_parts
from chrion.profiler.hardware_profile import estimate_profile, require_processor
from chrion.profiler.synthetic_inputs import synthetic_inputs
from chrion.report.benchmark.latency import hybrid_candidate, time_candidates
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
    ("lstm", {"io": 256, "layers": 4, "seq": 32}),
    ("gru", {"io": 256, "layers": 4, "seq": 32}),
    ("squeezenet", {}),
    ("lstm-baseline", {}),
    ("googlenet", {}),
    ("lstm-io-128", {}),
    ("randwire-small", {}),
)
#: Measured operators of each type from which corrections are fitted.
FEW = 3
#: Processors whose estimates are corrected to this machine: its own, and others.
CORRECTED = ("epyc-9655-2", "epyc-16", "xeon-32", "laptop-8")
#: Numbers of measured operators, drawn from all, from which those corrections are fitted.
COUNTS = (10, 30, 100)
#: Draws of the measured operators; errors are medians over all draws.
DRAWS = 5


@dataclass(frozen=True, slots=True)
class Measured:
    """One operator: its type, the work of its nodes, and its measured time on one core."""

    op_type: str
    works: tuple[NodeWork, ...]
    measured_ms: float

    def sample(self, processor: Processor) -> CorrectionSample:
        """Return the operator with its estimate for a processor."""
        return CorrectionSample(
            self.op_type, tuple(processor_parts(work, processor) for work in self.works), self.measured_ms
        )


def measure(models: Iterable[Model]) -> dict[str, Measured]:
    """Return the distinct operators of some models by signature, those of chunks that are measured included."""
    found: dict[str, Measured] = {}
    for name, parameters in models:
        graph = load(build(name, parameters))
        start = time.perf_counter()
        costs = profile(graph).operators
        took_s = time.perf_counter() - start
        print(f"{graph.name}: {len(costs)} operators in {took_s:.0f} s", file=sys.stderr)
        for each in (graph, *(unroll(graph, chunk) for chunk in measured_chunks(graph))):
            for i, signature in enumerate(each.dag.signatures):
                if signature in costs and costs[signature].cpu_ms[0] > 0 and signature not in found:
                    nodes = (each.model.graph.node[at] for at in each.nodes[i])
                    works = tuple(node_work(node, each.values) for node in nodes)
                    found[signature] = Measured(each.dag.op_types[i], works, costs[signature].cpu_ms[0])
    return found


def error(sample: CorrectionSample, factors: Factors | None = None) -> float:
    """Return the relative error of an estimate, corrected by factors."""
    return abs((factors or Factors()).time_ms(sample.op_type, sample.parts) / sample.measured_ms - 1)


def error_table(samples: Sequence[CorrectionSample]) -> str:
    """Return the errors by operator type, the most frequent type first.

    Corrections are fitted from a few operators of each type, drawn at random, and judged by the others.
    """
    few = _few_of_each_type(samples)
    factors = fit_factors(few)
    by_type: dict[str, list[CorrectionSample]] = {}
    for each in samples:
        by_type.setdefault(each.op_type, []).append(each)
    head = ("operator type", "operators", "median", "90th percentile", "estimated / measured, median")
    rows: list[Sequence[str]] = [(*head, "median before correction", "after")]
    ordered = sorted(by_type.items(), key=lambda item: (-len(item[1]), item[0]))
    for op_type, own in [("all", list(samples)), *ordered]:
        errors = [error(each) for each in own]
        ratio = statistics.median(Factors().time_ms(each.op_type, each.parts) / each.measured_ms for each in own)
        rest = [each for each in own if each not in few]
        corrected = (_percent([error(each) for each in rest], 0.5), _percent([error(e, factors) for e in rest], 0.5))
        cells = (str(len(own)), _percent(errors, 0.5), _percent(errors, 0.9), f"{ratio:.2f}", *corrected)
        rows.append((op_type, *cells))
    return markdown_table(rows)


def _few_of_each_type(samples: Sequence[CorrectionSample], seed: int = 0) -> list[CorrectionSample]:
    """Return at most :data:`FEW` operators of each type, and at most half of them."""
    pick = random.Random(seed)  # noqa: S311 - which operators are measured
    few: list[CorrectionSample] = []
    for op_type in sorted({each.op_type for each in samples}):
        same = [each for each in samples if each.op_type == op_type]
        few += pick.sample(same, min(FEW, len(same) // 2))
    return few


def correction_table(operators: Sequence[Measured]) -> str:
    """Return the errors of several processors' estimates, before and after corrections, over all other operators."""
    rows: list[Sequence[str]] = [("estimated for", "error", "before", *(f"{count} measured" for count in COUNTS))]
    for name in CORRECTED:
        processor = require_processor(hardware(name))
        samples = [each.sample(processor) for each in operators]
        for label, share in (("median", 0.5), ("90th percentile", 0.9)):
            after = [_corrected_error(samples, count, share) for count in COUNTS]
            rows.append((f"`{name}`", label, _percent([error(each) for each in samples], share), *after))
    return markdown_table(rows)


def _corrected_error(samples: Sequence[CorrectionSample], count: int, share: float) -> str:
    """Return a quantile of the errors over the operators that the corrections are not fitted from."""
    errors: list[float] = []
    for seed in range(DRAWS):
        mixed = list(samples)
        random.Random(seed).shuffle(mixed)  # noqa: S311 - which operators are measured
        factors = fit_factors(mixed[:count])
        errors += [error(each, factors) for each in mixed[count:]]
    return _percent(errors, share)


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
    """Measure, and write the results or print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="epyc-9655-2", help="this machine, as --hardware names it")
    parser.add_argument("--rounds", type=int, default=9, help="trials of each plan (default: %(default)s)")
    parser.add_argument("--only", choices=("operators", "plans"), help="judge only the operators, or only the plans")
    add_output(parser)
    options = parser.parse_args()
    contents: dict[str, str] = {}
    if options.only != "plans":
        contents |= _operator_sections(options.machine)
    if options.only != "operators":
        contents["hardware-plans"] = plan_table(PLANNED, options.machine, options.rounds)
    write_results(options.output, contents)
    if not options.output:
        print(*contents.values(), sep="\n\n")


def _operator_sections(machine: str) -> dict[str, str]:
    chosen = measure(CHOSEN)
    others = {signature: each for signature, each in measure(OTHERS).items() if signature not in chosen}
    part = hardware(machine)
    processor = require_processor(part)
    errors = f"""Estimates for {part.title} (`{machine}`):

Models with whose measurements the constants were chosen:

{error_table([each.sample(processor) for each in chosen.values()])}

Other models, by the operators that the former do not have:

{error_table([each.sample(processor) for each in others.values()])}"""
    return {"hardware-errors": errors, "hardware-corrections": correction_table([*chosen.values(), *others.values()])}


if __name__ == "__main__":
    main()
