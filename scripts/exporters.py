"""Export models with real exporters, and compare HybridSession with plain onnxruntime on them.

    python scripts/exporters.py make CORPUS                    # hours: every family, each in an environment of its own
    python scripts/exporters.py check CORPUS [--quick]         # seconds to minutes a model: correctness
    python scripts/exporters.py check CORPUS --timing          # a minute a model more: latency, creation, memory
    python scripts/exporters.py check CORPUS --memory          # seconds a model: memory alone, no other check
    python scripts/exporters.py check CORPUS --memory --plans     # the same with plans whatever their latency
    python scripts/exporters.py check CORPUS --creation        # seconds a model: creation and first requests alone
    python scripts/exporters.py sample CORPUS NAME ...         # seconds: adds models to the sample that the tests run

``make`` exports the models of the families in ``tests/exporters/`` into a folder. ``check`` runs every model of the
folder: the default session, a forced plan of every policy, random cuts, several shapes, repeated calls, OrtValues and
IOBinding. It prints a line for each model, then a table, which ``-o`` writes as the results ``exporters``
(with ``--memory`` and ``--creation``, ``exporters-memory`` and ``exporters-creation``). Its exit code is 1 if an output
differs, if a call fails that plain onnxruntime serves, or if a measured ratio exceeds its aim. ``--latency`` measures
the steady state as well; ``--timing`` also creation and memory.

``--memory`` compares the resident memory of a HybridSession with a warm cache and of a plain InferenceSession, each in
a new process that serves the same requests, and lists the models above 1.3: for the memory beyond the imports, from
which the interpreter and the libraries are subtracted, and for the whole processes. Its exit code is 1 if a model
exceeds 1.3 in steady memory beyond the imports. With ``--plans``, the session uses the plan with the best prediction
wherever it may, without timing it, so that the result does not depend on the machine's other work.

``--creation`` compares the creation of sessions and the first requests of each shape, with an empty cache. Its exit
code is 1 if a model exceeds an aim.

Each model is checked in a separate process, so that a crash affects one model only. Times are measured after all
checks, one model at a time.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "exporters"))

import onnxruntime as ort
from cases import Case, find_cases, read_case, read_feeds
from checks import QUICK, Effort, Outcome, check
from command_arguments import add_output
from creation_check import HEAD as CREATION_HEAD
from creation_check import CreationComparison, compare_creation, summarise_creation
from families import FAMILIES, find_families, open_environments, prepare_environment
from memory_check import HEAD as MEMORY_HEAD
from memory_check import Comparison, above_aim, compare_memory, summarise
from page_markers import markdown_table
from result_files import write_results
from sample import SAMPLE, write_sample
from timing import Timing, latency, measure

from chrion.profiler import this_machine
from output_comparison import Tolerance
from worker_processes import FailedJob, run_all

#: Names of results.
OUTPUTS, MEMORY, CREATION = "exporters", "exporters-memory", "exporters-creation"
#: Seconds that checking one model may take.
TIMEOUT_S = 900.0
REASON_WORDS = 10


@dataclass(frozen=True)
class Job:
    """A case to check."""

    case: Case
    folder: Path
    effort: Effort


@dataclass(frozen=True)
class Row:
    """The results for one case."""

    case: Case
    outcome: Outcome | None
    timing: Timing | None
    #: How the process ended, or why timing failed; empty if neither failed.
    failure: str = ""

    @property
    def wrong(self) -> bool:
        """Whether HybridSession did worse than plain onnxruntime."""
        return self.outcome is None or bool(self.outcome.findings)

    @property
    def verdict(self) -> str:
        """The cell of the column *equal*."""
        if self.outcome is None:
            return self.failure
        if self.outcome.findings:
            return f"no ({len(self.outcome.findings)})"
        return f"yes ({self.outcome.unsettled} unsettled)" if self.outcome.unsettled else "yes"

    def cells(self) -> list[str]:
        """Return the case's line of the table."""
        cells = [self.case.name, f"{self.case.exporter} {self.case.version}"]
        if self.outcome is None:
            return [*cells, "", self.failure, "", "", *[""] * 5]
        chosen = self.outcome.chosen
        if chosen == "plain":
            chosen = f"plain: {shorten_reason(self.outcome.reason)}"
        cells += [str(self.outcome.operators or ""), self.verdict, f"{self.outcome.cut} of {self.outcome.runs}", chosen]
        timing = self.timing
        ratios = [timing.latency, timing.cold, timing.warm, timing.shapes, timing.memory] if timing else [None] * 5
        return cells + ["" if ratio is None else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}" for ratio in ratios]


