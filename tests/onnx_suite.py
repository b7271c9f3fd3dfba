"""ONNX's backend tests, run with plain onnxruntime and with HybridSession and a forced split.

Each test is run in two forms. ``as it is`` is the model of the suite, after onnxruntime's basic optimisation. Most of
these models are one operator and cannot be cut. Therefore ``surrounded`` inserts an Identity after each input and
before each output and disables the optimisation, so that the operator is cut off from its surroundings. It also lowers
the versions of models that are newer than onnxruntime supports to the newest supported ones, so that more of them run.
"""

from __future__ import annotations

import gc
import os
import unittest
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper
from onnx.backend.base import Backend, BackendRep
from onnx.backend.test.runner import Runner

from chrion import HybridSession
from chrion.backend import HybridRep
from random_plans import RandomCutBackend

#: The newest IR version and opset that onnxruntime 1.31 supports.
_NEWEST_IR, _NEWEST_OPSET = 13, 27

FORMS = ("as it is", "surrounded")
#: The sample contains every seventh test.
_SAMPLE_STEP = 7


@dataclass(frozen=True)
class Verdict:
    """The result of one test in one form."""

    name: str
    form: str
    #: ``passed``, or the reason for the failure.
    plain: str
    hybrid: str
    #: Segments that HybridSession ran; 0 if it ran plain.
    segments: int
    #: Why it ran plain.
    reason: str
    #: How the outputs differ; empty if they do not, or if either failed.
    differs: str

    @property
    def wrong(self) -> bool:
        """Return True if HybridSession did worse than plain onnxruntime."""
        return (self.plain == "passed" and self.hybrid != "passed") or bool(self.differs)


class _PlainRep(BackendRep):
    def __init__(self, model: onnx.ModelProto) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def run(self, inputs: Any, **_: Any) -> tuple[Any, ...]:
        names = [i.name for i in self._session.get_inputs()]
        arrays = [np.asarray(i) if isinstance(i, np.generic) else i for i in inputs]  # the suite passes bare numbers
        return tuple(self._session.run(None, dict(zip(names, arrays, strict=False))))


class _Recording(Backend):
    """A backend that records the outputs of its models, and the sessions that ran them.

    It runs plain onnxruntime sessions with one thread, or HybridSessions that are cut wherever that is legal.
    """

    hybrid = False
    form = FORMS[0]
    outputs: ClassVar[list[tuple[Any, ...]]]
    sessions: ClassVar[list[HybridSession]]

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **_: Any) -> BackendRep:  # noqa: ARG003
        model = surrounded(model) if cls.form == "surrounded" else model
        if not cls.hybrid:
            return _RecordingRep(_PlainRep(model), cls.outputs)
        rep = _prepare_cut(model, optimise=cls.form != "surrounded")
        cls.sessions.append(rep.session)
        return _RecordingRep(rep, cls.outputs)


class _RecordingRep(BackendRep):
    def __init__(self, rep: BackendRep, outputs: list[tuple[Any, ...]]) -> None:
        self._rep = rep
        self._outputs = outputs

    def run(self, inputs: Any, **_: Any) -> tuple[Any, ...]:
        found = tuple(self._rep.run(inputs))
        self._outputs.append(found)
        return found


def _prepare_cut(model: onnx.ModelProto, *, optimise: bool) -> HybridRep:
    backend: Any = type("Backend", (RandomCutBackend,), {"optimise": optimise})
    quiet = ort.SessionOptions()
    quiet.log_severity_level = 4
    rep: HybridRep = backend.prepare(model, sess_options=quiet)
    return rep


