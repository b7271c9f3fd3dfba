"""One random model through HybridSession and through plain onnxruntime.

A cut model may differ from a whole one in the last bits, since onnxruntime fuses less of it; and a model may turn a
last bit into a whole number, by rounding, comparing, or the sine of something large. So where answers differ, plain
onnxruntime is asked again, at its other optimisation levels and for inputs that differ in their last bits: if it does
not agree with itself, the model settles nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Self

import numpy as np
import onnx
import onnxruntime as ort

from chrion import HybridSession, Profile, load, partition
from chrion.graph import Graph
from chrion.profiler import CopyCost
from chrion.profiler.profiles import OperatorCost
from chrion.scheduler import Plan, random_plan, validate
from helpers import MACHINE
from random_models import Draft
from random_steps import random_model

_LEVELS = (
    ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
)
#: Sizes of the free dimension that a session is fed in turn.
_SIZES = (3, 1, 5, 3)
#: The exact policy is slow: larger graphs are not tried with it.
_MOST_EXACT = 6

Feed = dict[str, np.ndarray[Any, Any]]


class MismatchError(Exception):
    """HybridSession gave another answer than plain onnxruntime, or none."""


@dataclass
class Tally:
    """What was looked at."""

    models: int = 0
    #: Models that onnxruntime refuses.
    refused: int = 0
    runs: int = 0
    #: Runs over more than one segment.
    cut: int = 0
    segments: int = 0
    #: Runs that plain onnxruntime fails as well.
    failed: int = 0
    #: Answers that differ where plain onnxruntime does not agree with itself either.
    unsettled: int = 0
    plans: int = 0

    def __iadd__(self, other: Tally) -> Self:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


def examine(pick: Random, size: int, *, policies: Sequence[str] = ()) -> Tally:
    """Make a model and compare.

    Args:
        pick: Where chance comes from.
        size: Steps of the model.
        policies: Planners to try as well.

    Raises:
        MismatchError: HybridSession or a planner is wrong.
    """
    draft = random_model(pick, size)
    model = draft.model()
    tally = Tally(models=1)
    try:
        plain = [_session(model, level) for level in _LEVELS]
    except Exception:  # noqa: BLE001 - the generator knows less than onnxruntime
        tally.refused = 1
        return tally
    feeds = [draft.feed(size) for size in (_SIZES if draft.free else _SIZES[:2])]
    for everywhere in (True, False):
        optimise = pick.random() < 0.7
        graph = load(model, optimise=optimise)
        maker = partial(random_plan, pick=pick, everywhere=everywhere)
        with HybridSession(graph, _quiet(), plan=maker) as session:
            for feed in feeds:
                _compare(session, plain, feed, tally)
    if policies and tally.failed < tally.runs:
        _plan(draft, model, plain, feeds[0], pick, policies, tally)
    return tally


def _plan(
    draft: Draft,
    model: onnx.ModelProto,
    plain: Sequence[ort.InferenceSession],
    feed: Feed,
    pick: Random,
    policies: Sequence[str],
    tally: Tally,
) -> None:
    """Every policy makes a valid plan of the model, and what it plans is right."""
    names = {i.name for i in draft.inputs}
    graph = load(model, {name: array.shape for name, array in feed.items() if name in names})
    for policy in policies:
        if policy == "exact" and len(graph.dag) > _MOST_EXACT:
            continue
        profile = made_up_profile(graph, pick)
        plan = partition(graph, profile, policy=policy, streams=pick.choice([1, 3]))
        costs = profile.costs(plan.apply(graph).dag)
        validate(plan.apply(graph).dag, costs, plan.schedule)
        again = Plan.from_json(plan.to_json())
        if again != plan:
            raise MismatchError(f"policy {policy}: the plan is another after a round trip")
        tally.plans += 1
        with HybridSession(graph, _quiet(), plan=plan) as session:
            _compare(session, plain, feed, tally)


def made_up_profile(graph: Graph, pick: Random) -> Profile:
    """Costs at random, for an accelerator that is the CPU by another lane."""
    operators = {
        signature: OperatorCost(
            op_type=op_type,
            cpu_ms=(cost := pick.choice([0.01, 0.1, 1.0]), cost),
            accelerator_ms=pick.choice([None, 0.01, 0.1]),
        )
        for signature, op_type in zip(graph.dag.signatures, graph.dag.op_types, strict=True)
    }
    copy = CopyCost(pick.choice([0.0, 0.05]), 1e-6)
    return Profile(MACHINE, 2, "CPUExecutionProvider", operators, copy, copy, handoff_ms=0.01, dispatch_ms=0.01)


def _session(model: onnx.ModelProto, level: ort.GraphOptimizationLevel) -> ort.InferenceSession:
    options = _quiet()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _quiet() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return options


def _compare(session: HybridSession, plain: Sequence[ort.InferenceSession], feed: Feed, tally: Tally) -> None:
    tally.runs += 1
    quiet = ort.RunOptions()
    quiet.log_severity_level = 4
    try:
        expected = plain[0].run(None, feed, quiet)
    except Exception:  # noqa: BLE001 - some operators refuse what is empty, for example
        tally.failed += 1
        expected = None
    try:
        found = session.run(None, feed, quiet)
    except Exception as error:
        if expected is None:
            return
        raise MismatchError(f"failed where plain onnxruntime does not: {error}\n{session.explain()}") from error
    segments = len(session.plan.segments) if session.plan else 0
    tally.segments += segments
    tally.cut += segments > 1
    if expected is None:
        return
    wrong = difference(found, expected)
    if not wrong:
        return
    if any(difference(other, expected) for other in _alike(plain, feed, quiet)):
        tally.unsettled += 1
        return
    raise MismatchError(f"{wrong}\n{session.explain()}")


def _alike(plain: Sequence[ort.InferenceSession], feed: Feed, quiet: ort.RunOptions) -> Iterator[list[Any]]:
    """What plain onnxruntime makes of the same otherwise, and of almost the same."""
    for other in plain[1:]:
        yield other.run(None, feed, quiet)
    numbers = np.random.default_rng(0)
    for _ in range(4):
        nudged = {
            name: a * (1 + 4 * np.finfo(a.dtype).eps * numbers.choice([-1, 1], a.shape)).astype(a.dtype)
            if a.dtype.kind == "f"
            else a
            for name, a in feed.items()
        }
        yield plain[0].run(None, nudged, quiet)


def difference(ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    """In what answers differ beyond rounding; empty if they do not."""
    if len(ours) != len(theirs):
        return f"{len(ours)} outputs, not {len(theirs)}"
    for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        wrong = difference(a, b) if isinstance(b, list) else _array_difference(a, b)
        if wrong:
            return f"output {at}: {wrong}"
    return ""


def _array_difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> str:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
    if b.dtype.kind != "f":
        return "" if np.array_equal(a, b) else f"{a}, not {b}"
    tolerance = 1e-2 if b.dtype == np.float16 else 1e-4
    with np.errstate(all="ignore"):
        same = np.allclose(a, b, rtol=tolerance, atol=tolerance / 10, equal_nan=True)
    return "" if same else f"{a}, not {b}"
