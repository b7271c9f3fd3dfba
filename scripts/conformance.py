"""ONNX's own backend tests, all of them, through HybridSession with a forced split, beside plain onnxruntime.

``python scripts/conformance.py`` prints what each passes, how many models were really cut, and every test in which
HybridSession did worse: it failed where plain onnxruntime passed, or gave another answer. There should be none; the
exit code is 1 if there is one.

Tests run in processes of their own, so that one that takes its process with it costs no other test.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import onnx
import onnxruntime as ort

from onnx_suite import FORMS, Verdict, judge, names, prepare

#: A test that takes longer counts as hung.
_PATIENCE_S = 120.0
#: How often that is looked at.
_TICK_S = 1.0


class Worker:
    """A process that runs tests one after another and says how each went."""

    def __init__(self, tests: Sequence[tuple[str, str]]) -> None:
        self._left = list(tests)
        #: Seconds that the test under way has taken while this process was awake too.
        self._waited_s = 0.0
        self._process: BaseProcess
        self.ear: Connection
        self._start()

    @property
    def done(self) -> bool:
        """Whether all its tests have been run."""
        return not self._left

    def hear(self) -> Verdict:
        """The next verdict; that of a test that took the process with it says so."""
        try:
            verdict: Verdict = self.ear.recv()
        except EOFError:
            verdict = self.bury("crashed")
        else:
            self._left.pop(0)
        self._waited_s = 0.0
        return verdict

    def bury(self, how: str) -> Verdict:
        """Give up the test under way, and begin a new process with the next one."""
        self._process.kill()
        self._process.join()
        name, form = self._left.pop(0)
        if self._left:
            self._start()
        return Verdict(name, form, plain="unknown", hybrid=how, segments=0, reason="", differs="")

    def hung(self, since_s: float) -> bool:
        """Whether the test under way has taken too long, now that so many more seconds have passed."""
        self._waited_s += min(since_s, 2 * _TICK_S)  # more: the machine slept, or both processes were stopped
        return self._waited_s > _PATIENCE_S

    def _start(self) -> None:
        self.ear, mouth = multiprocessing.Pipe(duplex=False)
        self._waited_s = 0.0
        self._process = multiprocessing.Process(target=_work, args=(list(self._left), mouth), daemon=True)
        self._process.start()
        mouth.close()


def _work(tests: list[tuple[str, str]], mouth: Connection) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    for name, form in tests:
        mouth.send(judge(name, form))


def verdicts(tests: Sequence[tuple[str, str]], processes: int) -> Iterator[Verdict]:
    """Run tests in several processes; verdicts come as they are made."""
    workers = [Worker(tests[at::processes]) for at in range(min(processes, len(tests)))]
    last = time.monotonic()
    while any(not w.done for w in workers):
        ready = wait([w.ear for w in workers if not w.done], timeout=_TICK_S)
        before, last = last, time.monotonic()
        for worker in workers:
            if worker.done:
                continue
            if worker.ear in ready:
                yield worker.hear()
            elif worker.hung(last - before):
                yield worker.bury(f"no answer in {_PATIENCE_S:.0f} s")


def main() -> int:
    """Run what was asked for; 1 if HybridSession did worse anywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="tests whose name contains this")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--reasons", action="store_true", help="say why models were not cut, and why tests fail")
    arguments = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        tests = [(name, form) for name in names() if arguments.only in name for form in FORMS]
        found = list(verdicts(tests, arguments.processes))
    report(found, reasons=arguments.reasons)
    print(f"{len(found)} runs of {len(found) // len(FORMS)} tests in {time.monotonic() - start:.0f} s")
    return int(any(v.wrong for v in found))


def report(found: Sequence[Verdict], *, reasons: bool) -> None:
    """Print counts for each form, then every difference."""
    print(f"onnx {onnx.__version__}, onnxruntime {ort.__version__}")
    for form in FORMS:
        mine = [v for v in found if v.form == form]
        passed = [v for v in mine if v.plain == "passed"]
        cut = sum(v.segments > 1 for v in passed)
        parts = sum(v.segments for v in passed)
        print(
            f"{form}: of {len(mine)} tests plain onnxruntime passes {len(passed)}, "
            f"HybridSession {sum(v.hybrid == 'passed' for v in mine)}; {cut} were cut, into {parts} segments"
        )
        if reasons:
            print_reasons(mine)
    wrong = [v for v in found if v.wrong or v.plain == "unknown"]
    print(f"differences: {len(wrong)}")
    for v in wrong:
        print(f"  {v.name}, {v.form}: plain {v.plain}; hybrid {v.hybrid} {v.differs} {v.reason}")


def print_reasons(found: Sequence[Verdict]) -> None:
    """Print why models that pass were not cut, and why plain onnxruntime fails the others."""
    whole = Counter(v.reason.rpartition(": ")[2] for v in found if v.plain == "passed" and not v.segments)
    failed = Counter(v.plain[:120] for v in found if v.plain != "passed")
    for counts in (whole, failed):
        for text, count in counts.most_common(12):
            print(f"  {count:5d}  {text}")


if __name__ == "__main__":
    sys.exit(main())
