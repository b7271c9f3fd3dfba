"""Checks of an exported model: HybridSession, run in every way, against plain onnxruntime.

The stages of :func:`check`: plain onnxruntime's outputs for every request; a default session, called in every way,
repeatedly; a plan of every policy; random cuts. Findings are collected, so that one does not hide the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import numpy as np
import onnxruntime as ort

from chrion import HybridSession, load
from chrion.graph import Graph
from chrion.scheduler import POLICIES, Plan
from differential_testing import MAX_EXACT_OPERATORS, plan_at_random_costs
from output_comparison import Feed, Reference, Tolerance, quiet_options, quiet_run
from random_plans import random_plan

Session = HybridSession | ort.InferenceSession
Way = Callable[[Any, Feed], list[Any]]


@dataclass(frozen=True)
class Effort:
    """The extent of a check.

    Attributes:
        policies: Policies whose plans are forced.
        random_cuts: Number of random plans of each kind: cut around every operator, and cut only where operators wait.
        rounds: Number of times that the default session serves all requests.
        scattered_operators: Larger graphs are cut around every operator for the first request only.
        all_shapes: Whether every policy plans for every request; otherwise policies plan for one of the first two in
            turns, and random plans serve both.
    """

    policies: Sequence[str] = tuple(POLICIES)
    random_cuts: int = 2
    rounds: int = 2
    scattered_operators: int = 400
    all_shapes: bool = True


QUICK = Effort(random_cuts=1, all_shapes=False)


@dataclass
class Outcome:
    """The result of :func:`check`."""

    operators: int = 0
    #: How the default session ran the first request: ``plan`` or ``plain``.
    chosen: str = ""
    #: The first line of its explanation.
    reason: str = ""
    runs: int = 0
    #: Runs of more than one segment.
    cut: int = 0
    #: Runs that fail in plain onnxruntime, too.
    failed: int = 0
    #: Outputs that differ, but for which plain onnxruntime does not agree with itself either.
    unsettled: int = 0
    #: Differences and failures that plain onnxruntime does not have.
    findings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Served:
    """A request and plain onnxruntime's outputs; None if plain onnxruntime fails."""

    feed: Feed
    expected: list[Any] | None


def by_run(session: Session, feed: Feed) -> list[Any]:
    """Run with arrays, as most callers do; without run options, native lanes serve the request."""
    return list(session.run(None, feed))


def by_options(session: Session, feed: Feed) -> list[Any]:
    """Run with run options, which lane threads serve."""
    return list(session.run(None, feed, quiet_run()))


def by_ort_values(session: Session, feed: Feed) -> list[Any]:
    """Run with OrtValues in and out."""
    names = [o.name for o in session.get_outputs()]
    return [_read(value) for value in session.run_with_ort_values(names, _ort_values(feed), quiet_run())]


def by_binding(session: Session, feed: Feed) -> list[Any]:
    """Run with bound OrtValues, and outputs bound without a buffer."""
    return _bound(session, session.io_binding(), feed)


def by_address(session: Session, feed: Feed) -> list[Any]:
    """Run on inputs and outputs at addresses, as callers bind the tensors of other libraries."""
    arrays = {name: np.asarray(v, order="C") for name, v in feed.items() if isinstance(v, np.ndarray) and _number(v)}
    binding = session.io_binding()
    for name, value in _ort_values({n: v for n, v in feed.items() if n not in arrays}).items():
        binding.bind_ortvalue_input(name, value)
    for name, array in arrays.items():
        binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    outputs = [output.name for output in session.get_outputs()]
    results = [np.zeros_like(r) if isinstance(r, np.ndarray) and _number(r) else r for r in by_run(session, feed)]
    for name, result in zip(outputs, results, strict=True):
        if isinstance(result, np.ndarray) and _number(result):
            binding.bind_output(name, "cpu", 0, result.dtype.type, result.shape, result.ctypes.data)
        else:
            binding.bind_output(name)
    session.run_with_iobinding(binding, quiet_run())
    copied = binding.copy_outputs_to_cpu()
    return [r if isinstance(r, np.ndarray) and _number(r) else c for r, c in zip(results, copied, strict=True)]


