"""Models of real exporters, made and checked: HybridSession in every way, beside plain onnxruntime.

``python scripts/exporters.py make FOLDER`` exports the models of all families in ``tests/exporters/``, each family in
an environment with what it requires. ``check FOLDER`` runs every model: the default session, a forced plan of every
policy, random cuts, several shapes, repeated calls, OrtValues and IOBinding. Its exit code is 1 if any answer differs
or any call fails that plain onnxruntime serves, or if a measured ratio exceeds its aim. ``--latency`` also measures
latency; ``--timing`` measures creation and memory as well; ``-o docs/exporters.md`` fills in the page's table.
``sample FOLDER NAME ...`` adds models to the sample that the tests run.

Each model is checked in a process of its own, so that a crash costs one model. Times are measured after all checks, one
model at a time.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import hashlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "exporters"))

import onnxruntime as ort
from cases import Case, find_cases, read_case, read_feeds
from checks import QUICK, Effort, Outcome, check
from page_markers import fill_sections, markdown_table
from sample import SAMPLE, write_sample
from timing import Timing, latency, measure

from chrion.files import write_atomically
from chrion.profiler import this_machine
from output_comparison import Tolerance
from worker_processes import Lost, run_all

FAMILIES = Path(__file__).parent.parent / "tests" / "exporters"
MARKER = "exporters"
#: The name that a family assigns its requirements to.
NEEDED = "REQUIREMENTS"
#: Seconds that checking one model may take.
PATIENCE_S = 900.0
REASON_WORDS = 10


@dataclass(frozen=True)
class Job:
    """A case to check."""

    case: Case
    folder: Path
    effort: Effort


@dataclass(frozen=True)
class Row:
    """What is known of a case once it is checked."""

    case: Case
    outcome: Outcome | None
    timing: Timing | None
    #: How the process ended, or why timing failed; empty if all went well.
    failure: str = ""

    @property
    def wrong(self) -> bool:
        """Whether HybridSession did worse than plain onnxruntime."""
        return self.outcome is None or bool(self.outcome.findings)

    @property
    def equal(self) -> str:
        """The verdict, as the table has it."""
        if self.outcome is None:
            return self.failure
        if self.outcome.findings:
            return f"no ({len(self.outcome.findings)})"
        return f"yes ({self.outcome.unsettled} unsettled)" if self.outcome.unsettled else "yes"

    def cells(self) -> list[str]:
        """The case's line of the table."""
        cells = [self.case.name, f"{self.case.exporter} {self.case.version}"]
        if self.outcome is None:
            return [*cells, "", self.failure, "", "", *[""] * 5]
        chosen = self.outcome.chosen
        if chosen == "plain":
            chosen = f"plain: {brief(self.outcome.reason)}"
        cells += [str(self.outcome.operators or ""), self.equal, f"{self.outcome.cut} of {self.outcome.runs}", chosen]
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


def work(job: Job) -> Row:
    """Check a case, in a process for such."""
    ort.set_default_logger_severity(4)
    case = read_case(job.folder)
    tolerance = Tolerance(case.rtol, case.atol)
    outcome = check(job.folder / "model.onnx", read_feeds(job.folder), tolerance, job.effort, case.name)
    return Row(case, outcome, None)


def time_all(folder: Path) -> Timing | str:
    """Measure everything for a case; the reason if that fails."""
    ort.set_default_logger_severity(4)
    try:
        return measure(folder)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        return f"not timed: {error}"


def time_latency(folder: Path) -> Timing | str:
    """Measure the steady state of a case with the cache at hand; the reason if that fails."""
    ort.set_default_logger_severity(4)
    try:
        return Timing(None, None, None, None, latency(folder))
    except (OSError, RuntimeError) as error:
        return f"not timed: {error}"


def brief(reason: str) -> str:
    """Return the first words of the reason for a plain session."""
    text = reason.partition(": ")[2].partition(" (")[0] or reason
    words = text.split()
    return " ".join(words[:REASON_WORDS]) + (" ..." if len(words) > REASON_WORDS else "")


