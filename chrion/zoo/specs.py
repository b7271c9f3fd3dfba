"""Model specifications: a TOML file names a builder and its parameters.

::

    builder = "lstm"
    [parameters]
    layers = 8

``chrion model NAME`` takes the name of such a file in ``models/`` or of a builder; parameters given beside the name
replace those of the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import onnx

from chrion.errors import ModelError, OptionError
from chrion.files import shipped
from chrion.zoo.recurrent import GATES, RecurrentSpec, build_recurrent

#: Builders by name, and the parameters each fixes.
BUILDERS = {cell.lower(): cell for cell in GATES}
PARAMETERS = {f.name: f.type for f in fields(RecurrentSpec) if f.name != "cell"}


def names() -> list[str]:
    """Builders, then the specifications in ``models/``, each in alphabetical order."""
    return [*sorted(BUILDERS), *sorted(p.stem for p in shipped("models").glob("*.toml"))]


def specification(name: str, parameters: Mapping[str, int | bool] | None = None) -> RecurrentSpec:
    """Look a model up.

    Args:
        name: A builder (``lstm``, ``gru``, ``rnn``), or a specification's name or file.
        parameters: What replaces the specification's own.

    Raises:
        OptionError: No such model or parameter, or a parameter out of range.
        ModelError: The specification's file is damaged.
    """
    builder, own = (name, {}) if name in BUILDERS else _read(_find(name))
    given = {**own, **(parameters or {})}
    unknown = set(given) - set(PARAMETERS)
    if unknown:
        raise OptionError(f"model {name}: no parameter {min(unknown)!r}", hint=f"it takes {', '.join(PARAMETERS)}")
    for key, value in given.items():
        if type(value).__name__ != PARAMETERS[key]:
            raise OptionError(f"model {name}: {key} = {value!r} is not of type {PARAMETERS[key]}")
    return RecurrentSpec(cell=BUILDERS[builder], **given)  # type: ignore[arg-type] # checked just above


def build(name: str, parameters: Mapping[str, int | bool] | None = None) -> onnx.ModelProto:
    """Build the model of that name; see :func:`specification`."""
    return build_recurrent(specification(name, parameters))


def _find(name: str) -> Path:
    path = Path(name) if name.endswith(".toml") else shipped("models") / f"{name}.toml"
    if not path.is_file():
        raise OptionError(f"model: there is none named {name!r}", hint="chrion model --list shows them")
    return path


def _read(path: Path) -> tuple[str, dict[str, int | bool]]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ModelError(f"{path}: not a model specification: {error}") from error
    builder, parameters = content.get("builder"), content.get("parameters", {})
    if builder not in BUILDERS or not isinstance(parameters, dict):
        known = ", ".join(sorted(BUILDERS))
        raise ModelError(f"{path}: builder {builder!r} with [parameters] expected", hint=f"builders are {known}")
    return builder, parameters
