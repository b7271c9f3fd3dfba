"""Measure a Generator beside onnxruntime-genai, and beside the simulation of decoders.

    python scripts/bench_decoders.py genai --python ENVIRONMENT/bin/python [-o docs/generation.md]
    python scripts/bench_decoders.py simulation [--minutes 6] [-o docs/simulate-decoders.md]

*genai*: tokens per second on the same file, in alternating rounds; the interpreter's environment has
``onnxruntime-genai``, which needs an onnxruntime of its own. *simulation*: the costs of iterations are fitted to a
Generator that always has requests; then requests arrive at random, and the simulation predicts throughput and latency.
``-o`` replaces the section ``decoders-genai`` or ``decoders-simulation`` of pages.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from decoding.against_genai import Genai, compare
from decoding.load import measure_costs, serve
from page_markers import fill_sections, markdown_table

from chrion.files import write_atomically
from chrion.profiler import this_machine
from chrion.simulator.decoder_results import DecoderSummary, summarise
from chrion.simulator.decoder_scenario import DecoderScenario, IterationCosts, build_decoder_scenario
from chrion.simulator.iterations import simulate_decoder
from chrion.simulator.scenario import ScenarioSource
from chrion.zoo.cached_decoder import LlamaDecoderSpec, build_llama_decoder

SIZES = {
    "15 MB": LlamaDecoderSpec(),
    "104 MB": LlamaDecoderSpec(layers=8, hidden=512, heads=8, kv_heads=2, inner=1376, vocabulary=4096),
}
#: Orca's lengths, U(32, 512) and U(1, 128), divided by four.
PROMPTS, NEW = (8, 128), (1, 32)
#: Sizes of batches, and rates of arrival relative to the throughput of one request at a time.
MAX_BATCHES, RATES = (1, 8, 32), (0.5, 0.9, 1.4, 2.0)
POLICIES = ("iteration", "request")
#: Requests at a time, prompt, new tokens and rounds beside onnxruntime-genai.
TOGETHER, LENGTHS, ROUNDS = (1, 8, 32), (32, 64), 11
GENAI_HEAD = ("weights", "requests", "tokens/s relative to onnxruntime-genai")
LOAD_HEAD = (
    *("weights", "max batch", "offered, requests/s", "policy", "served", "simulated", "simulated / served"),
    *("ms/token", "simulated", "simulated / measured"),
)


def genai_rows(size: str, python: str) -> tuple[str, list[tuple[str, ...]]]:
    """Return the version of onnxruntime-genai, and a line for each number of requests."""
    model = build_llama_decoder(SIZES[size])
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as folder, Genai(python, Path(folder), model, SIZES[size]) as genai:
        for requests in TOGETHER:
            low, middle, high = np.quantile(compare(model, genai, requests, LENGTHS, ROUNDS), [0.05, 0.5, 0.95])
            rows.append((size, str(requests), f"{middle:.2f} [{low:.2f} to {high:.2f}]"))
            print(" | ".join(rows[-1]), flush=True)
        return genai.version, rows


def scenario_of(costs: IterationCosts, rate_per_s: float, max_batch: int, requests: int) -> DecoderScenario:
    """Return the scenario of a load."""
    lengths = dict(zip(("prompt_least", "prompt_most", "new_least", "new_most"), (*PROMPTS, *NEW), strict=True))
    terms = {name: getattr(costs, name) for name in ("fixed_ms", "token_ms", "request_ms", "pair_ms")}
    content = {
        "seed": 1,
        "policies": list(POLICIES),
        "decoder": {"slots": 100_000, "costs": terms},
        "batching": {"max_batch": max_batch},
        "requests": {"rate_per_s": rate_per_s, "requests": requests, **lengths},
    }
    return build_decoder_scenario(ScenarioSource("load", content, Path()))


def load_rows(size: str, seconds: float) -> list[tuple[str, ...]]:
    """Return a line for each size of batches, rate and policy."""
    model, rows = build_llama_decoder(SIZES[size]), []
    costs = measure_costs(model, scenario_of(IterationCosts(), 1.0, 1, 64))
    print(f"{size}: {costs}", flush=True)
    alone = summarise(simulate_decoder(scenario_of(costs, 1e4, 1, 200))[0])
    cells = [(batch, rate, policy) for batch in MAX_BATCHES for rate in RATES for policy in POLICIES]
    for batch, relative, policy in cells:
        rate = relative * alone.requests_per_s
        scenario = scenario_of(costs, rate, batch, max(30, int(rate * seconds / len(cells))))
        measured = summarise(serve(model, scenario, policy))
        predicted = next(s for r in simulate_decoder(scenario) if (s := summarise(r)).policy == policy)
        rows.append((size, str(batch), f"{rate:.1f}", policy, *_compared(measured, predicted)))
        print(" | ".join(rows[-1]), flush=True)
    return rows


def _compared(measured: DecoderSummary, predicted: DecoderSummary) -> tuple[str, ...]:
    pairs = [
        (measured.requests_per_s, predicted.requests_per_s),
        (measured.normalised_p50_ms, predicted.normalised_p50_ms),
    ]
    return tuple(cell for ours, other in pairs for cell in (f"{ours:.1f}", f"{other:.1f}", f"{other / ours:.2f}"))


def main() -> None:
    """Measure a part, print lines and fill in pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("genai", "simulation"))
    parser.add_argument("--size", choices=list(SIZES), nargs="+", default=list(SIZES), help="decoders")
    parser.add_argument("--python", default="", help="an interpreter with onnxruntime-genai")
    parser.add_argument("--minutes", type=float, default=6.0, help="duration of the loads (default: 6)")
    parser.add_argument("-o", "--output", type=Path, nargs="*", default=[], help="pages whose section to fill in")
    arguments = parser.parse_args()
    if arguments.part == "genai" and not arguments.python:
        parser.error("genai: --python names no interpreter with onnxruntime-genai")
    about = f"Written by `scripts/bench_decoders.py` on {this_machine()}, onnxruntime {ort.get_version_string()}"
    rows: list[Sequence[str]] = [GENAI_HEAD if arguments.part == "genai" else LOAD_HEAD]
    for size in arguments.size:
        if arguments.part == "genai":
            version, found = genai_rows(size, arguments.python)
            about = about if version in about else f"{about}, {version}"
            rows += found
        else:
            rows += load_rows(size, 60 * arguments.minutes / len(arguments.size))
    contents = {f"decoders-{arguments.part}": f"{about}.\n\n{markdown_table(rows)}"}
    for path in arguments.output:
        write_atomically(path, fill_sections(path.read_text(encoding="utf-8"), contents))


if __name__ == "__main__":
    main()
