"""Exports of PyTorch modules, shared by the families that start from one.

A family's function builds a :class:`Subject`; :func:`traced` and :func:`captured` register it as a case of the
TorchScript exporter or of the dynamo exporter. Both may stand above one function.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from cases import Feed, case

#: Names of dynamic axes by input (or output) name and axis.
Axes = Mapping[str, Mapping[int, str]]


@dataclass(frozen=True)
class Subject:
    """A module and the requests it is exported for.

    Attributes:
        module: With random weights. Its forward method takes the tensors of a request in order.
        feeds: Requests; the first is the example that the exporter runs.
        outputs: Names of outputs.
        axes: Dynamic axes of inputs. The TorchScript exporter takes those of outputs as well.
        options: Passed to ``torch.onnx.export`` as they are.
    """

    module: torch.nn.Module
    feeds: Sequence[Feed]
    outputs: Sequence[str] = ("output",)
    axes: Axes = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


Builder = Callable[[], Subject]


def traced(name: str, *, opset: int = 17, rtol: float = 1e-3, atol: float = 1e-4) -> Callable[[Builder], Builder]:
    """Register a subject as a case of the TorchScript exporter."""

    def register(build: Builder) -> Builder:
        @case(name, exporter="torch.onnx (TorchScript)", package="torch", rtol=rtol, atol=atol)
        def _make(path: Path) -> Sequence[Feed]:
            return export(seeded(build), path, dynamo=False, opset=opset)

        return build

    return register


def captured(name: str, *, opset: int = 18, rtol: float = 1e-3, atol: float = 1e-4) -> Callable[[Builder], Builder]:
    """Register a subject as a case of the dynamo exporter."""

    def register(build: Builder) -> Builder:
        @case(name, exporter="torch.onnx (dynamo)", package="torch", rtol=rtol, atol=atol)
        def _make(path: Path) -> Sequence[Feed]:
            return export(seeded(build), path, dynamo=True, opset=opset)

        return build

    return register


def seeded(build: Builder) -> Subject:
    """Build a subject with the same random weights in every process."""
    torch.manual_seed(0)
    return build()


def export(subject: Subject, path: Path, *, dynamo: bool, opset: int) -> Sequence[Feed]:
    """Export a subject to a path and return its requests."""
    names = list(subject.feeds[0])
    arguments = tuple(_tensor(value) for value in subject.feeds[0].values())
    dynamic: dict[str, Any] = (
        {"dynamic_shapes": _dynamic_shapes(subject, names)} if dynamo else {"dynamic_axes": _all_axes(subject)}
    )
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        torch.backends.mha.set_fastpath_enabled(False)  # the TorchScript exporter lacks the fused operator
        torch.onnx.export(
            subject.module.eval(),
            arguments,
            str(path),
            input_names=names,
            output_names=list(subject.outputs),
            opset_version=opset,
            dynamo=dynamo,
            verbose=False,
            **{**dynamic, **subject.options},
        )
    return [_kept(feed, path) for feed in subject.feeds]


def integers(high: int, *shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return random int64 values from zero up to ``high``, exclusive."""
    return np.random.default_rng([seed, *shape]).integers(0, high, shape, dtype=np.int64)


def normal(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return float32 values of a normal distribution."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def _kept(feed: Feed, path: Path) -> Feed:
    """Return the part of a request that the model takes: the TorchScript exporter drops inputs without a use."""
    inputs = {value.name for value in onnx.load(path, load_external_data=False).graph.input}
    return {name: value for name, value in feed.items() if name in inputs}


def _tensor(value: Any) -> Any:
    return [torch.from_numpy(item) for item in value] if isinstance(value, list) else torch.from_numpy(value)


def _all_axes(subject: Subject) -> dict[str, dict[int, str]]:
    return {name: dict(axes) for name, axes in subject.axes.items()}


def _dynamic_shapes(subject: Subject, names: Sequence[str]) -> Any:
    shapes = tuple(dict(subject.axes.get(name, {})) for name in names)
    parameters = inspect.signature(subject.module.forward).parameters.values()
    variadic = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    return (shapes,) if variadic else shapes
