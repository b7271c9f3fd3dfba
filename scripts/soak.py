"""Random models through HybridSession and every planner, beside plain onnxruntime, for as long as you like.

``python scripts/soak.py --minutes 30`` prints the seed it began with and what it has looked at. Whatever goes wrong
is kept in ``soak-failures``: the model, its inputs and what was wrong, by the number that ``--replay`` takes. The exit
code is 1 if something did. Models run in processes of their own; where one crashes, plain onnxruntime alone is asked as
well, since that may be who crashes.
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
from differential_testing import Tally, examine
from random_operators import random_model
from worker_processes import FailedJob, run_all

#: One model in so many is planned by every policy too.
_PLANNED = 3
_LARGEST = 20


@dataclass(frozen=True)
class Wrong:
    """What went wrong, with all that Python knows of it."""

    text: str


def size_of(number: int) -> int:
    """Steps of the model of that number."""
    return 1 + number % _LARGEST


def work(number: int) -> Tally | Wrong:
    """Examine the model of that number."""
    policies = tuple(POLICIES) if number % _PLANNED == 0 else ()
    try:
        return examine(Random(number), size_of(number), policies=policies)  # noqa: S311 - to be repeated, not secret
    except Exception:  # noqa: BLE001 - whatever it is, it is to be reported
        return Wrong(traceback.format_exc())


def alone(number: int) -> bool:
    """Only plain onnxruntime, once; a process that ends in this has not crashed because of Chrion."""
    draft = random_model(Random(number), size_of(number))  # noqa: S311
    model = draft.model()
    try:
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, draft.feed())
    except Exception:  # noqa: BLE001 - an error is no crash
        return False
    return True


def keep(number: int, text: str, folder: Path) -> None:
    """Write a model, its first inputs and what was wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = random_model(Random(number), size_of(number))  # noqa: S311
    onnx.save(draft.model(), folder / f"{number}.onnx")
    np.savez(folder / f"{number}.npz", **draft.feed())  # type: ignore[arg-type] # numpy's stub takes the names amiss
    (folder / f"{number}.txt").write_text(text, encoding="utf-8")


def numbers(seed: int, minutes: float) -> Iterator[int]:
    """Numbers of models, one after another, until the time is over."""
    end = time.monotonic() + 60 * minutes
    return itertools.takewhile(lambda _: time.monotonic() < end, itertools.count(seed))


def soak(seed: int, minutes: float, processes: int, folder: Path) -> int:
    """Examine models until the time is over; returns how many went wrong."""
    total, wrong, crashed, start = Tally(), 0, 0, time.monotonic()
    for number, result in run_all(work, numbers(seed, minutes), processes):
        if isinstance(result, Tally):
            total += result
            continue
        text = result.reason if isinstance(result, FailedJob) else result.text
        if isinstance(result, FailedJob) and isinstance(next(iter(run_all(alone, [number], 1)))[1], FailedJob):
            crashed += 1
            print(f"model {number}: plain onnxruntime {text} as well")
            continue
        wrong += 1
        keep(number, text, folder)
        print(f"model {number}: {text.splitlines()[-1][:300]}", flush=True)
    figures = ", ".join(f"{value} {name}" for name, value in asdict(total).items())
    print(f"{(time.monotonic() - start) / 60:.1f} minutes: {figures}; {crashed} crashes of onnxruntime alone")
    print(f"wrong: {wrong}")
    return wrong


def main() -> int:
    """Run what was asked for; 1 if something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="number of the first model; at random if missing")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, default=Path("soak-failures"))
    parser.add_argument("--replay", type=int, metavar="NUMBER", help="only this model, in this process")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        result = work(arguments.replay)
        print(result.text if isinstance(result, Wrong) else result)
        return int(isinstance(result, Wrong))
    seed = secrets.randbelow(10**9) if arguments.seed is None else arguments.seed
    print(f"seed {seed}; onnxruntime {ort.__version__}", flush=True)
    gc.freeze()
    return int(soak(seed, arguments.minutes, arguments.processes, arguments.folder) > 0)


if __name__ == "__main__":
    sys.exit(main())