def by_foreign_binding(session: Session, feed: Feed) -> list[Any]:
    """Run with a binding of onnxruntime's own class, as optimum does."""
    return _bound(session, ort.IOBinding(session), feed)


def _bound(session: Session, binding: Any, feed: Feed) -> list[Any]:
    """Run with a binding of OrtValues."""
    for name, value in _ort_values(feed).items():
        binding.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        binding.bind_output(output.name)
    session.run_with_iobinding(binding, quiet_run())
    return list(binding.copy_outputs_to_cpu())


def _number(array: np.ndarray[Any, Any]) -> bool:
    """Return whether an array can be bound by address: it is not empty and has a number type of numpy."""
    return array.dtype.kind in "biuf" and array.size > 0 and array.dtype.isnative


WAYS: dict[str, Way] = {
    "run": by_run,
    "run options": by_options,
    "OrtValues": by_ort_values,
    "IOBinding": by_binding,
    "addresses": by_address,
    "onnxruntime's IOBinding": by_foreign_binding,
}
#: Ways that bind outputs.
BINDING = (by_binding, by_address, by_foreign_binding)


def check(
    model: Path,
    feeds: Sequence[Feed],
    tolerance: Tolerance,
    effort: Effort,
    seed: str = "",
    kind: type[HybridSession] = HybridSession,
) -> Outcome:
    """Run a model in every way, and compare outputs.

    Args:
        model: The model's file.
        feeds: Requests; later ones may have other shapes.
        tolerance: Differences up to it count as equal.
        effort: The extent of the check.
        seed: Seed of random cuts and costs.
        kind: The class to check.
    """
    outcome = Outcome()
    try:
        plain = Reference(model, tolerance)
    except Exception as refused:
        outcome.failed += 1
        _check_refusal(model, refused, outcome)
        return outcome
    served = [Served(feed, _answer(plain, feed)) for feed in feeds]
    checks = _Checks(model, plain, served, effort, Random(crc32(seed.encode())), outcome, kind)
    checks.default()
    checks.forced()
    return outcome