#: Ratios that no model should exceed.
AIMS = {"cold": 2.0, "warm": 2.0, "shapes": 2.0, "memory": 1.3}
HEAD = ["model", "exporter", "operators", "equal", "cut runs", "chosen", "latency", "created", "created again"]
HEAD += ["new shape", "memory"]

TEXT = """Written by `scripts/exporters.py` on {machine} (shared, noisy), onnxruntime {version}: {models} models of
{exporters} exporters, {equal} equal to plain onnxruntime. {settled} of {runs} runs were settled.

{table}"""

MEMORY_TEXT = """Written by `scripts/exporters.py check {arguments}` on {machine}, onnxruntime {version}: {models}
models, each session in a new process, all figures in MB (10^6 bytes).

{table}

```
{summary}
```"""

CREATION_TEXT = """Written by `scripts/exporters.py check --creation` on {machine}, onnxruntime {version}:
{models} models, with an empty cache. Ratios are HybridSession to plain onnxruntime, medians over alternating sessions
in one process. The table lists the models above an aim.

{summary}

{table}"""


def check_case(job: Job) -> Row:
    """Check a case; runs in a worker process."""
    ort.set_default_logger_severity(4)
    case = read_case(job.folder)
    tolerance = Tolerance(case.rtol, case.atol)
    outcome = check(job.folder / "model.onnx", read_feeds(job.folder), tolerance, job.effort, case.name)
    return Row(case, outcome, None)


def time_everything(folder: Path) -> Timing | str:
    """Measure latency, creation and memory for a case; return the error's message if that fails."""
    ort.set_default_logger_severity(4)
    try:
        return measure(folder)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        return f"not timed: {error}"


def time_latency(folder: Path) -> Timing | str:
    """Measure the steady state of a case with the cache as it is; return the error's message if that fails."""
    ort.set_default_logger_severity(4)
    try:
        return Timing(None, None, None, None, latency(folder))
    except (OSError, RuntimeError) as error:
        return f"not timed: {error}"


def shorten_reason(reason: str) -> str:
    """Return the first words of the reason for a plain session, without the paths of model files."""
    text = reason.partition(": ")[2].partition(" (")[0] or reason
    words = [word for word in text.split() if not word.endswith("model.onnx:")]
    return " ".join(words[:REASON_WORDS]) + (" ..." if len(words) > REASON_WORDS else "")


def run_checks(jobs: Sequence[Job], processes: int) -> list[Row]:
    """Check all cases and print each result when it is known."""
    rows: list[Row] = []
    for at, (job, result) in enumerate(run_all(check_case, jobs, processes, TIMEOUT_S), start=1):
        row = Row(job.case, None, None, result.reason) if isinstance(result, FailedJob) else result
        rows.append(row)
        print(f"[{at}/{len(jobs)}] {' | '.join(row.cells())}", flush=True)
        for finding in [*(row.outcome.findings if row.outcome else ()), *filter(None, [row.failure])]:
            print(f"    {finding}", flush=True)
    return sorted(rows, key=lambda row: row.case.name)


def run_timing(
    rows: Sequence[Row], folders: Mapping[str, Path], time_case: Callable[[Path], Timing | str]
) -> list[Row]:
    """Measure all cases, one at a time, and print each result when it is known."""
    known = {folders[row.case.name]: row for row in rows}
    for at, (folder, result) in enumerate(run_all(time_case, list(known), 1, TIMEOUT_S), start=1):
        failure = result.reason if isinstance(result, FailedJob) else result if isinstance(result, str) else ""
        timing = result if isinstance(result, Timing) else None
        known[folder] = replace(known[folder], timing=timing, failure=known[folder].failure or failure)
        print(f"timed [{at}/{len(rows)}] {' | '.join(known[folder].cells())}", flush=True)
    return [known[folders[row.case.name]] for row in rows]


def format_report(rows: Sequence[Row]) -> str:
    """Return the results in Markdown."""
    outcomes = [row.outcome for row in rows if row.outcome]
    runs = sum(o.runs for o in outcomes)
    return TEXT.format(
        machine=this_machine(),
        version=ort.get_version_string(),
        models=len(rows),
        exporters=len({row.case.exporter for row in rows}),
        equal=sum(not row.wrong for row in rows),
        settled=runs - sum(o.unsettled for o in outcomes),
        runs=runs,
        table=markdown_table([HEAD, *(row.cells() for row in rows)]),
    )


