"""Treatment of the caller's options: segments inherit them, or they are the reason why the model runs plain.

:mod:`chrion.runtime.options.table` lists the options and their treatment. :mod:`chrion.runtime.options.probe` finds the
options that Python cannot read. A configuration key that is not in the table is not detected, since onnxruntime does
not list the keys that are set, and segments do not inherit it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import onnx
import onnxruntime as ort

from chrion.graph.ort_sessions import first_line
from chrion.runtime.options.probe import (
    brings_adapters,
    fixes_dimensions,
    holds_files,
    open_probe,
    replaces_weights,
    weight_files,
    weight_names,
)
from chrion.runtime.options.table import (
    ARGUMENTS,
    RUN_KEYS,
    RUN_OPTIONS,
    SESSION_KEYS,
    SESSION_OPTIONS,
    Option,
)
from chrion.runtime.options.thread_limit import given_threads

log = logging.getLogger(__name__)

#: Options that change neither results nor speed.
_LOGGING = {"log_severity_level", "log_verbosity_level", "logid", "profile_file_prefix"}
_CONFIG_FROM_MODEL = "ORT_LOAD_CONFIG_FROM_MODEL"


def known_arguments(rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that InferenceSession uses, and warn about those that it ignores.

    Args:
        rest: The caller's further keyword arguments.
    """
    for name in sorted(set(rest) - set(ARGUMENTS)):
        log.warning("the argument %r is ignored, as InferenceSession ignores it", name)
    return {name: value for name, value in rest.items() if name in ARGUMENTS}


def wants_errors(rest: Mapping[str, Any]) -> bool:
    """Return whether the caller has disabled InferenceSession's fallback to other providers."""
    return int(rest.get("enable_fallback", 1)) != 1


def session_reason(options: ort.SessionOptions | None, rest: Mapping[str, Any]) -> str:
    """Find an option that Python can read and that makes the model run plain.

    Args:
        options: The caller's session options, or None.
        rest: InferenceSession's further keyword arguments.

    Returns:
        The reason, which names the option; empty if there is none.
    """
    if rest.get("disabled_optimizers"):
        return _reason("argument", ARGUMENTS["disabled_optimizers"])
    if int(rest.get("read_config_from_model", 0)) == 1:
        return _reason("argument", ARGUMENTS["read_config_from_model"])
    if os.environ.get(_CONFIG_FROM_MODEL) == "1":  # it also applies to sessions that load models and run segments
        return f"environment variable {_CONFIG_FROM_MODEL!r}: {ARGUMENTS['read_config_from_model'].why}"
    if options is None:
        return ""
    if options.has_providers():
        return _reason("session option", SESSION_OPTIONS["has_providers"])
    return _attribute_reason("session option", options, ort.SessionOptions(), SESSION_OPTIONS) or _entry_reason(
        "session configuration", options.get_session_config_entry, SESSION_KEYS
    )


def hidden_reason(
    options: ort.SessionOptions | None,
    model: onnx.ModelProto,
    weights: Iterable[str],
    accelerator: tuple[str, Mapping[str, Any]] | None,
) -> str:
    """Find an option that Python cannot read and that makes the model run plain.

    Args:
        options: The caller's session options, or None. :func:`session_reason` must have found no reason, so that
            sessions created with them write no files.
        model: The model as the caller gave it.
        weights: Names of the optimised model's weights.
        accelerator: The caller's accelerator and its options, if there is one.

    Returns:
        The reason, which names the option; empty if there is none.
    """
    if options is None:
        return ""
    try:
        open_probe(options)
    except Exception as error:  # noqa: BLE001 - InferenceSession raises it for the caller's model
        return f"session options (add_external_initializers, or invalid options): {first_line(error)}"
    if fixes_dimensions(options, model):
        return _reason("session option", SESSION_OPTIONS["add_free_dimension_override_by_name"])
    if replaces_weights(options, sorted({*weight_names(model), *weights}), accelerator):
        return _reason("session option", SESSION_OPTIONS["add_initializer"])
    if holds_files(options, weight_files(model)):
        return _reason("session option", SESSION_OPTIONS["add_external_initializers_from_files_in_memory"])
    return ""