@dataclass(frozen=True)
class _Checks:
    """The stages of the check of one model."""

    model: Path
    plain: Reference
    served: Sequence[Served]
    effort: Effort
    pick: Random
    outcome: Outcome
    kind: type[HybridSession]

    def default(self) -> None:
        """Serve all requests with a default session, in every way, repeatedly."""
        with self._session("default", self.model) as session:
            if session is None:
                return
            self._compare(session, "default, run", by_run, [*self.served] * self.effort.rounds)
            self._compare_signatures(session)
            # onnxruntime crashes on some bound outputs that are sequences of maps.
            tensors = all(output.type.startswith("tensor(") for output in session.get_outputs())
            for name, way in WAYS.items():
                if way is not by_run and (tensors or way not in BINDING):
                    self._compare(session, f"default, {name}", way, self.served)

    def _compare_signatures(self, session: HybridSession) -> None:
        """Compare names, types and shapes of inputs, outputs and overridable weights."""
        for method in ("get_inputs", "get_outputs", "get_overridable_initializers"):
            ours, theirs = (
                [(a.name, a.type, a.shape) for a in getattr(s, method)()] for s in (session, self.plain.session)
            )
            if ours != theirs:
                self._find(f"default, {method}", f"{ours}, not {theirs}")

    def forced(self) -> None:
        """Serve requests with plans of every policy, and with random plans."""
        chosen = self.served if self.effort.all_shapes else self.served[:2]
        graphs = self._graphs(chosen)
        if not graphs:
            return
        self.outcome.operators = len(graphs[0][0].dag)
        for at, policy in enumerate(self.effort.policies):
            for graph, one in graphs if self.effort.all_shapes else [graphs[at % len(graphs)]]:
                if policy != "exact" or len(graph.dag) <= MAX_EXACT_OPERATORS:
                    self._plan(
                        f"policy {policy}", graph, partial(plan_at_random_costs, policy=policy, pick=self.pick), [one]
                    )
        for at in range(self.effort.random_cuts):
            for everywhere in (True, False):
                large = everywhere and self.outcome.operators > self.effort.scattered_operators
                requests = chosen[:1] if large else [*chosen, chosen[0]]
                maker = partial(random_plan, pick=self.pick, everywhere=everywhere)
                name = f"{'scattered' if everywhere else 'random'} {at}"
                self._plan(name, self.model, maker, requests)

    def _plan(
        self, name: str, source: Path | Graph, maker: Callable[[Graph], Plan], requests: Sequence[Served]
    ) -> None:
        with self._session(name, source, maker) as session:
            if session is not None:
                self._compare(session, name, by_run, requests)
                if isinstance(source, Path):
                    self._compare(session, f"{name}, IOBinding", by_binding, requests[:1])

    def _graphs(self, requests: Sequence[Served]) -> list[tuple[Graph, Served]]:
        """Return the graph for the shapes of each request, without those for which it cannot be loaded."""
        found = []
        with suppress(Exception):
            graph = load(self.model)
            inputs = {i.name for i in graph.inputs}
            for one in requests:
                shapes = {name: np.shape(v) for name, v in one.feed.items() if name in inputs}
                with suppress(Exception):
                    found.append((load(self.model, shapes) if graph.declared_free else graph, one))
        return found

    def _compare(self, session: HybridSession, name: str, way: Way, requests: Sequence[Served]) -> None:
        """Serve all requests before comparing, so that outputs that a later request overwrites are detected."""
        found = [self._run(session, name, way, one) for one in requests]
        for at, (one, answer) in enumerate(zip(requests, found, strict=True)):
            if answer is None or one.expected is None:
                continue
            wrong = self.plain.difference(answer, one.expected)
            if wrong and way is not by_run and self._plain_answers(way, one.feed, answer):
                continue  # onnxruntime leaves the buffer of an output that is an input as it is
            if wrong and self.plain.settles(one.feed, one.expected):
                self._find(f"{name}, request {at}", wrong)
            elif wrong:
                self.outcome.unsettled += 1

    def _run(self, session: HybridSession, name: str, way: Way, one: Served) -> list[Any] | None:
        outcome = self.outcome
        try:
            answer = way(session, one.feed)
        except Exception as error:
            if one.expected is not None and self._plain_serves(way, one.feed):
                self._find(name, f"{type(error).__name__}: {error}")
            else:
                outcome.failed += 1
            answer = None
        outcome.runs += 1
        outcome.cut += session.plan is not None and len(session.plan.segments) > 1
        if not outcome.chosen:
            outcome.chosen = "plan" if session.plan else "plain"
            outcome.reason = session.explain().splitlines()[0]
        return answer

    def _plain_serves(self, way: Way, feed: Feed) -> bool:
        try:
            way(self.plain.session, feed)
        except Exception:
            return False
        return True

    def _plain_answers(self, way: Way, feed: Feed, answer: list[Any]) -> bool:
        """Return whether a plain session gives the same answer in the same way, however it differs from ``run``'s."""
        try:
            return not self.plain.difference(answer, way(self.plain.session, feed))
        except Exception:
            return False

    @contextmanager
    def _session(
        self, name: str, source: Path | Graph, maker: Callable[[Graph], Plan] | None = None
    ) -> Iterator[HybridSession | None]:
        """Open a session; None if it cannot be created, which is a finding.

        A forced plan runs with ``strict``, so that no session on the CPU replaces it.
        """
        forced = maker is not None
        try:
            session = self.kind(source, quiet_options() if forced else None, plan=maker, strict=forced, tune="now")
        except Exception as error:
            self._find(name, f"not created: {type(error).__name__}: {error}")
            yield None
            return
        with session:
            yield session

    def _find(self, where: str, what: str) -> None:
        self.outcome.findings.append(f"{where}: {' '.join(what.split())[:400]}")


def _check_refusal(model: Path, refused: Exception, outcome: Outcome) -> None:
    try:
        HybridSession(model, tune="now").close()
    except type(refused):
        return
    except Exception as error:
        outcome.findings.append(f"default: raises {type(error).__name__}, not {type(refused).__name__}")
        return
    outcome.findings.append(f"default: accepts a model that plain onnxruntime refuses: {refused}")


def _answer(plain: Reference, feed: Feed) -> list[Any] | None:
    try:
        return plain.run(feed)
    except Exception:
        return None


def _ort_values(feed: Feed) -> dict[str, ort.OrtValue]:
    return {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in feed.items()}


def _read(value: ort.OrtValue) -> Any:
    return value.numpy()
