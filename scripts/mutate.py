"""Mutation testing: how many seeded faults in the source code the tests detect.

``sample`` draws mutants of functions in the given folders and files, the same for the same seed. ``run`` applies one
after another to a copy of the checkout and runs the tests that cover the mutated line, the quickest first, until one
fails. Which tests cover a line, and how long each takes, comes from a run of the tests under coverage::

    COVERAGE_CORE=ctrace pytest -m '' --cov=chrion --cov-context=test --junitxml=build/tests.xml
    python scripts/mutate.py sample --seed 1 --count 320 -o build/mutants.json
    python scripts/mutate.py run build/mutants.json --coverage .coverage --times build/tests.xml -o build/default.jsonl
    python scripts/mutate.py run build/mutants.json --coverage .coverage --times build/tests.xml -m '' \
        --survivors-of build/default.jsonl -o build/all.jsonl
    python scripts/mutate.py table build/default.jsonl build/all.jsonl

A mutant is detected if a test fails or the run exceeds its limit of time. ``run`` may be interrupted: repeated with the
same output file, it continues.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
#: What is mutated by default.
TARGETS = ("scheduler", "runtime", "manager", "graph", "generation/scheduling.py")
_COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "+"}
_AUGMENTED = {ast.Add: "-=", ast.Sub: "+=", ast.Mult: "/=", ast.Div: "*=", ast.BitOr: "&=", ast.BitAnd: "|="}
_SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}
#: Calls whose removal no test has to notice.
_SILENT = ("log.", "logger.", "warnings.", "gc.")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of the source code.

    Attributes:
        path: File, relative to the root of the checkout.
        line: Line on which the mutated expression or statement begins, counted from 1.
        start: Offset of the replaced bytes.
        end: End of the replaced bytes.
        text: Replacement.
        kind: What was changed.
    """

    path: str
    line: int
    start: int
    end: int
    text: str
    kind: str

    @property
    def key(self) -> str:
        """Name of the mutant, unique in a sample."""
        return f"{self.path}:{self.line}:{self.start}:{self.kind}"