def run_checks(jobs: Sequence[Job], processes: int) -> list[Row]:
    """Check all cases and print each as it ends."""
    rows: list[Row] = []
    for at, (job, result) in enumerate(run_all(work, jobs, processes, PATIENCE_S), start=1):
        row = Row(job.case, None, None, result.how) if isinstance(result, Lost) else result
        rows.append(row)
        print(f"[{at}/{len(jobs)}] {' | '.join(row.cells())}", flush=True)
        for finding in [*(row.outcome.findings if row.outcome else ()), *filter(None, [row.failure])]:
            print(f"    {finding}", flush=True)
    return sorted(rows, key=lambda row: row.case.name)


def run_timing(rows: Sequence[Row], folders: Mapping[str, Path], clock: Callable[[Path], Timing | str]) -> list[Row]:
    """Measure all cases, one at a time, and print each as it ends."""
    known = {folders[row.case.name]: row for row in rows}
    for at, (folder, result) in enumerate(run_all(clock, list(known), 1, PATIENCE_S), start=1):
        failure = result.how if isinstance(result, Lost) else result if isinstance(result, str) else ""
        timing = result if isinstance(result, Timing) else None
        known[folder] = replace(known[folder], timing=timing, failure=known[folder].failure or failure)
        print(f"timed [{at}/{len(rows)}] {' | '.join(known[folder].cells())}", flush=True)
    return [known[folders[row.case.name]] for row in rows]


def report(rows: Sequence[Row]) -> str:
    """Return what goes into the page."""
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
    """Check the cases of a folder; 1 if HybridSession did worse in any."""
    for path in arguments.output:
        fill_sections(path.read_text(encoding="utf-8"), {MARKER: ""})  # refuses a page before anything is run
    effort = QUICK if arguments.quick else Effort()
    if arguments.random_cuts is not None:
        effort = replace(effort, random_cuts=arguments.random_cuts)
    start = time.monotonic()
    print(" | ".join(HEAD))
    cases = chosen_cases(arguments.folder, arguments.only)
    rows = run_checks([Job(case, folder, effort) for case, folder in cases], arguments.processes)
    if arguments.timing or arguments.latency:
        folders = {case.name: folder for case, folder in cases}
        rows = run_timing(rows, folders, time_all if arguments.timing else time_latency)
    content = report(rows)
    print(content)
    for path in arguments.output:
        write_atomically(path, fill_sections(path.read_text(encoding="utf-8"), {MARKER: content}))
    wrong = sum(row.wrong for row in rows)
    print(f"{len(rows)} models in {time.monotonic() - start:.0f} s, {wrong} with differences")
    missed = missed_aims(rows)
    print(*(f"{name}: {count} of {len(rows)} models above {AIMS[name]}" for name, count in missed.items()), sep="\n")
    return int(wrong > 0 or not rows or bool(missed))


def missed_aims(rows: Sequence[Row]) -> dict[str, int]:
    """Return how many models exceed each aim that any exceeds."""
    timings = [row.timing for row in rows if row.timing]
    counts = {name: sum((getattr(t, name) or 0.0) > most for t in timings) for name, most in AIMS.items()}
    return {name: count for name, count in counts.items() if count}


def chosen_cases(folder: Path, pattern: str) -> list[tuple[Case, Path]]:
    """Return the cases whose names a regular expression is found in, with their folders."""
    cases = [(read_case(path), path) for path in find_cases(folder)]
    return [(case, path) for case, path in cases if re.search(pattern, case.name)]


def requirements(module: Path) -> list[str] | None:
    """Return a family's requirements without importing it; None for a module that is no family."""
    for statement in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == [NEEDED]:
            return [str(item) for item in ast.literal_eval(statement.value)]
    return None


def families() -> dict[str, list[str]]:
    """Return the requirements of all families by name."""
    found = {path.stem: requirements(path) for path in sorted(FAMILIES.glob("*.py"))}
    return {name: needed for name, needed in found.items() if needed is not None}


