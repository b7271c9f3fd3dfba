"""The generators of a server: their memory, and models that cannot generate."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from chrion.errors import ModelError
from chrion.native import operators_available
from chrion.serving.server.generators import close_generators, open_generators
from chrion.serving.server.settings import read_settings
from decoder_support import small_decoder
from local_server import local_server
from model_repository import product, put
from served_decoders import MODEL, put_decoder


def test_generators_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    """The generators' weights, keys and values count as memory of models, those of the first by name at first."""
    for name in ("llama", "other"):
        put_decoder(tmp_path, name, '[generation]\nkv_memory = "64MB"\n')
    opened, failed = open_generators(tmp_path, 50_000_000)
    assert (opened, [*failed]) == ({}, ["llama", "other"])
    assert re.search(r"the generator needs at least \d+ MB of 50 MB that are left for models", failed["llama"])
    opened, failed = open_generators(tmp_path, 100_000_000)
    close_generators([*opened.values()])
    assert ([*opened], [*failed]) == (["llama"], ["other"])
    assert opened["llama"].generator.signature.slot_bytes * opened["llama"].generator.statistics().slots <= 64e6


def put_external_decoder(root: Path, model: onnx.ModelProto = MODEL) -> int:
    """Put a decoder whose weights are in a folder beside it into a repository; return the bytes of its files."""
    file = put_decoder(root, "llama", '[generation]\nkv_memory = "64MB"\n', model=model)
    (file.parent / "data").mkdir()
    onnx.save_model(onnx.load(file), file, save_as_external_data=True, location="data/w.bin", size_threshold=256)
    return file.stat().st_size + (file.parent / "data" / "w.bin").stat().st_size


def test_generators_count_like_other_models(tmp_path: Path, *, native: bool) -> None:
    """Files times 1.1 and 4 MB, twice if the model and its parts remain, and the keys and values."""
    copies = 1 if native else 2
    size = put_external_decoder(tmp_path)
    opened, _ = open_generators(tmp_path, 100_000_000)
    close_generators([*opened.values()])
    assert opened["llama"].reserved_bytes == copies * (round(1.1 * size) + 4_000_000) + 64_000_000


@pytest.mark.usefixtures("several_operators")
def test_a_generator_that_turns_out_too_large_is_closed(tmp_path: Path) -> None:
    """That the model and its parts remain is known once they are open."""
    assert put_external_decoder(tmp_path) < 2_000_000
    before = {*threading.enumerate()}
    opened, failed = open_generators(tmp_path, 71_000_000)
    assert not opened
    assert re.search(r"the generator needs at least 7\d MB of 71 MB that are left for models", failed["llama"])
    assert {*threading.enumerate()} <= before


@pytest.mark.skipif(not operators_available(), reason="native attention is not compiled")
def test_other_models_have_the_memory_that_a_generator_leaves(tmp_path: Path) -> None:
    """A decoder with 10 MB of weights holds them once, which leaves room for a model of 6 MB in 92 MB."""
    put_external_decoder(tmp_path, small_decoder("llama-decoder", vocabulary=20_000, hidden=64))
    put(tmp_path, "product", product(side=1200))
    with local_server(tmp_path, memory_mb=92.0) as server:
        status, answer, _ = server.infer("product", np.ones((1, 1200), np.float32))
        assert status == 200, answer


def test_models_that_cannot_generate_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model without a cache is logged with the reason; the others are served."""
    put(tmp_path, "product", product(), toml="[generation]\n")
    put_decoder(tmp_path, "llama")
    opened, _ = open_generators(tmp_path, 1_000_000_000)
    close_generators([*opened.values()])
    assert [*opened] == ["llama"]
    (record,) = caplog.records
    assert "not a decoder with a cache" in record.__dict__["fields"]["reason"]


def test_a_model_without_its_generator_answers_tensors(tmp_path: Path) -> None:
    """It is ready, and the index says why it does not generate."""
    put(tmp_path, "product", product(), toml="[generation]\n")
    with local_server(tmp_path) as server:
        assert server.infer("product", np.ones((1, 4), np.float32))[0] == 200
        (entry,) = server.get("/v2/repository/index", b"")[1]
        assert (entry["name"], entry["state"]) == ("product", "READY")
        assert "does not generate text: " in entry["reason"]
        assert "not a decoder with a cache" in entry["reason"]


def test_a_model_that_onnxruntime_refuses_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An error of onnxruntime's own is a reason like others; the model after it is served."""
    refused = onnx.ModelProto.FromString(MODEL.SerializeToString())
    refused.graph.node.append(helper.make_node("NoSuchOperator", ["logits"], ["unused"]))
    put_decoder(tmp_path, "first", model=refused)
    put_decoder(tmp_path, "second")
    opened, _ = open_generators(tmp_path, 1_000_000_000)
    close_generators([*opened.values()])
    assert [*opened] == ["second"]
    (record,) = caplog.records
    fields = record.__dict__["fields"]
    assert fields["model"] == "first"
    assert "onnxruntime refuses the model: " in fields["reason"]
    assert "NoSuchOperator" in fields["reason"]


def test_models_whose_chat_template_cannot_be_read_complete_texts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The template is reported, and completions are served."""
    file = put_decoder(tmp_path, "llama")
    (file.parent / "chat_template.jinja").write_text("{% for %}")
    opened, _ = open_generators(tmp_path, 1_000_000_000)
    close_generators([*opened.values()])
    assert opened["llama"].template is None
    assert "chat template" in caplog.records[0].__dict__["fields"]["reason"]


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    """The message names the key."""
    for toml, reason in (
        ("[generation]\nmax_batch = 0\n", "max_batch"),
        ('[generation]\nkv_memory = "much"\n', "generation.kv_memory"),
        ("[generation]\nbatch = 4\n", "batch"),
    ):
        (tmp_path / "model.toml").write_text(toml)
        with pytest.raises(ModelError, match=reason):
            read_settings(tmp_path / "model.toml")