class _Finder(ast.NodeVisitor):
    """Finds the mutants of the functions of a file."""

    def __init__(self, path: str, source: bytes) -> None:
        self._path = path
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._depth = 0
        self.found: list[Mutant] = []

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return (
            self._starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            self._starts[node.end_lineno - 1] + node.end_col_offset,  # type: ignore[attr-defined]
        )

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()

    def _add(self, node: ast.AST, start: int, end: int, text: str, kind: str) -> None:
        if self._depth:
            self.found.append(Mutant(self._path, node.lineno, start, end, text, kind))  # type: ignore[attr-defined]

    def _replace(self, node: ast.AST, text: str, kind: str) -> None:
        self._add(node, *self._span(node), text, kind)

    def _between(self, node: ast.AST, left: ast.AST, right: ast.AST, text: str, kind: str) -> None:
        """Replace what stands between two operands; parentheses around an operand stay."""
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self._source[start:end].decode()
        closing = gap[: len(gap) - len(gap.lstrip(") \n"))].replace(" ", "").replace("\n", "")
        opening = gap[len(gap.rstrip("( \n")) :].replace(" ", "").replace("\n", "")
        if "#" not in gap:
            self._add(node, start, end, f"{closing} {text} {opening}", kind)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._depth += 1
        for part in (node.args, *node.body):
            self.visit(part)
        self._depth -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function  # noqa: N815 - names of ast.NodeVisitor

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        """Skip annotations."""

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self._between(node, left, right, _COMPARISONS[type(operator)], "comparison")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if text := _ARITHMETIC.get(type(node.op)):
            self._between(node, node.left, node.right, text, "arithmetic")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(node, left, right, "or" if isinstance(node.op, ast.And) else "and", "boolean")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace(node, f"bool({self._text(node.operand)})", "negation")
        self.generic_visit(node)

    def _visit_test(self, node: ast.If | ast.While | ast.IfExp) -> None:
        self._replace(node.test, f"(not ({self._text(node.test)}))", "condition")
        self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = _visit_test  # noqa: N815

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value), "constant")
        elif isinstance(node.value, int | float):
            self._replace(node, repr(node.value + 1), "constant")

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip formatted messages."""

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in _SWAPPED:
            self._replace(node.func, _SWAPPED[node.func.id], "function")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if text := _AUGMENTED.get(type(node.op)):
            self._between(node, node.target, node.value, text, "arithmetic")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and self._text(node.value) != "None":
            self._replace(node.value, "None", "return")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not self._text(node).startswith(_SILENT):
            self._replace(node, "pass", "call")
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._replace(node, "continue", "loop")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "break", "loop")

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace(node, "pass", "raise")


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Return all mutants of a file that are valid Python."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    valid = []
    for mutant in finder.found:
        try:
            compile(mutated(source, mutant), path, "exec")
        except SyntaxError:
            continue
        valid.append(mutant)
    return valid


def mutated(source: bytes, mutant: Mutant) -> bytes:
    """Return the content of a file with a mutant."""
    return source[: mutant.start] + mutant.text.encode() + source[mutant.end :]


def sample(targets: list[str], seed: int, count: int) -> list[Mutant]:
    """Draw mutants: an equal share of each target's lines, at most one on a line."""
    files = [
        p
        for t in targets
        for p in sorted([ROOT / "chrion" / t] if t.endswith(".py") else (ROOT / "chrion" / t).rglob("*.py"))
    ]
    every: list[Mutant] = []
    for file in files:
        every += mutants_of(str(file.relative_to(ROOT)), file.read_bytes())
    random.Random(seed).shuffle(every)  # noqa: S311 - not for cryptography
    lines: set[tuple[str, int]] = set()
    chosen = []
    for mutant in every:
        if (mutant.path, mutant.line) not in lines:
            lines.add((mutant.path, mutant.line))
            chosen.append(mutant)
    return chosen[:count]