def check_all(arguments: argparse.Namespace) -> int:
    """Check the cases of a folder; return 1 if HybridSession did worse in any."""
    name, check = OUTPUTS, check_outputs
    if arguments.memory:
        name, check = MEMORY, check_memory
    elif arguments.creation:
        name, check = CREATION, check_creation
    cases = select_cases(arguments.folder, arguments.only)
    content, code = check(cases, arguments)
    write_results(arguments.output, {name: content})
    return code


def check_outputs(cases: Sequence[tuple[Case, Path]], arguments: argparse.Namespace) -> tuple[str, int]:
    """Compare outputs, and measure what is asked for; return the results in Markdown and the exit code."""
    effort = QUICK if arguments.quick else Effort()
    if arguments.random_cuts is not None:
        effort = replace(effort, random_cuts=arguments.random_cuts)
    start = time.monotonic()
    print(" | ".join(HEAD))
    rows = run_checks([Job(case, folder, effort) for case, folder in cases], arguments.processes)
    if arguments.timing or arguments.latency:
        folders = {case.name: folder for case, folder in cases}
        rows = run_timing(rows, folders, time_everything if arguments.timing else time_latency)
    content = format_report(rows)
    print(content)
    wrong = sum(row.wrong for row in rows)
    print(f"{len(rows)} models in {time.monotonic() - start:.0f} s, {wrong} with differences")
    missed = count_above_aims(rows)
    print(*(f"{name}: {count} of {len(rows)} models above {AIMS[name]}" for name, count in missed.items()), sep="\n")
    return content, int(wrong > 0 or not rows or bool(missed))


def check_memory(cases: Sequence[tuple[Case, Path]], arguments: argparse.Namespace) -> tuple[str, int]:
    """Compare resident memory; return the results in Markdown and the exit code."""

    def compare(folder: Path) -> Comparison | str:
        try:
            return compare_memory(folder, arguments.cache, plans=arguments.plans)
        except (OSError, subprocess.SubprocessError, RuntimeError, ValueError) as error:
            return str(error)

    start = time.monotonic()
    print(" | ".join(MEMORY_HEAD))
    comparisons, failed = [], 0
    with ThreadPoolExecutor(arguments.processes) as pool:
        results = pool.map(compare, [folder for _, folder in cases])
        for at, ((case, _), result) in enumerate(zip(cases, results, strict=True), start=1):
            if isinstance(result, Comparison):
                comparisons.append(result)
            else:
                failed += 1
            line = " | ".join(result.cells()) if isinstance(result, Comparison) else f"{case.name}: {result}"
            print(f"[{at}/{len(cases)}] {line}", flush=True)
    content = MEMORY_TEXT.format(
        arguments="--memory --plans" if arguments.plans else "--memory",
        machine=this_machine(),
        version=ort.get_version_string(),
        models=len(comparisons),
        table=markdown_table([MEMORY_HEAD, *(comparison.cells() for comparison in comparisons)]),
        summary=summarise(comparisons),
    )
    print(content)
    print(f"{len(cases)} models in {time.monotonic() - start:.0f} s, {failed} failed")
    return content, int(failed > 0 or not comparisons or bool(above_aim(comparisons)))


def check_creation(cases: Sequence[tuple[Case, Path]], arguments: argparse.Namespace) -> tuple[str, int]:  # noqa: ARG001
    """Compare creation and first requests; return the results in Markdown and the exit code."""
    start = time.monotonic()
    print(" | ".join(CREATION_HEAD))
    comparisons: list[CreationComparison] = []
    failed = 0
    # A new process from time to time: sessions of many models in one process slow each other down.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=20) as pool:
        for at, (case, folder) in enumerate(cases, start=1):
            try:
                comparison = pool.submit(compare_creation, folder).result()
            except Exception as error:  # noqa: BLE001 - of InferenceSession, for a model that it refuses
                failed += 1
                print(f"[{at}/{len(cases)}] {case.name}: {error}", flush=True)
                continue
            comparisons.append(comparison)
            print(f"[{at}/{len(cases)}] {' | '.join(comparison.cells())}", flush=True)
    above = [comparison for comparison in comparisons if comparison.above_aim]
    content = CREATION_TEXT.format(
        machine=this_machine(),
        version=ort.get_version_string(),
        models=len(comparisons),
        summary=summarise_creation(comparisons),
        table=markdown_table([CREATION_HEAD, *(comparison.cells() for comparison in above)]),
    )
    print(content)
    print(f"{len(cases)} models in {time.monotonic() - start:.0f} s, {failed} refused")
    return content, int(bool(above) or not comparisons)


