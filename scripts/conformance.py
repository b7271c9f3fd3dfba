"""ONNX's own backend tests, all of them, through HybridSession with a forced split, beside plain onnxruntime.

``python scripts/conformance.py`` prints what each passes, how many models were really cut, and every test in which
HybridSession did worse: it failed where plain onnxruntime passed, or gave another answer. There should be none; the
exit code is 1 if there is one.

Tests run in processes of their own, so that one that takes its process with it costs no other test.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import onnx
import onnxruntime as ort

from onnx_suite import FORMS, Verdict, judge, names, prepare
from worker_processes import FailedJob, run_all


def work(test: tuple[str, str]) -> Verdict:
    """Judge one test, in a process for such."""
    return judge(*test)


def verdict(test: tuple[str, str], result: Verdict | FailedJob) -> Verdict:
    """What is to be said of a test, also of one that gave no result."""
    if isinstance(result, Verdict):
        return result
    return Verdict(*test, plain="unknown", hybrid=result.reason, segments=0, reason="", differs="")


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
        found = [verdict(*ended) for ended in run_all(work, tests, arguments.processes)]
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
