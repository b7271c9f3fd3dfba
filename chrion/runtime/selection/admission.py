"""Admission of models: a model that may be cut is loaded; for any other, the reason why it runs plain is found."""

from __future__ import annotations

import os
from pathlib import Path

import onnx

from chrion.allocator import trim
from chrion.errors import InputError, UnsafeModelError
from chrion.graph.loader import load
from chrion.graph.model import Graph
from chrion.graph.optimise import original_name
from chrion.graph.reading import read_model
from chrion.runtime.options.session_options import hidden_reason, optimises, session_reason
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.selector import why_plain
from chrion.scheduler.plan import Plan


def admit(model: str | Path | bytes | onnx.ModelProto | Graph, config: SessionConfig) -> tuple[Graph | None, str]:
    """Load a model, or find the reason why it runs plain.

    Options are checked first, since with some of them onnxruntime writes files whenever a session is created.

    Returns:
        The graph and an empty text; or None and the reason why the model runs plain.

    Raises:
        InputError: The caller gave a plan, and the model cannot be loaded for it.
        UnsafeModelError: The model names files outside of its folder.
    """
    reason = session_reason(config.options, config.rest)
    source = model.source if isinstance(model, Graph) else model
    try:
        given = read_model(source)[0] if config.options is not None or reason else None
        if reason:
            return None, reason
        graph = model if isinstance(model, Graph) else _load(model, config)
        if given is not None:
            names = {original_name(weight) for weight in graph.weight_names}
            reason = hidden_reason(config.options, given, names, config.accelerator)
    except Exception as error:
        planned = isinstance(config.plan, Plan) and not reason
        if isinstance(error, UnsafeModelError) or (planned and isinstance(error, InputError)):
            raise
        return None, reason or why_plain(error)
    finally:
        trim()
    return (None, reason) if reason else (graph, "")


def _load(model: str | Path | bytes | onnx.ModelProto, config: SessionConfig) -> Graph:
    if isinstance(config.plan, Plan):
        return load(model, config.plan.shapes)
    return load(model, optimise=optimises(config.options))


def plain_source(model: str | Path | bytes | onnx.ModelProto | Graph) -> str | bytes:
    """Return the path or the bytes from which InferenceSession opens a model.

    Raises:
        TypeError: The argument is neither a model nor a path.
    """
    if isinstance(model, Graph):
        model = model.source
    if isinstance(model, onnx.ModelProto):
        return bytes(model.SerializeToString())
    if isinstance(model, bytes):
        return model
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)
    raise TypeError(f"Unable to load from type '{type(model)}'")


def raise_if_unsafe(source: str | bytes, error: Exception) -> None:
    """Raise if onnxruntime refused a model because it names files outside of its folder.

    Raises:
        UnsafeModelError: The model names such files.
    """
    try:
        read_model(source)
    except UnsafeModelError as reason:
        raise reason from error
    except Exception:  # noqa: BLE001 - onnxruntime's error is raised
        return
