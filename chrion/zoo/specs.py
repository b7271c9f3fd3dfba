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

from chrion.common.files import bundled_folder, open_atomically, read_toml, write_atomically
from chrion.common.suggestions import did_you_mean
from chrion.common.wrong_values import wrong_value
from chrion.errors import ModelError, OptionError
from chrion.graph.reading import serialise
from chrion.zoo.bert import BertSpec, build_bert
from chrion.zoo.cached_decoder import GptDecoderSpec, LlamaDecoderSpec, build_gpt_decoder, build_llama_decoder
from chrion.zoo.darts import DartsSpec, build_darts
from chrion.zoo.deepfm import DeepFmSpec, build_deepfm
from chrion.zoo.dlrm import DlrmSpec, build_dlrm
from chrion.zoo.inception import GoogLeNetSpec, InceptionSpec, build_googlenet, build_inception
from chrion.zoo.llama import LlamaSpec, build_llama
from chrion.zoo.moe import MoeSpec, build_moe
from chrion.zoo.nasnet import NasNetSpec, build_nasnet
from chrion.zoo.randwire import RandWireSpec, build_randwire
from chrion.zoo.recurrent import GATES, RecurrentSpec, build_recurrent
from chrion.zoo.resnet import ResNetSpec, build_resnet
from chrion.zoo.seq2seq import Seq2SeqSpec, build_seq2seq
from chrion.zoo.squeezenet import SqueezeNetSpec, build_squeezenet
from chrion.zoo.t5 import T5Spec, build_t5
from chrion.zoo.weights_file import WeightsFile

Parameter = int | float | bool


@dataclass(frozen=True, slots=True)
class Builder:
    """A builder of models of one family."""

    #: The class of its specifications.
    spec: type[Any]
    build: Callable[[Any], onnx.ModelProto]
    #: Fields of the specification with a fixed value.
    fixed: Mapping[str, str]
    #: Builds the model with its large weights in a file; None for families whose models fit into one file.
    build_to: Callable[[Any, WeightsFile], onnx.ModelProto] | None = None

    @property
    def parameters(self) -> dict[str, str]:
        """The names of its parameters, with the names of their types."""
        return {f.name: str(f.type) for f in fields(self.spec) if f.name not in self.fixed}


@dataclass(frozen=True, slots=True)
class Written:
    """A model that was written to files."""

    #: Nodes of its graph.
    nodes: int
    #: Bytes of all files.
    bytes: int


#: The form of a decoder's attention, by the end of the builder's name.
_ATTENTION = {"": "plain", "-onnx": "onnx", "-grouped": "grouped"}
BUILDERS = {
    **{cell.lower(): Builder(RecurrentSpec, build_recurrent, {"cell": cell}) for cell in GATES},
    **{
        f"gpt2-decoder{end}": Builder(GptDecoderSpec, build_gpt_decoder, {"attention": form}, build_gpt_decoder)
        for end, form in _ATTENTION.items()
    },
    **{
        f"llama-decoder{end}": Builder(LlamaDecoderSpec, build_llama_decoder, {"attention": form}, build_llama_decoder)
        for end, form in _ATTENTION.items()
    },
    "bert": Builder(BertSpec, build_bert, {}),
    "darts": Builder(DartsSpec, build_darts, {}),
    "deepfm": Builder(DeepFmSpec, build_deepfm, {}),
    "dlrm": Builder(DlrmSpec, build_dlrm, {}, build_dlrm),
    "googlenet": Builder(GoogLeNetSpec, build_googlenet, {}),
    "inception-v3": Builder(InceptionSpec, build_inception, {}),
    "llama": Builder(LlamaSpec, build_llama, {}, build_llama),
    "moe": Builder(MoeSpec, build_moe, {}, build_moe),
    "nasnet-a": Builder(NasNetSpec, build_nasnet, {}),
    "randwire": Builder(RandWireSpec, build_randwire, {}),
    "resnet-50": Builder(ResNetSpec, build_resnet, {}),
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


def write(name: str, path: Path, parameters: Mapping[str, Parameter] | None = None) -> Written:
    """Build a model by its name and write it to a file; see :func:`specification`.

    Large weights of the families that may exceed 2 GB are written to a file of the same name with the suffix ``.data``
    while they are generated, so they are never in memory together.

    Raises:
        OptionError: The specification is invalid, a file cannot be written, or the model exceeds 2 GB without its large
            weights.
    """
    builder, spec = _find_builder(name, parameters or {})
    if builder.build_to is None:
        return _write_model(name, path, builder.build(spec), 0)
    data = weights_path(path)
    with open_atomically(data) as file:
        store = WeightsFile(file, data.name)
        model = builder.build_to(spec, store)
    if not store.size:
        data.unlink()
    return _write_model(name, path, model, store.size)


def weights_path(path: Path) -> Path:
    """Return the file of the large weights of a model."""
    return path.with_name(f"{path.name}.data")


def streams_weights(name: str) -> bool:
    """Return whether :func:`write` may create a file of weights for a model."""
    return _find_builder(name, {})[0].build_to is not None


def _write_model(name: str, path: Path, model: onnx.ModelProto, stored: int) -> Written:
    try:
        content = serialise(model, str(path))
    except ModelError as error:
        raise OptionError(
            f"model {name}: larger than 2 GB, the maximum size of an .onnx file", hint="choose smaller sizes"
        ) from error
    write_atomically(path, content)
    return Written(len(model.graph.node), len(content) + stored)


def _find_builder(name: str, parameters: Mapping[str, Parameter]) -> tuple[Builder, Any]:
    family, own = (name, {}) if name in BUILDERS else _read(_find(name))
    builder = BUILDERS[family]
    given = {**own, **parameters}
    kinds = builder.parameters
    for key, value in given.items():
        if key not in kinds:
            hint = did_you_mean(key, kinds, f"its parameters are {', '.join(kinds)}")
            raise OptionError(f"{key}: model {name} has no such parameter", hint=hint)
        if type(value).__name__ != kinds[key] and (type(value), kinds[key]) != (int, "float"):
            raise wrong_value(f"model {name}: {key}", f"a value of type {kinds[key]}", value)
    return builder, builder.spec(**builder.fixed, **given)


def _find(name: str) -> Path:
    path = Path(name) if name.endswith(".toml") else bundled_folder("models") / f"{name}.toml"
    if not path.is_file():
        known = [*BUILDERS, *(file.stem for file in bundled_folder("models").glob("*.toml"))]
        hint = did_you_mean(name, known, "chrion model --list shows all models")
        raise OptionError(f"unknown model {name!r}", hint=hint)
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
