"""Decisions in a file beside the model, made ahead by ``chrion tune --beside`` and shipped with the model.

The file may hold decisions of several machines, session configurations and shapes. A decision is used if the model's
digest, the machine, the versions of Chrion and onnxruntime, the session configuration and the shapes are the same as
when it was made. A file without such a decision, or one that is damaged, is ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from chrion.common.files import parse_json, read_bytes, write_atomically
from chrion.errors import PlanError
from chrion.graph.opened_model import OpenedModel
from chrion.runtime.selection.decisions import Decision, decision_from_json

log = logging.getLogger(__name__)

SCHEMA = "chrion.decisions/1"
_SUFFIX = ".chrion.json"
#: Larger files are ignored.
_MAX_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a decision depends on besides the model and its shapes."""

    #: Fingerprint of the machine, which includes the version of onnxruntime.
    machine: str
    #: Version of Chrion, and whether it has lanes in C.
    software: str
    #: Hash of the session configuration.
    configuration: str

    @classmethod
    def of(cls, machine: str, software: object, configuration: object) -> Conditions:
        """Return the conditions; values are compared by their ``repr``."""
        return cls(machine, repr(software), hashlib.sha256(repr(configuration).encode()).hexdigest()[:32])


@dataclass(frozen=True, slots=True)
class ShippedDecision:
    """A decision and the shapes that it was made for."""

    #: Shapes of the inputs by name, for a model with free dimensions; empty for any other model.
    shapes: Mapping[str, Sequence[int]]
    #: Digest of the graph of these shapes; empty if the model cannot be loaded as a graph.
    graph: str
    decision: Decision


def shipped_path(model: str | Path) -> Path:
    """Return the path of the file beside a model."""
    return Path(f"{model}{_SUFFIX}")


def holds_decisions(path: Path) -> bool:
    """Return whether a file holds decisions, to which others can be added."""
    return _read(path) is not None


def recall(
    model: OpenedModel, conditions: Conditions, *, shapes: Mapping[str, Sequence[int]] | None = None, graph: str = ""
) -> Decision | None:
    """Return the decision in the file beside a model.

    Args:
        model: The model, which has a file.
        conditions: Conditions of the session.
        shapes: Shapes of the inputs by name, empty for a model without free dimensions; None to search by ``graph``.
        graph: Digest of the graph of known shapes.

    Returns:
        None if there is no file, which costs one system call, or if it holds no such decision.
    """
    path = shipped_path(model.path)
    content = _read(path)
    if content is None:
        return None
    reason = "it holds no decision for this machine, these versions, this session configuration and these shapes"
    for entry in content["decisions"]:
        try:
            if Conditions(**entry["conditions"]) != conditions:
                continue
            same = entry["graph"] == graph if shapes is None else _as_lists(entry["shapes"]) == _as_lists(shapes)
            if not same:
                continue
            if content["model"] != model.digest:
                reason = "it was made for another version of the model"
                break
            return replace(decision_from_json(entry["decision"]), origin=str(path))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, PlanError) as error:
            reason = f"damaged: {type(error).__name__}: {error}"
    log.info("%s is ignored: %s", path, reason)
    return None


def write_beside(model: OpenedModel, conditions: Conditions, decisions: Sequence[ShippedDecision]) -> Path:
    """Write decisions to the file beside a model, atomically, and return its path.

    Decisions for other conditions or shapes that the file holds are kept, if they are for the same model.

    Raises:
        OptionError: The file cannot be written.
    """
    path = shipped_path(str(model.source))
    before = _read(path)
    entries = [_entry(conditions, decision) for decision in decisions]
    replaced = [(entry["conditions"], entry["shapes"]) for entry in entries]
    if before and before["model"] == model.digest:
        entries += [e for e in before["decisions"] if _is_entry(e) and (e["conditions"], e["shapes"]) not in replaced]
    content = {"schema": SCHEMA, "model": model.digest, "decisions": entries}
    write_atomically(path, json.dumps(content) + "\n")
    return path


def _entry(conditions: Conditions, shipped: ShippedDecision) -> dict[str, Any]:
    return {
        "conditions": asdict(conditions),
        "shapes": _as_lists(shipped.shapes),
        "graph": shipped.graph,
        "decision": shipped.decision.to_json(),
    }


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and {"conditions", "shapes", "graph", "decision"} <= entry.keys()


def _as_lists(shapes: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    return {name: list(shape) for name, shape in shapes.items()}


def _read(path: Path) -> dict[str, Any] | None:
    """Return the content of the file, or None; log why it is ignored."""
    try:
        content = parse_json(read_bytes(path, _MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.info("%s is ignored: %s", path, error)
        return None
    good = isinstance(content, dict) and content.get("schema") == SCHEMA and isinstance(content.get("decisions"), list)
    if not (good and isinstance(content.get("model"), str)):
        log.info("%s is ignored: expected a file of schema %s", path, SCHEMA)
        return None
    return dict(content)
