"""Model specifications: TOML files that name a builder and its parameters.

::

    builder = "lstm"
    [parameters]
    layers = 8

``chrion model NAME`` accepts the name of such a file in ``models/`` or of a builder; parameters on the command line
override those of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import onnx

from chrion.errors import ModelError, OptionError
from chrion.files import bundled_folder, read_toml
from chrion.zoo.bert import BertSpec, build_bert
from chrion.zoo.darts import DartsSpec, build_darts
from chrion.zoo.deepfm import DeepFmSpec, build_deepfm
from chrion.zoo.inception import GoogLeNetSpec, InceptionSpec, build_googlenet, build_inception
from chrion.zoo.nasnet import NasNetSpec, build_nasnet
from chrion.zoo.randwire import RandWireSpec, build_randwire
from chrion.zoo.recurrent import GATES, RecurrentSpec, build_recurrent
from chrion.zoo.seq2seq import Seq2SeqSpec, build_seq2seq
from chrion.zoo.squeezenet import SqueezeNetSpec, build_squeezenet
from chrion.zoo.t5 import T5Spec, build_t5

Parameter = int | float | bool


@dataclass(frozen=True, slots=True)
class Builder:
    """A builder of models of one family."""

    #: The class of its specifications.
    spec: type[Any]
    build: Callable[[Any], onnx.ModelProto]
    #: Fields of the specification with a fixed value.
    fixed: Mapping[str, str]

    @property
    def parameters(self) -> dict[str, str]:
        """The names of its parameters, with the names of their types."""
        return {f.name: str(f.type) for f in fields(self.spec) if f.name not in self.fixed}


BUILDERS = {
    **{cell.lower(): Builder(RecurrentSpec, build_recurrent, {"cell": cell}) for cell in GATES},
    "bert": Builder(BertSpec, build_bert, {}),
    "darts": Builder(DartsSpec, build_darts, {}),
    "deepfm": Builder(DeepFmSpec, build_deepfm, {}),
    "googlenet": Builder(GoogLeNetSpec, build_googlenet, {}),
    "inception-v3": Builder(InceptionSpec, build_inception, {}),
    "nasnet-a": Builder(NasNetSpec, build_nasnet, {}),
    "randwire": Builder(RandWireSpec, build_randwire, {}),
    "seq2seq": Builder(Seq2SeqSpec, build_seq2seq, {}),
    "squeezenet": Builder(SqueezeNetSpec, build_squeezenet, {}),
    "t5": Builder(T5Spec, build_t5, {}),
}


def names() -> list[str]:
    """Return the names of all builders, then of the specifications in ``models/``, both in alphabetical order."""
    return [*sorted(BUILDERS), *sorted(p.stem for p in bundled_folder("models").glob("*.toml"))]


def specification(name: str, parameters: Mapping[str, Parameter] | None = None) -> Any:
    """Return the specification of a model.

    Args:
        name: A builder (``lstm``, ``inception-v3``, ...), or the name or file of a specification.
        parameters: Parameters that override those of the specification.

    Returns:
        The builder's specification, a :class:`RecurrentSpec` or ``InceptionSpec`` for example.

    Raises:
        OptionError: The model or a parameter does not exist, or a parameter is out of range.
        ModelError: The specification's file is damaged.
    """
    return _find_builder(name, parameters or {})[1]


def build(name: str, parameters: Mapping[str, Parameter] | None = None) -> onnx.ModelProto:
    """Build a model by its name; see :func:`specification`."""
    builder, spec = _find_builder(name, parameters or {})
    return builder.build(spec)


def _find_builder(name: str, parameters: Mapping[str, Parameter]) -> tuple[Builder, Any]:
    family, own = (name, {}) if name in BUILDERS else _read(_find(name))
    builder = BUILDERS[family]
    given = {**own, **parameters}
    kinds = builder.parameters
    for key, value in given.items():
        if key not in kinds:
            raise OptionError(f"model {name}: unknown parameter {key!r}", hint=f"its parameters are {', '.join(kinds)}")
        if type(value).__name__ != kinds[key] and (type(value), kinds[key]) != (int, "float"):
            raise OptionError(f"model {name}: {key} = {value!r} is not of type {kinds[key]}")
    return builder, builder.spec(**builder.fixed, **given)


def _find(name: str) -> Path:
    path = Path(name) if name.endswith(".toml") else bundled_folder("models") / f"{name}.toml"
    if not path.is_file():
        raise OptionError(f"unknown model {name!r}", hint="chrion model --list shows all models")
    return path


def _read(path: Path) -> tuple[str, dict[str, Parameter]]:
    try:
        content = read_toml(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not a model specification: {error}") from error
    builder, parameters = content.get("builder"), content.get("parameters", {})
    if builder not in BUILDERS or not isinstance(parameters, dict):
        known = ", ".join(sorted(BUILDERS))
        raise ModelError(
            f"{path}: expected a builder and a [parameters] table, found builder {builder!r}",
            hint=f"builders are {known}",
        )
    return builder, parameters
