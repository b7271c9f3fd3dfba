"""The context length of a decoder, from its tables and from the configuration beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from chrion.errors import ModelError
from chrion.generation.rewrites.context_length import find_context, table_rows
from chrion.generation.rewrites.model_folder import find_beside
from chrion.generation.special_tokens import find_stop_tokens


def table(name: str, rows: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.zeros((rows, 4), np.float32), name)


def graph(nodes: list[onnx.NodeProto], *tables: onnx.TensorProto) -> onnx.GraphProto:
    """Return a graph of nodes that read tables, the tokens and their positions."""
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, [1, None]) for name in ("input_ids", "positions")]
    return helper.make_graph(nodes, "g", inputs, [], list(tables))


def gather(name: str, index: str, axis: int = 0) -> onnx.NodeProto:
    return helper.make_node("Gather", [name, index], [f"row-of-{name}"], axis=axis)


def test_tables_that_are_read_by_position() -> None:
    """The smallest one counts; those of tokens, and those of which columns are read, do not."""
    words, few, many = table("words", 3), table("few", 64), table("many", 128)
    read = [gather("words", "input_ids"), gather("many", "positions"), gather("few", "positions")]
    assert table_rows(graph(read, words, few, many), "positions") == 64
    assert table_rows(graph(read[:2], words, few, many), "positions") == 128
    assert table_rows(graph([*read[:1], gather("few", "positions", axis=1)], words, few), "positions") == 0


def test_positions_of_another_shape() -> None:
    """Exporters reshape positions, or count them from the length of the cache."""
    chain = [
        helper.make_node("Reshape", ["positions", "shape"], ["flat"]),
        helper.make_node("Cast", ["flat"], ["index"], to=TensorProto.INT32),
    ]
    assert table_rows(graph([*chain, gather("t", "index")], table("t", 64)), "positions") == 64
    counted = [
        helper.make_node("Range", ["past", "total", "one"], ["range"]),
        helper.make_node("Unsqueeze", ["range", "axis"], ["index"]),
    ]
    assert table_rows(graph([*counted, gather("t", "index")], table("t", 64)), "positions") == 64


def test_other_operators_that_read_rows() -> None:
    """Rows of a quantised table, and rows that are selected by lists of one index."""
    quantised = helper.make_node("GatherBlockQuantized", ["t", "positions", "scales"], ["o"], gather_axis=0)
    assert table_rows(graph([quantised], table("t", 64)), "positions") == 64
    listed = [
        helper.make_node("Unsqueeze", ["positions", "axis"], ["index"]),
        helper.make_node("GatherND", ["t", "index"], ["o"]),
    ]
    assert table_rows(graph(listed, table("t", 64)), "positions") == 64


def test_distances_between_tokens_are_no_positions() -> None:
    """A table of relative positions, as T5 has it, has a row for each range of distances."""
    nodes = [
        helper.make_node("Range", ["zero", "total", "one"], ["columns"]),
        helper.make_node("Sub", ["columns", "row"], ["distance"]),
        gather("t", "distance"),
    ]
    assert table_rows(graph(nodes, table("t", 32)), "positions") == 0


def test_tables_of_rotary_embeddings() -> None:
    """Operators that rotate have cosines and sines for each position."""
    grouped = helper.make_node("GroupQueryAttention", ["q", "k", "v", "pk", "pv", "s", "n", "t", "u"], ["o"])
    assert table_rows(graph([grouped], table("t", 64), table("u", 64)), "positions") == 64
    assert table_rows(graph([helper.make_node("GroupQueryAttention", ["q", "", ""], ["o"])]), "positions") == 0
    for inputs in (["x", "positions", "t", "u"], ["x", "t", "u", "positions"]):  # of onnxruntime, and of ONNX
        rotary = helper.make_node("RotaryEmbedding", inputs, ["o"])
        assert table_rows(graph([rotary], table("t", 32), table("u", 32)), "positions") == 32
    rotary = helper.make_node("RotaryEmbedding", ["x", "t", "u"], ["o"])  # without positions: a table of each text
    tables = [helper.make_tensor(name, TensorProto.FLOAT, [1, 16, 2], [0.0] * 32) for name in ("t", "u")]
    assert table_rows(graph([rotary], *tables), "positions") == 16


def test_branches() -> None:
    """A table outside the branch that reads it counts, and equal names in two branches are different values."""

    def branch(kind: str) -> onnx.GraphProto:
        nodes = [helper.make_node(kind, ["a", "b", "c"], ["index"]), gather("t", "index")]
        return helper.make_graph(nodes, kind, [], [])

    for kinds, rows in ((("Range", "Where"), 64), (("Where", "Range"), 64), (("Where", "Where"), 0)):
        bodies = dict(zip(("then_branch", "else_branch"), map(branch, kinds), strict=True))
        chosen = helper.make_node("If", ["flag"], ["o"], **bodies)
        assert table_rows(graph([chosen], table("t", 64)), "positions") == rows


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"max_position_embeddings": 2048, "n_positions": 7}, 2048),
        ({"n_positions": 1024}, 1024),
        ({"max_seq_len": 512, "n_ctx": 8}, 512),
        ({"n_ctx": 256}, 256),
        ({"text_config": {"max_position_embeddings": 8}, "n_positions": 4}, 8),
        ({"max_position_embeddings": None, "n_positions": -1, "text_config": None}, 0),
        ({"max_position_embeddings": True}, 0),
        ({"max_position_embeddings": "2048"}, 0),
        ([], 0),
    ],
)
def test_the_configuration_beside_a_model(content: Any, expected: int, tmp_path: Path) -> None:
    """Keys of transformers; what is no positive number is not a length."""
    assert find_context(tmp_path / "model.onnx") == 0
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert find_context(tmp_path / "model.onnx") == expected


def scaled(
    kind: str, factor: Any, original: int | None = None, *, key: str = "rope_scaling", name: str = "type"
) -> Any:
    """Return a configuration with a length of 100 and a scaling of rotary positions."""
    scaling = {name: kind, "factor": factor}
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return {"max_position_embeddings": 100, key: scaling}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (scaled("linear", 4.0), 400),
        (scaled("dynamic", 2, name="rope_type", key="rope_parameters"), 200),
        (scaled("yarn", 4.0, 64), 256),
        (scaled("yarn", 1.5), 150),
        (scaled("llama3", 8.0, 64), 100),
        (scaled("longrope", 8.0, 64), 100),
        (scaled("su", 8.0), 100),
        (scaled("linear", None), 100),
        (scaled("linear", float("nan")), 100),
        (scaled("linear", "4"), 100),
        ({"max_position_embeddings": 100, "rope_scaling": None}, 100),
        ({"max_position_embeddings": 100, "rope_parameters": {"full_attention": {"rope_type": "linear"}}}, 100),
        ({**scaled("linear", 8.0), "model_type": "gemma3_text"}, 100),
        ({"text_config": scaled("linear", 3.0), "rope_scaling": {"type": "linear", "factor": 7.0}}, 300),
    ],
)
def test_scaled_rotary_positions(content: Any, expected: int, tmp_path: Path) -> None:
    """Some types of scaling extend the stated length, the others are part of it."""
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert find_context(tmp_path / "model.onnx") == expected


def test_the_folder_above_that_of_the_models(tmp_path: Path) -> None:
    """Repositories of transformers.js have the models in a folder named onnx; its own files come first."""
    (tmp_path / "config.json").write_text(json.dumps({"n_positions": 64}))
    for folder in ("onnx", "other"):
        (tmp_path / folder).mkdir()
    model = tmp_path / "onnx" / "model.onnx"
    assert find_context(model) == 64
    assert find_context(tmp_path / "other" / "model.onnx") == 0
    assert find_beside(model, "config.json") == tmp_path / "config.json"
    assert find_beside(model, "tokenizer.json") is None
    (tmp_path / "onnx" / "config.json").write_text(json.dumps({"n_positions": 32}))
    assert find_context(model) == 32


def test_the_configuration_of_onnxruntime_genai(tmp_path: Path) -> None:
    """Its part about the model has the length and the end tokens; files of transformers come first."""
    model = tmp_path / "model.onnx"
    genai = {"model": {"context_length": 128, "eos_token_id": [5, 6], "type": "llama"}, "search": {"max_length": 64}}
    (tmp_path / "genai_config.json").write_text(json.dumps(genai))
    assert (find_context(model), find_stop_tokens(model)) == (128, {5, 6})
    nested = {"text_config": {"max_position_embeddings": 98, "eos_token_id": 8}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert (find_context(model), find_stop_tokens(model)) == (98, {8})
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 99, "eos_token_id": 7}))
    assert (find_context(model), find_stop_tokens(model)) == (99, {7})
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(ModelError, match="eos_token_id: expected a token or a list of tokens, found '</s>'"):
        find_stop_tokens(model)


def test_a_damaged_configuration_is_refused(tmp_path: Path) -> None:
    """The message names the file."""
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: not JSON"):
        find_context(tmp_path / "model.onnx")
