"""Models whose files are links, as in the cache of Hugging Face: they are read, and their own files are found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tokenizers

import chrion
from chrion import Generator, HybridSession
from chrion.errors import UnsafeModelError
from chrion.scheduler import fixed_plan
from chrion.serving.server.chat_template import find_chat_template
from chrion.zoo import build
from decoder_support import PlainDecoder, small_decoder
from helpers import alternating_lanes, run_plain
from seams.execution import limit
from sliding_window import trim_caches


def store(model: onnx.ModelProto, folder: Path, data: str) -> Path:
    """Save a model in a folder, with its weights in a file of their own."""
    folder.mkdir(parents=True)
    path = folder / "saved.onnx"
    model = onnx.ModelProto.FromString(model.SerializeToString())  # saving takes the weights out of it
    onnx.save_model(model, path, save_as_external_data=True, location=data, size_threshold=256)
    return path


def link_like_hugging_face(model: onnx.ModelProto, root: Path, **configuration: int) -> Path:
    """Save a model as a cache does: files named by their content, and links with the names of a snapshot."""
    path = store(model, root / "blobs", "model.onnx_data")
    (root / "blobs" / "c0").write_text(json.dumps(configuration))
    snapshot = root / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for old, blob, name in (
        (path, "a0", "model.onnx"),
        (path.with_name("model.onnx_data"), "b0", "model.onnx_data"),
        (root / "blobs" / "c0", "c0", "config.json"),
    ):
        old.rename(root / "blobs" / blob)
        (snapshot / name).symlink_to(Path("..", "..", "blobs", blob))
    return snapshot / "model.onnx"


@pytest.mark.parametrize("hidden", [True, False], ids=["weights hidden", "weights read"])
def test_a_decoder_in_a_cache_of_links(*, hidden: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and configuration are those that the links of the snapshot name."""
    if hidden:
        limit(monkeypatch, "bytes of a weight that is read", 256)
    model = small_decoder("llama-decoder")
    path = link_like_hugging_face(model, tmp_path, eos_token_id=5, max_position_embeddings=40)
    expected = PlainDecoder(model).generate([1, 2, 3], 9)
    with Generator(path, threads=1) as generator:
        assert (generator.context, generator.stop_tokens) == (40, {5})
        assert generator.submit([1, 2, 3], 9, stop_tokens=()).result(60) == expected


def test_a_plan_of_a_model_in_a_cache_of_links(tmp_path: Path) -> None:
    """The segments of a plan read the weights, too; the name of the graph is that of the link."""
    model = build("lstm", {"layers": 2, "seq": 4})
    path = link_like_hugging_face(model, tmp_path)
    graph = chrion.load(path)
    assert (graph.name, graph.source.path) == ("model", str(path))
    feed = {"X": np.ones((4, 8, 64), np.float32)}
    with HybridSession(path, plan=fixed_plan(graph, alternating_lanes(graph))) as session:
        found = session.run(None, feed)
    for value, wanted in zip(found, run_plain(model, feed), strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-5)


@pytest.mark.parametrize("change", [lambda model: model, lambda model: trim_caches(model, 30)], ids=["split", "whole"])
def test_a_link_without_the_weights_beside_it(change: Callable[[Any], Any], tmp_path: Path) -> None:
    """Weights that are only beside the file that a link leads to are read there; the name is that of the link."""
    model = change(small_decoder("gpt2-decoder"))
    link = link_to(store(model, tmp_path / "models", "weights.bin"), tmp_path / "current.onnx")
    graph = chrion.load(link)
    assert graph.name == "current"
    with Generator(graph, threads=1) as generator:
        assert generator.submit([1, 2], 5).result(60) == PlainDecoder(model).generate([1, 2], 5)


@pytest.mark.parametrize("change", [lambda model: model, lambda model: trim_caches(model, 30)], ids=["split", "whole"])
def test_a_link_with_the_weights_beside_it(change: Callable[[Any], Any], tmp_path: Path) -> None:
    """Weights that are only beside the link are read there, as by onnxruntime."""
    model = change(small_decoder("gpt2-decoder"))
    path = store(model, tmp_path / "shared", "weights.bin")
    link = link_to(path, tmp_path / "mine" / "model.onnx")
    path.with_name("weights.bin").rename(link.with_name("weights.bin"))
    with Generator(link, threads=1) as generator:
        assert generator.submit([1, 2], 5).result(60) == PlainDecoder(link).generate([1, 2], 5)


def link_to(path: Path, link: Path) -> Path:
    """Create a link to a file; return it."""
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(path)
    return link


def put_text_files(folder: Path, *, words: str, end: int) -> None:
    """Put the files of a model that concern texts into a folder: token n is the word of that number."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"{words}{at}": at for at in range(61)}, f"{words}0"))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 30 + end}))
    (folder / "chat_template.jinja").write_text(f"{words}{{{{ messages[0].content }}}}")


@pytest.mark.parametrize(
    ("beside", "weights"),
    [
        ({"link"}, "weights.bin"),
        ({"target"}, "weights.bin"),
        ({"target"}, "model.onnx"),
        ({"link", "target"}, "model.onnx"),
    ],
)
def test_files_that_belong_to_a_link(beside: set[str], weights: str, tmp_path: Path) -> None:
    """The configuration, the tokenizer and the template are beside the link, or else beside the file it leads to."""
    model = small_decoder("llama-decoder")
    path = tmp_path / "models" / "saved.onnx"
    if weights == "weights.bin":
        store(model, path.parent, weights)
    else:
        path.parent.mkdir()
        onnx.save(model, path)
    link = link_to(path, tmp_path / "mine" / "model.onnx")
    for kind, end in (("link", 5), ("target", 6)):
        if kind in beside:
            put_text_files((link if kind == "link" else path).parent, words=kind, end=end)
    kind, end = ("link", 5) if "link" in beside else ("target", 6)
    with Generator(link, threads=1) as generator:
        assert (generator.stop_tokens, generator.context) == ({end}, 30 + end)
        assert generator.encode(f"{kind}7") == [7]
    template = find_chat_template(link)
    assert template is not None
    assert template.render([{"role": "user", "content": "8"}]) == f"{kind}8"


def test_links_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    """A link to the model does not let its weights be in any other folder."""
    path = link_like_hugging_face(small_decoder("gpt2-decoder"), tmp_path / "cache")
    other = tmp_path / "other"
    other.mkdir()
    data = tmp_path / "cache" / "blobs" / "b0"
    data.rename(other / "b0")
    link = path.with_name("model.onnx_data")
    link.unlink()
    link.symlink_to(os.path.relpath(other / "b0", link.parent))
    with pytest.raises(UnsafeModelError, match="outside the model's folder"):
        chrion.load(path)