def make_all(arguments: argparse.Namespace) -> int:
    """Export the models of the chosen families; 1 if any could not be exported."""
    known = families()
    if unknown := set(arguments.family) - set(known):
        raise SystemExit(f"make: no family {', '.join(sorted(unknown))}; there are {', '.join(known) or 'none'}")
    failed = []
    with environments(arguments.environments) as folder:
        for name in arguments.family or known:
            python = environment(folder, known[name])
            command = [str(python), str(FAMILIES / f"{name}.py"), str(arguments.folder.resolve())]
            print(f"{name}: exporting", flush=True)
            if subprocess.run(command, check=False).returncode:  # noqa: S603 - a module of the repository
                failed.append(name)
    if failed:
        print(f"not all exported: {', '.join(failed)}")
    return int(bool(failed))


@contextmanager
def environments(kept: Path | None) -> Iterator[Path]:
    """Provide the folder of the environments: one that is kept, or a temporary one."""
    if kept is not None:
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def environment(folder: Path, needed: Sequence[str]) -> Path:
    """Return the interpreter of the environment with the given requirements; it is made if it does not exist.

    Requirements that begin with a dash are options of pip.
    """
    key = hashlib.sha256("\n".join(sorted(needed)).encode()).hexdigest()[:12]
    python, complete = folder / key / "bin" / "python", folder / key / "complete"
    if not complete.exists():
        print(f"installing {', '.join(needed)}", flush=True)
        venv.create(folder / key, with_pip=True, clear=True)
        arguments = [part for item in needed for part in (shlex.split(item) if item.startswith("-") else [item])]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *arguments], check=True)  # noqa: S603 - what the repository lists
        complete.touch()
    return python


def sample_some(arguments: argparse.Namespace) -> int:
    """Write the named cases into the sample, print sizes; 1 if a name matches no case."""
    cases = {read_case(folder).name: folder for folder in find_cases(arguments.folder)}
    missing = [name for name in arguments.names if not fnmatch.filter(cases, name)]
    for name, folder in cases.items():
        if any(fnmatch.fnmatch(name, pattern) for pattern in arguments.names):
            size = write_sample(folder, arguments.into)
            print(f"{name}: {size / 1e3:.1f} kB", flush=True)
    files = list(arguments.into.glob("*.gz"))
    print(f"{len(files)} models, {sum(path.stat().st_size for path in files) / 1e3:.0f} kB")
    if missing:
        print(f"no case matches {', '.join(missing)}")
    return int(bool(missing))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    whole = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = whole.add_subparsers(required=True)
    make = commands.add_parser("make", help="export models")
    make.add_argument("folder", type=Path)
    make.add_argument("--family", nargs="*", default=[], help="families; all if missing")
    make.add_argument("--environments", type=Path, help="folder that keeps the environments; temporary if missing")
    make.set_defaults(command=make_all)
    checks = commands.add_parser("check", help="run models")
    checks.add_argument("folder", type=Path)
    checks.add_argument("--only", default="", help="a regular expression over the names of models")
    checks.add_argument("--quick", action="store_true", help="fewer cuts and shapes")
    checks.add_argument("--random-cuts", type=int, help="random plans of each kind")
    checks.add_argument("--latency", action="store_true", help="measure the steady state as well")
    checks.add_argument("--timing", action="store_true", help="measure latency, creation and memory as well")
    checks.add_argument("--processes", type=int, default=1, help="models to check at a time")
    checks.add_argument("-o", "--output", type=Path, nargs="*", default=[], help="pages whose markers to fill")
    checks.set_defaults(command=check_all)
    sample = commands.add_parser("sample", help="add models to the sample of the tests")
    sample.add_argument("folder", type=Path)
    sample.add_argument("names", nargs="+", help="names of models, with wildcards")
    sample.add_argument("--into", type=Path, default=SAMPLE, help="folder of the sample")
    sample.set_defaults(command=sample_some)
    return whole


def main() -> int:
    """Do what was asked for."""
    arguments = parser().parse_args()
    return int(arguments.command(arguments))


if __name__ == "__main__":
    sys.exit(main())