def run_reason(options: ort.RunOptions | None, *, accelerated: bool) -> str:
    """Find an option that makes a request run plain.

    Args:
        options: The request's options, or None.
        accelerated: Whether the engine uses an accelerator.

    Returns:
        The reason, which names the option; empty if there is none.
    """
    if options is None:
        return ""
    keys = {key: option for key, option in RUN_KEYS.items() if accelerated or not option.for_accelerators}
    found = _attribute_reason("run option", options, ort.RunOptions(), RUN_OPTIONS) or _entry_reason(
        "run configuration", options.get_run_config_entry, keys
    )
    if not found and brings_adapters(options):
        return _reason("run option", RUN_OPTIONS["add_active_adapter"])
    return found


def inherit(base: ort.SessionOptions | None, target: ort.SessionOptions) -> None:
    """Copy the options that segments inherit from the caller's to a segment's."""
    if base is None:
        return
    for name, option in SESSION_OPTIONS.items():
        if option.inherited and hasattr(base, name):
            setattr(target, name, getattr(base, name))
    for key, value in readable_entries(base, (key for key, option in SESSION_KEYS.items() if option.inherited)):
        target.add_session_config_entry(key, value)


def optimises(options: ort.SessionOptions | None) -> bool:
    """Return whether the options let onnxruntime optimise the model, which is done before it is cut."""
    return options is None or options.graph_optimization_level != ort.GraphOptimizationLevel.ORT_DISABLE_ALL


def fingerprint(options: ort.SessionOptions | None) -> tuple[tuple[str, str], ...] | None:
    """Return the readable options that the choice between plans and plain sessions depends on."""
    if options is None:
        return None
    values = [(name, str(value)) for name, value in readable_attributes(options).items()]
    return tuple(sorted(pair for pair in (*values, *readable_entries(options)) if pair[0] not in _LOGGING))


def readable_attributes(options: ort.SessionOptions) -> dict[str, Any]:
    """Return the options that are attributes, as the caller has set them."""
    values = {name: getattr(options, name) for name in _attributes(options, SESSION_OPTIONS)}
    return values | {"intra_op_num_threads": given_threads(options)}


def readable_entries(options: ort.SessionOptions, keys: Iterable[str] = SESSION_KEYS) -> list[tuple[str, str]]:
    """List the configuration entries that are set, with their values."""
    return _entries(options.get_session_config_entry, keys)


def _attributes(options: Any, table: Mapping[str, Option]) -> list[str]:
    """Return the names of the table's options that are attributes in this release of onnxruntime."""
    return [name for name in table if hasattr(options, name) and not callable(getattr(options, name))]


def _attribute_reason(kind: str, options: Any, defaults: Any, table: Mapping[str, Option]) -> str:
    for name in _attributes(options, table):
        if table[name].harmless is not None and getattr(options, name) != getattr(defaults, name):
            return _reason(kind, table[name])
    return ""


def _entry_reason(kind: str, read: Callable[[str], str], table: Mapping[str, Option]) -> str:
    for key, value in _entries(read, table):
        harmless = table[key].harmless
        if harmless is not None and value not in harmless:
            return _reason(kind, table[key])
    return ""


def _entries(read: Callable[[str], str], keys: Iterable[str]) -> list[tuple[str, str]]:
    """Return the entries that are set, as (key, value)."""
    found = []
    for key in keys:
        try:
            found.append((key, read(key)))
        except RuntimeError:  # onnxruntime's answer for a key that is not set
            continue
    return found


def _reason(kind: str, option: Option) -> str:
    return f"{kind} {option.name!r}: {option.why}"