def surrounded(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with an Identity after each input and before each output that is a tensor."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    weights = {t.name for t in (*graph.initializer, *(s.values for s in graph.sparse_initializer))}
    before = [i for i in graph.input if i.type.HasField("tensor_type") and i.name not in weights]
    behind = [o for o in graph.output if o.type.HasField("tensor_type")]
    nodes = [helper.make_node("Identity", [f"{i.name}/given"], [i.name], f"{i.name}/before") for i in before]
    nodes += graph.node
    nodes += [helper.make_node("Identity", [o.name], [f"{o.name}/result"], f"{o.name}/behind") for o in behind]
    for value in before:
        value.name += "/given"
    for value in behind:
        value.name += "/result"
    del graph.node[:]
    graph.node.extend(nodes)
    copy.ir_version = min(copy.ir_version, _NEWEST_IR)
    for opset in copy.opset_import:
        if opset.domain in {"", "ai.onnx"}:
            opset.version = min(opset.version, _NEWEST_OPSET)
    if all(o.domain not in {"", "ai.onnx"} for o in copy.opset_import):
        copy.opset_import.append(helper.make_opsetid("", 13))
    return copy


@cache
def suite() -> dict[str, Callable[[Any], None]]:
    """Return all tests of the suite for the CPU by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite warns while it creates its tests
        cases = Runner(_Recording, __name__).test_cases.values()
    return {
        n: f for case in cases for n, f in sorted(vars(case).items()) if n.startswith("test_") and n.endswith("_cpu")
    }


def list_tests() -> list[str]:
    """Return the names of all tests in alphabetical order."""
    return sorted(suite())


def list_sample() -> list[str]:
    """Return the names of about 290 tests, always the same."""
    return list_tests()[::_SAMPLE_STEP]


def run_test(name: str, form: str) -> Verdict:
    """Run one test in one form, with plain onnxruntime first."""
    plain, expected, _ = _run(name, form, hybrid=False)
    hybrid, found, sessions = _run(name, form, hybrid=True)
    segments = sum(len(s.plan.segments) for s in sessions if s.plan is not None)
    reason = "; ".join(s.explain().splitlines()[0] for s in sessions if s.plan is None)
    for session in sessions:
        session.close()
    differs = _difference(expected, found) if len(expected) == len(found) else ""
    sessions.clear()
    gc.collect(1)  # sessions are in reference cycles
    return Verdict(name, form, plain, hybrid, segments, reason, differs)


def _run(name: str, form: str, *, hybrid: bool) -> tuple[str, list[tuple[Any, ...]], list[HybridSession]]:
    _Recording.hybrid, _Recording.form, _Recording.outputs, _Recording.sessions = hybrid, form, [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            suite()[name](None)
            outcome = "passed"
        except unittest.SkipTest as why:
            outcome = f"skipped: {why}"
        except Exception as error:  # noqa: BLE001 - a test may raise anything
            outcome = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return outcome, _Recording.outputs, _Recording.sessions


def _difference(expected: list[Any], found: list[Any]) -> str:
    """Describe how outputs differ; empty if they do not."""
    try:
        for theirs, ours in zip(expected, found, strict=True):
            _compare(theirs, ours)
    except AssertionError as error:
        return " ".join(str(error).split())[:300]
    return ""


def _compare(theirs: Any, ours: Any) -> None:
    if isinstance(theirs, list | tuple):
        assert len(theirs) == len(ours), f"{len(ours)} values, not {len(theirs)}"
        for a, b in zip(theirs, ours, strict=True):
            _compare(a, b)
    elif isinstance(theirs, np.ndarray):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), f"{ours.dtype}{ours.shape}"
        if theirs.dtype.kind == "f" or theirs.dtype.name == "bfloat16":
            np.testing.assert_allclose(ours.astype(np.float64), theirs.astype(np.float64), rtol=1e-3, atol=1e-5)
        else:
            np.testing.assert_array_equal(ours, theirs)
    else:
        assert theirs == ours, f"{ours!r}, not {theirs!r}"


def prepare(folder: str) -> None:
    """Make the suite write its data to a folder, not to the home folder, and onnxruntime accept unreleased opsets."""
    os.environ |= {"ONNX_HOME": folder, "ALLOW_RELEASED_ONNX_OPSET_ONLY": "0"}
    list_tests()
    gc.freeze()  # spares the garbage collector thousands of models that remain
