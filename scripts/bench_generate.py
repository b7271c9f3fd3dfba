"""Measure generation: selective batching alone, and iteration-level scheduling under load.

``engine``: the time of one iteration, by selective batching, on a padded batch, and one request after another: of
requests that decode a token, of these beside prompts, and of long prompts. The caches of padded batches and of single
requests are made outside the timed region, which favours the two baselines. The threads of their session spin between
operators, as those of the engine do. All are timed in turn in every round.

``load``: the end-to-end experiment of Orca (section 6.2), scaled: requests that arrive at random (Poisson), with
prompts of U(32, 512) and outputs of U(1, 128) tokens divided by ``--scale``. The median latency per generated token and
the throughput are printed for iteration-level and for request-level scheduling, on the same engine, alternately.
Without ``--rates``, each policy has its own rates, chosen by a simulation with costs of iterations that are
measured before. ``--repeats`` measures all of it several times, each time with other requests. ``--points`` adds the
results to a file. ``--costs`` adds the costs of iterations, measured before the loads and after those of each batch,
to another file. Lines of both files have the version of the code, and only those of one version are pooled.

``report``: from such files, throughputs at equal latencies beside simulated ones, what iteration-level scheduling can
gain, and an estimate for a GPU, in the results ``generate-load``, ``generate-gain`` and ``generate-gpu``, a summary
in ``generate-summary``, and a plot.

::

    python scripts/bench_generate.py engine --models "104 MB" --batches 1 8 32 -o docs/data
    python scripts/bench_generate.py load --models "104 MB" --points scripts/decoding/measured/loads.jsonl
        --costs scripts/decoding/measured/costs.jsonl
    python scripts/bench_generate.py report --points scripts/decoding/measured/loads.jsonl
        --costs scripts/decoding/measured/costs.jsonl -o docs/data
        --plot docs/img/generation.png
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from command_arguments import add_output, existing_file, one_line_errors, positive
from decoding.code_version import check_version, code_version, here
from decoding.costs import CostMeter, MeasuredCosts, append_costs, read_costs
from decoding.gpu_estimate import DIGITS, GPU, REPETITIONS, TITLE, estimated_points, saturated_on_gpu
from decoding.load import SIZES, Costs, load_scenario, run_load, scheduled
from decoding.load_rates import LEAST_FACTOR, RATE_FACTORS, choose_rates
from decoding.orca_experiment import (
    LoadPoint,
    append_point,
    measured_on,
    median_points,
    normalise_speed,
    plot,
    read_points,
    summary_rows,
    table_rows,
    workload_lengths,
)
from decoding.repeated_iterations import Shape, padded_run, selective_run, single_runs, time_in_turn
from decoding.scheduling_gain import Machine, gain_rows, saturated, simulate_points
from page_markers import markdown_table
from result_files import write_results

import chrion
from chrion import Generator
from chrion.generation.open_engine import open_engine
from chrion.generation.scheduling import POLICIES
from chrion.generation.session_threads import SPINNING_BETWEEN_CALLS, SessionThreads, lease_iteration_cores
from chrion.machine.cores import pinned
from chrion.serving.simulator.iterations import draw_requests
from chrion.zoo.cached_decoder import build_llama_decoder

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Mix:
    """The requests of a workload."""

    #: The share of requests in their first iteration, and the least and most tokens of their prompts.
    share: float = 0.0
    least: int = 8
    most: int = 64


WORKLOADS = {"decode": Mix(), "mixed": Mix(0.25), "long prompts": Mix(1.0, 512, 512)}
#: Sections of pages.
ENGINE_RESULTS = "generate-engine"
REPORT_RESULTS = ("generate-summary", "generate-load", "generate-gain", "generate-gpu")
ENGINE_HEAD = (
    *("weights", "requests", "batch", "selective", "padded", "unbatched"),
    *("padded / selective", "unbatched / selective"),
)


def draw_shapes(pick: np.random.Generator, batch: int, mix: Mix) -> list[Shape]:
    """Return requests of which a share processes a prompt, and the others one token after 16 to 128."""
    initiations = round(batch * mix.share)
    prompts = [Shape(0, int(pick.integers(mix.least, mix.most, endpoint=True))) for _ in range(initiations)]
    return prompts + [Shape(int(pick.integers(16, 129)), 1) for _ in range(batch - initiations)]


def plain_session(model: onnx.ModelProto, threads: int, cores: Sequence[int] = ()) -> ort.InferenceSession:
    """Return a session of the whole model, configured as that of decode iterations."""
    options = SessionThreads(threads, tuple(cores)).options(SPINNING_BETWEEN_CALLS)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def measure_engine(arguments: argparse.Namespace) -> None:
    """Print the times of an iteration and the ratios of medians over rounds, and write the results."""
    cores = lease_iteration_cores(arguments.threads)
    with contextlib.nullcontext() if cores is None else pinned(cores.caller):  # as in a generator
        rows = engine_rows(arguments, () if cores is None else cores.others)
    about = f"Written by `scripts/bench_generate.py`, measured on {here()}."
    table = markdown_table([ENGINE_HEAD, *rows])
    write_results(arguments.output, {ENGINE_RESULTS: f"{about}\n\n{table}"})


def engine_rows(arguments: argparse.Namespace, cores: Sequence[int]) -> list[tuple[str, ...]]:
    """Return a line for each decoder, workload and batch.

    Args:
        arguments: Those of the command line.
        cores: The logical CPU of each thread but the calling one, or none if the system chooses.
    """
    rows: list[tuple[str, ...]] = []
    threads = arguments.threads
    for label in arguments.models:
        model = build_llama_decoder(SIZES[label])
        engine, session = open_engine(chrion.load(model), threads, cores=cores), plain_session(model, threads, cores)
        for workload, batch in itertools.product(arguments.workloads, arguments.batches):
            shapes = draw_shapes(np.random.default_rng(batch), batch, WORKLOADS[workload])
            runs = {
                "selective": selective_run(engine, shapes),
                "padded": padded_run(session, engine.signature, shapes),
                "unbatched": single_runs(session, engine.signature, shapes),
            }
            times = time_in_turn(runs, arguments.rounds)
            medians = [f"{statistics.median(found):.2f} ms" for found in times.values()]
            ratios = [statistics.median(np.divide(times[n], times["selective"])) for n in ("padded", "unbatched")]
            rows.append((label, workload, str(batch), *medians, *(f"{ratio:.2f}" for ratio in ratios)))
            print(" | ".join(rows[-1]), flush=True)
    return rows


def measure_load(arguments: argparse.Namespace) -> None:
    """Print latency and throughput of both policies, and add them and the costs of iterations to files.

    Every repetition measures all models, batches and rates once, with other requests.
    """
    code_version()  # before anything is written or committed
    print("model | policy | max batch | offered, requests/s | served | median ms per token", flush=True)
    with contextlib.ExitStack() as stack:
        meters = {}
        for label in arguments.models:
            graph = chrion.load(build_llama_decoder(SIZES[label]))
            meter = meters[label] = CostMeter(
                stack.enter_context(Generator(graph, threads=arguments.threads)), arguments.scale
            )
            if arguments.costs or not arguments.rates:
                meter.measure()
            if arguments.costs:  # also if the loads are interrupted
                stack.callback(append_fit, arguments, label, meter)
        seeds = range(arguments.seed, arguments.seed + arguments.repeats)
        for seed, (label, meter), batch in itertools.product(seeds, meters.items(), arguments.batches):
            measure_batch(arguments, label, meter, batch, seed)
            if arguments.costs:
                meter.measure([batch])


def append_fit(arguments: argparse.Namespace, label: str, meter: CostMeter) -> None:
    """Add the costs that a meter has found to their file."""
    append_costs(arguments.costs, MeasuredCosts(label, arguments.scale, *meter.fit(), code_version()))


def measure_batch(arguments: argparse.Namespace, label: str, meter: CostMeter, batch: int, seed: int) -> None:
    """Measure policies with one max batch and certain requests at ascending rates, in turn."""
    if arguments.rates:
        given = {rate: rate for rate in sorted(arguments.rates)}
        rates = dict.fromkeys(arguments.policies, given)
    else:
        rates = choose_batch_rates(arguments, meter.fit(), batch, seed)
    for at, target in enumerate(sorted(set().union(*rates.values()))):
        in_turn = [(policy, found[target]) for policy, found in rates.items() if target in found]
        if (seed + at) % 2:  # neither policy is always the first one
            in_turn.reverse()
        for policy, rate in in_turn:
            workload = draw_requests(load_scenario(arguments.scale, rate, arguments.requests, seed=seed))
            with scheduled(meter.generator, policy, batch):
                result = run_load(meter.generator, workload)
            row = f"{result.requests_per_s:.1f} | {result.median_ms_per_token:.1f}"
            print(f"{label} | {policy} | {batch} | {rate:.3g} | {row}", flush=True)
            if arguments.points:
                point = LoadPoint(
                    model=label,
                    scale=arguments.scale,
                    policy=policy,
                    max_batch=batch,
                    target=target,
                    offered_per_s=rate,
                    requests=arguments.requests,
                    seed=seed,
                    requests_per_s=result.requests_per_s,
                    ms_per_token=result.median_ms_per_token,
                    iterations=result.iterations,
                    machine=here(),
                    code=code_version(),
                )
                append_point(arguments.points, point)


def choose_batch_rates(
    arguments: argparse.Namespace, costs: Costs, batch: int, seed: int
) -> dict[str, dict[float, float]]:
    """Choose rates by target for each policy with one max batch."""
    chosen = {}
    for policy in arguments.policies:
        # Nearly the minimum latency: for iteration-level scheduling with the max batch whose rate is highest only.
        least = policy == "request" or batch == max(arguments.batches)
        factors = [*[LEAST_FACTOR] * least, *RATE_FACTORS]
        run = (arguments.scale, costs, policy, batch, arguments.requests)
        chosen[policy] = choose_rates(*run, factors, seed)
    return chosen


def report_load(arguments: argparse.Namespace) -> None:
    """Print the throughputs at equal latencies and what can be gained, and write the results and a plot."""
    if arguments.costs:
        check_version(arguments.points, arguments.costs)
    runs, costs = read_points(arguments.points), read_costs(arguments.costs) if arguments.costs else {}
    normalised = [normalise_speed(run, costs[run.workload]) for run in runs if run.workload in costs]
    rows = table_rows(runs, normalised, simulate_points(normalised, costs))
    about = f"Written by `scripts/bench_generate.py`, measured on {measured_on(runs)}"
    known = sorted(costs, key=lambda workload: [*SIZES].index(workload[0]))
    machines = [Machine(*workload, saturated(workload[1], costs[workload])) for workload in known]
    gain = markdown_table(gain_rows([*machines, Machine(GPU, 1, saturated_on_gpu())]))
    lengths = workload_lengths(run.workload for run in runs)
    gpu = markdown_table([row[1:-2] for row in table_rows(estimated_points(), significant=DIGITS)])
    simulated = (
        f"Simulated by `scripts/bench_generate.py`: {TITLE}. Nothing is measured; medians of {REPETITIONS} seeds."
    )
    contents = (
        f"{about}. {lengths}\n\n{markdown_table(summary_rows(rows))}",
        f"{about}. {lengths}\n\n{markdown_table(rows)}",
        f"Computed by `scripts/bench_generate.py`. Tokens: of prompts, and of outputs.\n\n{gain}",
        f"{simulated}\n\n{gpu}",
    )
    print("\n\n".join(contents))
    write_results(arguments.output, dict(zip(REPORT_RESULTS, contents, strict=True)))
    if arguments.plot:
        plot(median_points(runs), arguments.plot)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the engine's measurement."""
    add_models(parser)
    parser.add_argument(
        "--workloads", nargs="+", choices=[*WORKLOADS], default=list(WORKLOADS), help="kinds of requests"
    )
    parser.add_argument("--rounds", type=positive, default=30, help="rounds")
    add_output(parser)
    parser.set_defaults(run=measure_engine)