def count_above_aims(rows: Sequence[Row]) -> dict[str, int]:
    """Return the number of models above each aim, without the aims that all models meet."""
    timings = [row.timing for row in rows if row.timing]
    counts = {name: sum((getattr(t, name) or 0.0) > most for t in timings) for name, most in AIMS.items()}
    return {name: count for name, count in counts.items() if count}


def select_cases(folder: Path, pattern: str) -> list[tuple[Case, Path]]:
    """Return the cases whose names match a regular expression anywhere, with their folders."""
    cases = [(read_case(path), path) for path in find_cases(folder)]
    return [(case, path) for case, path in cases if re.search(pattern, case.name)]


def make_all(arguments: argparse.Namespace) -> int:
    """Export the models of the chosen families; return 1 if a model could not be exported."""
    known = find_families()
    if unknown := set(arguments.family) - set(known):
        raise SystemExit(f"make: unknown families {', '.join(sorted(unknown))}; expected some of {', '.join(known)}")
    failed = []
    with open_environments(arguments.environments) as folder:
        for name in arguments.family or known:
            python = prepare_environment(folder, known[name])
            command = [str(python), str(FAMILIES / f"{name}.py"), str(arguments.folder.resolve())]
            print(f"{name}: exporting", flush=True)
            if subprocess.run(command, check=False).returncode:  # noqa: S603 - a module of the repository
                failed.append(name)
    if failed:
        print(f"families with models that could not be exported: {', '.join(failed)}")
    return int(bool(failed))


def add_to_sample(arguments: argparse.Namespace) -> int:
    """Write the named cases into the sample and print sizes; return 1 if a name matches no case."""
    cases = {read_case(folder).name: folder for folder in find_cases(arguments.folder)}
    missing = [name for name in arguments.names if not fnmatch.filter(cases, name)]
    for name, folder in cases.items():
        if any(fnmatch.fnmatch(name, pattern) for pattern in arguments.names):
            size = write_sample(folder, arguments.into)
            print(f"{name}: {size / 1e3:.1f} kB", flush=True)
    files = list(arguments.into.glob("*.gz"))
    print(f"{len(files)} models, {sum(path.stat().st_size for path in files) / 1e3:.0f} kB")
    if missing:
        print(f"names that match no case: {', '.join(missing)}")
    return int(bool(missing))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    make = commands.add_parser("make", help="export models")
    make.add_argument("folder", type=Path, help="where to write the models")
    make.add_argument("--family", nargs="*", default=[], help="families to export (default: all)")
    make.add_argument("--environments", type=Path, help="folder that keeps the environments (default: temporary)")
    make.set_defaults(command=make_all)
    checks = commands.add_parser("check", help="check models")
    checks.add_argument("folder", type=Path, help="folder of the models")
    checks.add_argument("--only", default="", help="a regular expression that names of models must match")
    checks.add_argument("--quick", action="store_true", help="fewer cuts and shapes")
    checks.add_argument("--random-cuts", type=int, help="number of random plans of each kind")
    measured = checks.add_mutually_exclusive_group()
    measured.add_argument("--latency", action="store_true", help="also measure the steady state")
    measured.add_argument("--timing", action="store_true", help="also measure latency, creation and memory")
    measured.add_argument("--memory", action="store_true", help="measure memory alone and check nothing else")
    measured.add_argument("--creation", action="store_true", help="measure creation and first requests alone")
    checks.add_argument("--plans", action="store_true", help="with --memory, use plans whatever their latency")
    checks.add_argument("--cache", type=Path, help="with --memory, folder that keeps measurements (default: temporary)")
    checks.add_argument("--processes", type=int, default=1, help="models to check at a time")
    add_output(checks)
    checks.set_defaults(command=check_all)
    sample = commands.add_parser("sample", help="add models to the sample that the tests run")
    sample.add_argument("folder", type=Path, help="folder of the models")
    sample.add_argument("names", nargs="+", help="names of models, with wildcards")
    sample.add_argument("--into", type=Path, default=SAMPLE, help="folder of the sample")
    sample.set_defaults(command=add_to_sample)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run the command of these words, or of the command line; return its exit code."""
    arguments = build_parser().parse_args(words)
    return int(arguments.command(arguments))


if __name__ == "__main__":
    sys.exit(main())
