"""Run random models with HybridSession, every scheduler and plain onnxruntime, and compare their outputs.

    python scripts/soak.py --minutes 30 [--seed NUMBER] [--folder soak-failures]
    python scripts/soak.py --replay NUMBER

Takes the given time, ten minutes by default. Prints the number of the first model, and counts at the end. For each
failure it writes the model, its inputs and the traceback to the folder, under the model's number, which ``--replay``
accepts. The exit code is 1 if a model failed.

Models run in worker processes. If one crashes, the model is run with plain onnxruntime alone; a crash of that is
counted and is not a failure.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import secrets
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np
import onnx
import onnxruntime as ort

from chrion.scheduler import POLICIES
from differential_testing import Counts, compare_random_model
from random_operators import random_model
from worker_processes import FailedJob, run_all

#: Every third model is planned by every policy.
_PLAN_INTERVAL = 3
_MAX_STEPS = 20


@dataclass(frozen=True)
class Failure:
    """The traceback of a failed comparison."""

    traceback: str


def steps_of(number: int) -> int:
    """Return the number of steps of the model with the given number."""
    return 1 + number % _MAX_STEPS


def check_model(number: int) -> Counts | Failure:
    """Compare the model with the given number."""
    policies = tuple(POLICIES) if number % _PLAN_INTERVAL == 0 else ()
    try:
        return compare_random_model(Random(number), steps_of(number), policies=policies)  # noqa: S311 - reproducible
    except Exception:  # noqa: BLE001 - any exception is reported
        return Failure(traceback.format_exc())


def run_plain(number: int) -> bool:
    """Run the model once with plain onnxruntime alone; a process that crashes here does not crash because of Chrion."""
    draft = random_model(Random(number), steps_of(number))  # noqa: S311 - reproducible
    model = draft.model()
    try:
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, draft.feed())
    except Exception:  # noqa: BLE001 - an exception is not a crash
        return False
    return True


def write_failure(number: int, text: str, folder: Path) -> None:
    """Write a model, its first inputs and the traceback."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = random_model(Random(number), steps_of(number))  # noqa: S311 - reproducible
    onnx.save(draft.model(), folder / f"{number}.onnx")
    np.savez(folder / f"{number}.npz", **draft.feed())  # type: ignore[arg-type] # numpy's stub misreads the names
    (folder / f"{number}.txt").write_text(text, encoding="utf-8")


def count_until(seed: int, minutes: float) -> Iterator[int]:
    """Yield consecutive numbers until the time is over."""
    end = time.monotonic() + 60 * minutes
    return itertools.takewhile(lambda _: time.monotonic() < end, itertools.count(seed))


def soak(seed: int, minutes: float, processes: int, folder: Path) -> int:
    """Compare models until the time is over; return the number of failures."""
    total, failures, crashes, start = Counts(), 0, 0, time.monotonic()
    for number, result in run_all(check_model, count_until(seed, minutes), processes):
        if isinstance(result, Counts):
            total += result
            continue
        text = result.reason if isinstance(result, FailedJob) else result.traceback
        if isinstance(result, FailedJob) and isinstance(next(iter(run_all(run_plain, [number], 1)))[1], FailedJob):
            crashes += 1
            print(f"model {number}: {text}; plain onnxruntime fails as well")
            continue
        failures += 1
        write_failure(number, text, folder)
        print(f"model {number}: {text.splitlines()[-1][:300]}", flush=True)
    figures = ", ".join(f"{value} {name}" for name, value in asdict(total).items())
    print(f"{(time.monotonic() - start) / 60:.1f} minutes: {figures}; {crashes} crashes of plain onnxruntime")
    print(f"failures: {failures}")
    return failures


def main() -> int:
    """Run the comparison; return 1 if a model failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="duration (default: 10)")
    parser.add_argument("--seed", type=int, help="number of the first model (default: random)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="models to run at a time")
    parser.add_argument("--folder", type=Path, default=Path("soak-failures"), help="where to write failures")
    parser.add_argument("--replay", type=int, metavar="NUMBER", help="run this model alone, in this process")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        result = check_model(arguments.replay)
        print(result.traceback if isinstance(result, Failure) else result)
        return int(isinstance(result, Failure))
    seed = secrets.randbelow(10**9) if arguments.seed is None else arguments.seed
    print(f"seed {seed}; onnxruntime {ort.__version__}", flush=True)
    gc.freeze()
    return int(soak(seed, arguments.minutes, arguments.processes, arguments.folder) > 0)


if __name__ == "__main__":
    sys.exit(main())