def add_load(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of loads."""
    add_models(parser)
    rates_help = f"requests per second (default: those of a simulation at {LEAST_FACTOR} to {RATE_FACTORS[-1]:g} times \
the minimum latency)"
    parser.add_argument("--rates", nargs="+", type=float, default=[], help=rates_help)
    parser.add_argument("--requests", type=positive, default=100, help="requests of a run")
    parser.add_argument("--repeats", type=positive, default=1, help="runs of each load, whose results are medians")
    parser.add_argument("--seed", type=int, default=0, help="determines the requests of the first repetition")
    parser.add_argument("--scale", type=positive, default=4, help="divides the lengths of prompts and outputs")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES, help="schedulers")
    parser.add_argument("--points", type=Path, help="file to which the results are added")
    parser.add_argument("--costs", type=Path, help="file to which the costs of iterations are added")
    parser.set_defaults(run=measure_load)


def add_models(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of both measurements."""
    parser.add_argument("--models", nargs="+", choices=[*SIZES], default=["15 MB"], help="decoders by their weights")
    parser.add_argument(
        "--batches", nargs="+", type=positive, default=[1, 2, 4, 8, 16, 32], help="requests of a batch, at most"
    )
    parser.add_argument("--threads", type=positive, default=2, help="threads of the generator")


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a report."""
    parser.add_argument("--points", type=existing_file, required=True, help="results of loads")
    parser.add_argument("--costs", type=existing_file, help="costs of iterations")
    add_output(parser)
    parser.add_argument("--plot", type=Path, help="picture of latency against throughput")
    parser.set_defaults(run=report_load)


def main() -> None:
    """Run a measurement or write a report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, about, add in (
        ("engine", "measure single iterations", add_engine),
        ("load", "measure latency and throughput of requests that arrive at random", add_load),
        ("report", "write tables and a plot of measured loads", add_report),
    ):
        add(commands.add_parser(name, help=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter))
    arguments = parser.parse_args()
    with one_line_errors():
        arguments.run(arguments)


if __name__ == "__main__":
    main()
