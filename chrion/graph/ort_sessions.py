"""onnxruntime sessions that analyse a model or run trials of it: opened on the CPU, without log output."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import onnxruntime as ort

from chrion.errors import ModelError

if TYPE_CHECKING:
    import onnx

_NODE = re.compile(r"Non-zero status code returned while running (\w+) node\. Name:'(.*?)' Status Message: ")
#: A file of onnxruntime's source and a line, and the function there: its name, or its signature with what it returns.
_PLACE = re.compile(
    r"(?<!\S)\S+\.(?:cc|cpp|h|hpp):\d+ (?:[\w:<>*&,~ ]+\(.*?\)(?: const)?(?: \[with [^]]*\])? |\w+ )?(?=\S)"
)


def analysis_options(level: ort.GraphOptimizationLevel) -> ort.SessionOptions:
    """Return session options with an optimisation level, and without log output or prepacked weights."""
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_prepacking", "1")
    return options


def open_session(proto: onnx.ModelProto, options: ort.SessionOptions, where: str) -> ort.InferenceSession:
    """Open a model on the CPU.

    Raises:
        ModelError: The model is larger than a protobuf message can be, or onnxruntime refuses it; the message begins
            with ``where``.
    """
    from chrion.graph.reading import serialise  # noqa: PLC0415 - plain sessions do not need onnx

    content = serialise(proto, where)
    try:
        return ort.InferenceSession(content, options, ["CPUExecutionProvider"], enable_fallback=0)
    except Exception as error:
        raise ModelError(f"{where}: onnxruntime refuses the model: {first_line(error)}") from error


def open_analysis(
    proto: onnx.ModelProto,
    folder: Path,
    where: str,
    level: ort.GraphOptimizationLevel = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
) -> ort.InferenceSession:
    """Open a model whose external weights are in a folder, for a few runs.

    Raises:
        ModelError: As :func:`open_session`.
    """
    options = analysis_options(level)
    for key, value in weights_folder_option(folder).items():
        options.add_session_config_entry(key, value)
    return open_session(proto, options, where)


def weights_folder_option(folder: Path) -> dict[str, str]:
    """Return the session option that names the folder of the external weights of a model given as bytes."""
    return {"session.model_external_initializers_file_folder_path": str(folder)}


def first_line(error: BaseException) -> str:
    """Return the useful part of an onnxruntime error: its first line without codes and places in the source."""
    text = str(error).strip().split("\n", 1)[0]
    if text.startswith("[ONNXRuntimeError]"):
        text = text.split(" : ", 3)[-1]
    return _PLACE.sub("", _NODE.sub(r"\1 node '\2': ", text))