class Coverage:
    """Which tests execute a line, from coverage's data file with one context for each test."""

    def __init__(self, data: Path) -> None:
        self._data = sqlite3.connect(f"file:{data}?mode=ro", uri=True)
        self._files = {name: number for number, name in self._data.execute("select id, path from file")}
        self._contexts = dict(self._data.execute("select id, context from context"))

    def tests(self, path: str, line: int, *, last: int | None = None) -> set[str]:
        """Return the ids of the tests that execute a line of a file."""
        number = next((n for name, n in self._files.items() if name.endswith(f"/{path}")), None)
        found = set()
        for context, bits in self._data.execute(
            "select context_id, numbits from line_bits where file_id = ?", (number,)
        ):
            if any(at // 8 < len(bits) and bits[at // 8] >> at % 8 & 1 for at in range(line, (last or line) + 1)):
                found.add(self._contexts[context].rsplit("|", 1)[0])
        return found - {""}


def test_times(report: Path) -> dict[str, float]:
    """Return the duration of each test in seconds, from lines of JSON or JUnit's XML."""
    times: dict[str, float] = {}
    if report.suffix != ".xml":
        for line in report.read_text(encoding="utf-8").splitlines():
            name, _, seconds, _ = json.loads(line)
            times[name] = times.get(name, 0.0) + seconds
        return times
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - our own file
        module = case.get("classname", "").replace(".", "/")
        times[f"{module}.py::{case.get('name')}"] = float(case.get("time", 0))
    return times


class Checkout:
    """A copy of the checkout in which mutants are tried, one at a time.

    Args:
        folder: Where the copy is made.
        markers: Value of pytest's option ``-m``; None for the tests that ``pytest`` runs by default.
    """

    def __init__(self, folder: Path, markers: str | None) -> None:
        self.folder = folder
        self._markers = [] if markers is None else ["-m", markers]
        ignored = shutil.ignore_patterns(".git", "build", "__pycache__", ".*_cache", ".hypothesis", "*.html")
        shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)

    def try_mutant(self, mutant: Mutant, tests: list[str], limit_s: float) -> dict[str, object]:
        """Run tests on a mutant until one fails.

        Returns:
            ``state`` (``killed``, ``survived``, ``uncovered``), ``by`` (the test, or ``time``), and ``seconds``.
        """
        if not tests:
            return {"state": "uncovered", "by": "", "seconds": 0.0}
        path = self.folder / mutant.path
        source = path.read_bytes()
        path.write_bytes(mutated(source, mutant))
        begin = time.monotonic()
        try:
            code, output = self._pytest(tests, limit_s)
        finally:
            path.write_bytes(source)
        took = round(time.monotonic() - begin, 1)
        if code in {0, 5}:  # all passed; all deselected
            return {"state": "survived" if code == 0 else "uncovered", "by": "", "seconds": took}
        failed = [line.split()[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return {
            "state": "killed",
            "by": "time" if code is None else (failed or [f"exit code {code}"])[0],
            "seconds": took,
        }

    def _pytest(self, tests: list[str], limit_s: float) -> tuple[int | None, str]:
        """Run tests in a process group; return pytest's exit code, None beyond the limit, and its output."""
        with tempfile.TemporaryDirectory() as scratch:
            names = Path(scratch, "tests.txt")
            names.write_text("\n".join(tests), encoding="utf-8")
            environment = {
                **os.environ,
                "PYTHONPATH": str(self.folder),
                "PYTHONDONTWRITEBYTECODE": "1",
                "TMPDIR": scratch,
                "CI": "1",  # the same examples of property tests for each mutant
            }
            words = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-o", "timeout=60", "-n", "0"]
            command = [sys.executable, "-m", "pytest", *words, *self._markers, f"@{names}"]
            log = Path(scratch, "log.txt")
            with log.open("wb") as out:
                process = subprocess.Popen(  # noqa: S603 - our own interpreter
                    command, cwd=self.folder, env=environment, stdout=out, stderr=out, start_new_session=True
                )
                try:
                    code: int | None = process.wait(limit_s)
                except subprocess.TimeoutExpired:
                    code = None
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            return code, log.read_text(encoding="utf-8", errors="replace")


def order(tests: set[str], times: dict[str, float], budget_s: float) -> list[str]:
    """Return tests, the quickest first but of each file in turn, as many as fit a budget of time.

    Tests of a file often fail together, so that a mutant is usually found by the first tests of all files.
    """
    files: dict[str, list[str]] = {}
    for test in sorted(tests, key=lambda name: times.get(name, 1.0)):
        files.setdefault(test.split("::")[0], []).append(test)
    ranked = sorted(
        ((rank, times.get(test, 1.0), test) for own in files.values() for rank, test in enumerate(own)),
        key=lambda entry: (entry[0].bit_length(), entry[1]),
    )
    chosen, total = [], 0.0
    for _, seconds, test in ranked:
        if total + seconds <= budget_s:
            chosen.append(test)
            total += seconds
    return chosen


def _read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def run(arguments: argparse.Namespace) -> None:
    """Try the mutants of a sample."""
    mutants = [Mutant(**entry) for entry in json.loads(arguments.mutants.read_text(encoding="utf-8"))]
    if arguments.survivors_of:
        killed = {entry["key"] for entry in _read(arguments.survivors_of) if entry["state"] == "killed"}
        mutants = [mutant for mutant in mutants if mutant.key not in killed]
    done = {entry["key"] for entry in _read(arguments.output)}
    times = test_times(arguments.times)
    coverage = Coverage(arguments.coverage)
    work = []
    for mutant in mutants:
        if mutant.key not in done:
            tests = {test for test in coverage.tests(mutant.path, mutant.line) if test in times}
            work.append((mutant, order(tests, times, arguments.budget)))
    with tempfile.TemporaryDirectory() as scratch, arguments.output.open("a", encoding="utf-8") as out:
        free: SimpleQueue[Checkout] = SimpleQueue()
        for at in range(arguments.jobs):
            free.put(Checkout(Path(scratch, str(at)), arguments.markers))

        def attempt(task: tuple[Mutant, list[str]]) -> dict[str, object]:
            mutant, tests = task
            checkout = free.get()
            try:
                limit_s = 60 + 4 * sum(times[test] for test in tests)
                return {"key": mutant.key, **asdict(mutant), **checkout.try_mutant(mutant, tests, limit_s)}
            finally:
                free.put(checkout)

        with ThreadPoolExecutor(arguments.jobs) as pool:
            for number, result in enumerate(pool.map(attempt, work), 1):
                out.write(json.dumps(result) + "\n")
                out.flush()
                spent = f"{result['state']:9} {result['seconds']:>6} s"
                print(f"{number}/{len(work)} {spent}  {result['key']}  {result['by']}")


def _rows(paths: list[Path]) -> Iterator[str]:
    """Return the lines of the table: mutants killed by each run, and those that survive all."""
    killed: dict[str, set[str]] = {}
    entries: dict[str, dict[str, object]] = {}
    for path in paths:
        for entry in _read(path):
            key = str(entry["key"])
            entries[key] = entry
            if entry["state"] == "killed":
                killed.setdefault(key, set()).add(path.stem)
    every = len(entries)
    for at in range(1, len(paths) + 1):
        names = {path.stem for path in paths[:at]}
        count = sum(bool(by & names) for by in killed.values())
        yield f"{' and '.join(sorted(names))}: {count} of {every} killed ({count / max(every, 1):.1%})"
    yield "survivors:"
    source = {path: (ROOT / path).read_bytes() for path in {str(entry["path"]) for entry in entries.values()}}
    for key in sorted(entries.keys() - killed.keys()):
        mutant = Mutant(**{name: entries[key][name] for name in Mutant.__slots__})  # type: ignore[arg-type]
        before = source[mutant.path][mutant.start : mutant.end].decode(errors="replace").strip()
        change = f"{before!r} -> {mutant.text.strip()!r} ({entries[key]['state']})"
        yield f"  {mutant.path}:{mutant.line} {mutant.kind}: {change}"


def main() -> None:
    """Parse the command line and run its command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True, dest="command")
    draw = commands.add_parser("sample", help="draw mutants")
    draw.add_argument("targets", nargs="*", default=[*TARGETS], help="folders and files of the package")
    draw.add_argument("--seed", type=int, default=1)
    draw.add_argument("--count", type=int, default=320)
    draw.add_argument("-o", "--output", type=Path, required=True)
    attempt = commands.add_parser("run", help="run the tests on each mutant")
    attempt.add_argument("mutants", type=Path)
    attempt.add_argument("--coverage", type=Path, required=True, help="data file with a context for each test")
    attempt.add_argument("--times", type=Path, required=True, help="JUnit report of the same run")
    attempt.add_argument("-m", "--markers", help="pytest's -m; by default the tests that pytest runs by default")
    attempt.add_argument(
        "--survivors-of", type=Path, help="results of an earlier run, whose killed mutants are left out"
    )
    attempt.add_argument("--budget", type=float, default=300.0, help="seconds of tests for each mutant")
    attempt.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1)
    attempt.add_argument("-o", "--output", type=Path, required=True)
    table = commands.add_parser("table", help="print the shares, and the survivors")
    table.add_argument("results", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "sample":
        mutants = sample(arguments.targets, arguments.seed, arguments.count)
        arguments.output.write_text(json.dumps([asdict(mutant) for mutant in mutants], indent=0), encoding="utf-8")
        print(f"{len(mutants)} mutants in {len({mutant.path for mutant in mutants})} files")
    elif arguments.command == "run":
        run(arguments)
    else:
        print("\n".join(_rows(arguments.results)))


if __name__ == "__main__":
    main()
