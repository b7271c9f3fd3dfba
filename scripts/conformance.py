"""Run all of ONNX's backend tests with plain onnxruntime and with HybridSession and a forced split.

    python scripts/conformance.py [--only TEXT] [--reasons]

Takes about ten minutes on two cores and writes no file. Prints the number of tests that each passes, the number of
models that were cut, and every test in which HybridSession did worse: it failed where plain onnxruntime passed, or
returned a different output. The exit code is 1 if there is such a test.

Tests run in worker processes, so that a crash affects one test only.
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

from onnx_suite import FORMS, Verdict, list_tests, prepare, run_test
from worker_processes import FailedJob, run_all


def run_job(test: tuple[str, str]) -> Verdict:
    """Run one test; called in a worker process."""
    return run_test(*test)


def as_verdict(test: tuple[str, str], result: Verdict | FailedJob) -> Verdict:
    """Return the verdict of a test, also if its process failed."""
    if isinstance(result, Verdict):
        return result
    return Verdict(*test, plain="unknown", hybrid=result.reason, segments=0, reason="", differs="")


def main() -> int:
    """Run the tests; return 1 if HybridSession did worse in any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only tests whose names contain this text")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="tests to run at a time")
    parser.add_argument("--reasons", action="store_true", help="print why models were not cut and why tests fail")
    arguments = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        tests = [(name, form) for name in list_tests() if arguments.only in name for form in FORMS]
        found = [as_verdict(*ended) for ended in run_all(run_job, tests, arguments.processes)]
    print_report(found, reasons=arguments.reasons)
    print(f"{len(found)} runs of {len(found) // len(FORMS)} tests in {time.monotonic() - start:.0f} s")
    return int(any(v.wrong for v in found))


def print_report(found: Sequence[Verdict], *, reasons: bool) -> None:
    """Print counts for each form, then every difference."""
    print(f"onnx {onnx.__version__}, onnxruntime {ort.__version__}")
    for form in FORMS:
        of_form = [v for v in found if v.form == form]
        passed = [v for v in of_form if v.plain == "passed"]
        cut = sum(v.segments > 1 for v in passed)
        parts = sum(v.segments for v in passed)
        print(
            f"{form}: of {len(of_form)} tests plain onnxruntime passes {len(passed)}, "
            f"HybridSession {sum(v.hybrid == 'passed' for v in of_form)}; {cut} were cut, into {parts} segments"
        )
        if reasons:
            print_reasons(of_form)
    wrong = [v for v in found if v.wrong or v.plain == "unknown"]
    print(f"differences: {len(wrong)}")
    for v in wrong:
        print(f"  {v.name}, {v.form}: plain {v.plain}; hybrid {v.hybrid} {v.differs} {v.reason}")


def print_reasons(found: Sequence[Verdict]) -> None:
    """Print why passing models were not cut, and why plain onnxruntime fails the other tests."""
    whole = Counter(v.reason.rpartition(": ")[2] for v in found if v.plain == "passed" and not v.segments)
    failed = Counter(v.plain[:120] for v in found if v.plain != "passed")
    for counts in (whole, failed):
        for text, count in counts.most_common(12):
            print(f"  {count:5d}  {text}")


if __name__ == "__main__":
    sys.exit(main())
