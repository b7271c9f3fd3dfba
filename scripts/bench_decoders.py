"""Measure a Generator beside onnxruntime-genai, beside simulations of decoders, and on an accelerator.

    python scripts/bench_decoders.py genai --python ENVIRONMENT/bin/python [-o docs/data]
    python scripts/bench_decoders.py simulation --points scripts/decoding/measured/loads.jsonl
        --costs scripts/decoding/measured/costs.jsonl [-o docs/data]
    python scripts/bench_decoders.py prediction [-o docs/data]
    python scripts/bench_decoders.py device --provider cuda --budget 1 [-o docs/data]

*genai*: tokens per second on the same files, a decoder with plain operators and one of the same weights with
GroupQueryAttention, with as many threads; each is timed first in every second round, and all tokens have to be equal.
The interpreter's environment has ``onnxruntime-genai``, which needs an onnxruntime of its own. *simulation*: the costs
of iterations were fitted to a Generator that always has requests, and requests arrived at random, both measured by
``bench_generate.py load``; the simulation predicts throughput and latency of the same requests. The speed of a shared
machine varies from run to run. ``iterations / costs`` is the time of a run's iterations divided by that of the costs,
and what is compared *at equal speed* has been scaled by it. That still tests what the simulation says of arrivals,
batches and waiting, but not the costs. *prediction*: the same for the latencies of single tokens of
a model server, as clients see them over HTTP, at 70 % of what a simulation at saturation serves; costs are measured on
that server before, between and after the loads. *device*: decode iterations
with keys and values in host memory, and with all of them on a device (:mod:`decoding.on_device`), for batches up to the
largest one that fits in ``--budget`` on the device and eight times as many requests. ``-o`` replaces the section
``decoders-`` with the name of the part in pages; *simulation* also has the sections ``decoders-agreement`` and
``decoders-loads``.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from command_arguments import add_output, existing_file, one_line_errors, positive
from decoding.against_genai import FORMS, Genai, build_endless_decoder, compare
from decoding.agreement import agreement_text, curve_rows, load_rows
from decoding.code_version import check_version, here
from decoding.costs import read_costs
from decoding.load import SIZES
from decoding.on_device import DEVICE, WAYS, DeviceDecoder
from decoding.orca_experiment import (
    Load,
    measured_on,
    normalise_speed,
    read_points,
    workload_lengths,
)
from decoding.prediction import PREDICTION_HEAD, SHARE, prediction_rows
from decoding.scheduling_gain import simulate_points
from page_markers import markdown_table
from result_files import write_results

from chrion import Generator
from chrion.devices.providers import provider_name, require_working
from chrion.machine.cores import physical_cores
from chrion.zoo.cached_decoder import build_llama_decoder

#: Requests at a time, prompt and new tokens beside onnxruntime-genai.
TOGETHER, LENGTHS = (1, 8, 32), (32, 64)
#: How often both are opened, since the speed of a small model varies with the place of its weights in memory.
OPENED = 3
#: A single request has this many times as many rounds: they are short, and its ratio is close to one.
ROUNDS_ALONE = 4
GENAI_HEAD = ("weights", "attention", "requests", "tokens/s relative to onnxruntime-genai")
DEVICE_HEAD = ("weights", "keys and values", "requests", "ms per iteration", "tokens/s")
#: How many times as many requests as fit on the device are served with keys and values in host memory.
MORE = 8


def genai_rows(arguments: argparse.Namespace, size: str) -> tuple[str, list[tuple[str, ...]]]:
    """Return the versions of the other environment, and a line for each form and number of requests."""
    threads, specs = arguments.threads, {form: replace(SIZES[size], attention=form) for form in FORMS}
    ratios: dict[tuple[str, int], list[float]] = {case: [] for case in itertools.product(FORMS, TOGETHER)}
    for _, (form, spec) in itertools.product(range(OPENED), specs.items()):
        model = build_endless_decoder(spec)
        with (
            tempfile.TemporaryDirectory() as folder,
            Genai(arguments.python, Path(folder), model, spec, threads) as genai,
        ):
            version = genai.version
            for requests in TOGETHER:
                rounds = arguments.rounds * (ROUNDS_ALONE if requests == 1 else 1)
                with Generator(model, max_batch=requests, threads=threads) as generator:
                    ratios[form, requests] += compare(generator, genai, requests, LENGTHS, rounds)
    rows: list[tuple[str, ...]] = []
    for (form, requests), own in ratios.items():
        low, middle, high = np.quantile(own, [0.05, 0.5, 0.95])
        rows.append((size, form, str(requests), f"{middle:.2f} [{low:.2f} to {high:.2f}]"))
        print(" | ".join(rows[-1]), flush=True)
    return version, rows


def simulation_sections(points: Path, costs: Path) -> tuple[str, str, str]:
    """Return how measured and simulated points agree, their throughputs at equal latencies, and all points."""
    check_version(points, costs)
    found = read_costs(costs)
    runs = [run for run in read_points(points) if run.workload in found]
    runs.sort(key=lambda run: ([*SIZES].index(run.model), run.max_batch, run.policy, run.target))
    normalised = [normalise_speed(run, found[run.workload]) for run in runs]
    as_measured, at_equal_speed = ((some, simulate_points(some, found)) for some in (runs, normalised))
    slowdowns: dict[Load, list[float]] = {}
    for run in runs:
        if run.iterations is not None:
            slowdowns.setdefault(run.load, []).append(run.iterations.slowdown(found[run.workload]))
    agreement = agreement_text(as_measured, at_equal_speed, slowdowns)
    tables = curve_rows(as_measured, at_equal_speed), load_rows(as_measured, at_equal_speed, slowdowns)
    curves, loads = map(markdown_table, tables)
    return agreement, curves, loads


def device_rows(arguments: argparse.Namespace, size: str) -> list[tuple[str, ...]]:
    """Return a line for each way and each number of requests: powers of two, and as many as fit."""
    decoder = DeviceDecoder(build_llama_decoder(SIZES[size]), arguments.provider, arguments.threads)
    most = decoder.most_requests(round(arguments.budget * 1e9), arguments.tokens)
    batches = [2**power for power in range(len(bin(most)) - 2) if 2**power < most]
    within = decoder.time([*batches, most], arguments.tokens, arguments.rounds, WAYS) if most else []
    beyond = [way for way in WAYS if way != DEVICE]
    rows: list[tuple[str, ...]] = []
    for times in (*within, *decoder.time([max(most, 1) * MORE], arguments.tokens, arguments.rounds, beyond)):
        rows.append((size, times.way, str(times.batch), f"{times.iteration_ms:.2f}", f"{times.tokens_per_s:.0f}"))
        print(" | ".join(rows[-1]), flush=True)
    return rows


def beside_genai(arguments: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """Return what was measured, and a table by the name of the results."""
    rows: list[Sequence[str]] = [GENAI_HEAD]
    for size in arguments.size:
        version, found = genai_rows(arguments, size)
        rows += found
    what = f"{here()}, and {version}; {arguments.threads} threads each"
    return what, {"decoders-genai": markdown_table(rows)}


def beside_simulation(arguments: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """Return where the loads were measured, and contents by the names of the results."""
    agreement, curves, loads = simulation_sections(arguments.points, arguments.costs)
    runs = read_points(arguments.points)
    where = f"{measured_on(runs)}. {workload_lengths(run.workload for run in runs)}".rstrip(".")
    return where, {"decoders-agreement": agreement, "decoders-simulation": curves, "decoders-loads": loads}


def beside_prediction(arguments: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """Return what was measured, and a table by the name of the results."""
    rows: list[Sequence[str]] = [PREDICTION_HEAD]
    for size in arguments.size:
        rows += prediction_rows(size, arguments.requests, arguments.repeats, arguments.threads)
        print(*(" | ".join(row) for row in rows[-5:]), sep="\n", flush=True)
    what = f"{here()}; {arguments.repeats} runs of {arguments.requests} requests at {SHARE:.0%} of the capacity"
    return what, {"decoders-prediction": markdown_table(rows)}


def on_device(arguments: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """Return what was measured, and a table by the name of the results."""
    arguments.provider = provider_name(arguments.provider)
    require_working(arguments.provider, "--provider")
    rows = [row for size in arguments.size for row in device_rows(arguments, size)]
    what = f"{arguments.budget:g} GB of device memory, {arguments.tokens} tokens"
    return f"{here()}, {arguments.provider}, {what}", {"decoders-device": markdown_table([DEVICE_HEAD, *rows])}


def read_arguments() -> argparse.Namespace:
    """Return the arguments, with the function of the part as ``run``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True, metavar="PART", dest="part")
    kind = argparse.ArgumentDefaultsHelpFormatter
    genai = parts.add_parser("genai", help="beside onnxruntime-genai", formatter_class=kind)
    genai.add_argument("--python", required=True, help="an interpreter with onnxruntime-genai")
    genai.add_argument("--threads", type=positive, default=len(physical_cores()), help="threads of both")
    genai.add_argument("--rounds", type=positive, default=7, help="rounds of 8 and of 32 requests for each opening")
    genai.set_defaults(run=beside_genai)
    simulation = parts.add_parser("simulation", help="beside the simulation", formatter_class=kind)
    simulation.add_argument("--points", type=existing_file, required=True, help="results of loads")
    simulation.add_argument("--costs", type=existing_file, required=True, help="costs of iterations")
    simulation.set_defaults(run=beside_simulation)
    prediction = parts.add_parser("prediction", help="latencies of tokens beside the simulation", formatter_class=kind)
    prediction.add_argument("--requests", type=positive, default=200, help="requests of a run")
    prediction.add_argument("--repeats", type=positive, default=5, help="runs, each with other requests")
    spare = max(1, len(physical_cores()) - 1)
    prediction.add_argument("--threads", type=positive, default=spare, help="CPU threads; one is left for the server")
    prediction.set_defaults(run=beside_prediction)
    device = parts.add_parser("device", help="on an accelerator", formatter_class=kind)
    device.add_argument("--provider", required=True, help="the execution provider of the device, for example cuda")
    device.add_argument("--budget", type=float, default=1.0, help="device memory in GB")
    device.add_argument("--tokens", type=positive, default=1024, help="tokens of a request before the new one")
    device.add_argument("--threads", type=positive, default=len(physical_cores()), help="CPU threads")
    device.add_argument("--rounds", type=positive, default=20, help="rounds")
    device.set_defaults(run=on_device)
    for one in (genai, prediction, device):
        one.add_argument(
            "--size", choices=list(SIZES), nargs="+", default=list(SIZES), help="decoders by their weights"
        )
    for one in (genai, simulation, prediction, device):
        add_output(one)
    return parser.parse_args()


def main() -> None:
    """Run the part that the arguments name."""
    arguments = read_arguments()
    with one_line_errors():
        measure_part(arguments)


def measure_part(arguments: argparse.Namespace) -> None:
    """Measure a part, print its tables and write the results."""
    where, tables = arguments.run(arguments)
    print("\n\n".join(tables.values()))
    about = f"Written by `scripts/bench_decoders.py`, measured on {where}."
    write_results(arguments.output, {name: f"{about}\n\n{table}" for name, table in tables.items()})


if __name__ == "__main__":
    main()
