"""The zoo's models that may exceed an accelerator's memory: results against NumPy, and weights in a file."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest

import chrion
from chrion.errors import ModelError
from chrion.graph.usage import USAGE_KEY, read_usage, usage_of
from chrion.zoo import build, specification, write
from chrion.zoo.dlrm import CATEGORIES, build_dlrm
from chrion.zoo.moe import first_choices, selection_shares
from chrion.zoo.weights_file import LARGE_BYTES, WeightsFile
from decoder_support import PlainDecoder
from helpers import run_plain

Array = npt.NDArray[Any]
LLAMA = {"batch": 2, "layers": 1, "hidden": 16, "heads": 4, "kv_heads": 2, "inner": 24, "seq": 6, "vocabulary": 20}
MOE = {"batch": 2, "seq": 3, "hidden": 16, "heads": 4, "kv_heads": 2, "inner": 24, "experts": 5}


def weights_of(model: onnx.ModelProto) -> dict[str, Array]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def softmax(x: Array) -> Array:
    raised = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(raised / raised.sum(-1, keepdims=True))


def normal(x: Array) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5))


def attention(x: Array, w: dict[str, Array], scope: str, heads: int, kv_heads: int) -> Array:
    """Return self-attention of [batch, steps, hidden] with every key and value repeated for its group of queries."""
    batch, steps, hidden = x.shape
    width = hidden // heads

    def project(stem: str, count: int) -> Array:
        return (normal(x) @ w[f"{scope}/{stem}/W"]).reshape(batch, steps, count, width).transpose(0, 2, 1, 3)

    def rotated(v: Array) -> Array:
        """Rotate pairs as complex numbers, as the paper on rotary embeddings defines it."""
        turn = np.exp(1j * np.outer(np.arange(steps), 10_000.0 ** (-np.arange(0, width, 2) / width)))
        z = (v[..., : width // 2] + 1j * v[..., width // 2 :]) * turn
        return np.concatenate([z.real, z.imag], -1)

    q, k, v = rotated(project("query", heads)), rotated(project("key", kv_heads)), project("value", kv_heads)
    k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (k, v))
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(width) + np.triu(np.full((steps, steps), -1e9), 1)
    context = (softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(batch, steps, hidden)
    return np.asarray(x + context @ w[f"{scope}/output/W"])


def swiglu(x: Array, w: dict[str, Array], scope: str) -> Array:
    gate = x @ w[f"{scope}/gate/W"]
    return np.asarray((gate / (1 + np.exp(-gate)) * (x @ w[f"{scope}/up/W"])) @ w[f"{scope}/down/W"])


def test_llama_computes_what_the_papers_define() -> None:
    """The logits are those of rotary, grouped-query attention and SwiGLU in NumPy."""
    model = build("llama", LLAMA)
    w = weights_of(model)
    ids = np.random.default_rng(1).integers(0, 20, (2, 6))
    x = attention(w["words"][ids].astype(float), w, "block0/attention", 4, 2)
    x = x + swiglu(normal(x), w, "block0/feed_forward")
    np.testing.assert_allclose(run_plain(model, {"ids": ids})[0], normal(x) @ w["head/W"], rtol=1e-3, atol=1e-4)


def test_llama_does_not_look_ahead() -> None:
    """A word changes no earlier logits."""
    model = build("llama", LLAMA)
    ids = np.random.default_rng(1).integers(0, 20, (2, 6))
    other = ids.copy()
    other[:, 4] = (other[:, 4] + 1) % 20
    first, second = (run_plain(model, {"ids": given})[0] for given in (ids, other))
    np.testing.assert_allclose(first[:, :4], second[:, :4], rtol=1e-5)
    assert not np.allclose(first[:, 4:], second[:, 4:])


def test_an_expert_computes_the_steps_that_select_it() -> None:
    """The result is the sum of the best two experts of each step, weighted by the softmax of their scores."""
    model = build("moe", MOE)
    w = weights_of(model)
    x = np.random.default_rng(1).standard_normal((2, 3, 16)).astype(np.float32)
    hidden = attention(x.astype(float), w, "block0/attention", 4, 2)
    rows = normal(hidden)
    logits = rows @ w["block0/router/W"] + w["block0/router/b"]
    mixed = np.zeros_like(rows)
    for at in np.ndindex(2, 3):
        best = np.argsort(-logits[at])[:2]
        for share, expert in zip(softmax(logits[at][best]), best, strict=True):
            mixed[at] += share * swiglu(rows[at], w, f"block0/expert{expert}")
    np.testing.assert_allclose(run_plain(model, {"X": x})[0], normal(hidden + mixed), rtol=1e-3, atol=1e-4)


def test_every_expert_is_one_operator_with_its_weights() -> None:
    """So an expert can be placed by itself; its three matrices are read by no other operator."""
    graph = chrion.load(build("moe", {**MOE, "seq": 1, "batch": 1}))
    sizes = [sum(graph.dag.weight_bytes[w] for w in weights) for weights in graph.dag.weights]
    experts = [i for i, size in enumerate(sizes) if graph.dag.usage[i] < 1]
    assert len(experts) == 5
    assert all(sizes[i] >= 3 * 16 * 24 * 4 for i in experts)
    assert all("expert" in graph.dag.names[i] for i in experts)
    assert graph.dag.usage == usage_of(
        [[name] for name in graph.dag.names], read_usage(graph.metadata.custom_metadata_map)
    )


@pytest.mark.parametrize("skew", [1.0, 4.0, 50.0])
def test_stated_shares_are_those_of_the_router(skew: float) -> None:
    """Two experts are selected in every step, and each about as often as the metadata states."""
    experts, steps = 8, 4000
    first = first_choices(experts, skew)
    shares = selection_shares(first)
    assert first[0] / first[-1] == pytest.approx(skew)
    assert shares.sum() == pytest.approx(2)
    drawn = np.log(first) + np.random.default_rng(0).gumbel(size=(steps, experts))
    found = np.bincount(np.argsort(-drawn, axis=1)[:, :2].ravel(), minlength=experts) / steps
    np.testing.assert_allclose(found, shares, atol=0.03)
    for seq in (1, 5):  # an expert is used if any of the steps selects it
        model = build("moe", {**MOE, "experts": experts, "skew": skew, "hidden": 64, "batch": 1, "seq": seq})
        stated = json.loads(next(p.value for p in model.metadata_props if p.key == USAGE_KEY))
        assert list(stated.values()) == pytest.approx(list(1 - (1 - shares) ** seq), abs=1e-6)


@pytest.mark.parametrize("text", ["{", "[]", '{"*": 0}', '{"*": 1.5}', '{"*": "1"}', '{"*": true}', "[" * 100_000])
def test_damaged_usage_is_one_error(text: str) -> None:
    """A model whose metadata is damaged is refused with the reason."""
    model = build("moe", MOE)
    next(p for p in model.metadata_props if p.key == USAGE_KEY).value = text
    with pytest.raises(ModelError, match=USAGE_KEY):
        chrion.load(model)


def test_dlrm_computes_what_the_paper_defines() -> None:
    """Pooled embeddings and the bottom network interact by the inner products of all pairs, each once."""
    model = build("dlrm", {"batch": 2, "rows": 20, "lookups": 3, "embedding": 4, "hidden": 16})
    w = weights_of(model)
    pick = np.random.default_rng(1)
    numbers = pick.standard_normal((2, 13)).astype(np.float32)
    categories = pick.integers(0, 1000, (2, 26, 3))

    def dense(x: Array, stem: str) -> Array:
        return np.maximum(x @ w[f"{stem}/W"] + w[f"{stem}/b"], 0)

    tables = [w["table"], *(w[f"table.{at}"] for at in range(2, 27))]
    assert [len(table) for table in tables] == [min(count, 20) for count in CATEGORIES]
    expected = []
    for dense_in, sparse in zip(numbers, categories, strict=True):
        bottom = dense_in
        for at in range(4):
            bottom = dense(bottom, f"bottom{at}")
        vectors = [bottom, *(t[row % len(t)].sum(0) for t, row in zip(tables, sparse, strict=True))]
        pairs = [vectors[i] @ vectors[j] for i in range(27) for j in range(i)]
        top = dense(dense(np.concatenate([bottom, pairs]), "top0"), "top1")
        expected.append(1 / (1 + np.exp(-(top @ w["last/W"] + w["last/b"]))))
    found = run_plain(model, {"numbers": numbers, "categories": categories})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)


def test_large_weights_are_written_beside_the_model(tmp_path: Path) -> None:
    """Weights of a megabyte or more go to the file, with the values that the model has without one."""
    parameters = {"rows": 20_000, "batch": 2}
    written = write("dlrm", tmp_path / "m.onnx", parameters)
    external = [
        t for t in onnx.load(tmp_path / "m.onnx", load_external_data=False).graph.initializer if t.external_data
    ]
    assert external
    assert sum(4 * np.prod(t.dims) for t in external) < (tmp_path / "m.onnx.data").stat().st_size
    assert written.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    inside, beside = weights_of(build("dlrm", parameters)), weights_of(onnx.load(tmp_path / "m.onnx"))
    assert inside.keys() == beside.keys()
    for name, value in inside.items():
        np.testing.assert_array_equal(value, beside[name])
    assert sorted(t.name for t in external) == sorted(n for n, v in inside.items() if v.nbytes >= LARGE_BYTES)
    feed = {"numbers": np.ones((2, 13), np.float32), "categories": np.full((2, 26, 1), 19_999)}
    session = ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, feed)[0], run_plain(build("dlrm", parameters), feed)[0])


@pytest.mark.parametrize("name", ["gpt2-decoder", "llama-decoder", "llama-decoder-grouped", "gpt2-decoder-onnx"])
def test_decoders_have_their_large_weights_beside_them(tmp_path: Path, name: str) -> None:
    """They have the values that the model has without a file, and the decoder generates the same tokens."""
    parameters = {"layers": 1, "vocabulary": 3000}
    written = write(name, tmp_path / "m.onnx", parameters)
    proto = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    assert written.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    model = build(name, parameters)
    inside, beside = weights_of(model), weights_of(onnx.load(tmp_path / "m.onnx"))
    assert inside.keys() == beside.keys()
    for weight, value in inside.items():
        np.testing.assert_array_equal(value, beside[weight])
    large = {weight for weight, value in inside.items() if value.nbytes >= LARGE_BYTES}
    assert {t.name for t in proto.graph.initializer if t.external_data} == large >= {"words", "head/W"}
    with chrion.Generator(tmp_path / "m.onnx", threads=1) as generator:
        assert generator.submit([1, 2, 3], 6).result(60) == PlainDecoder(model).generate([1, 2, 3], 6)


def test_weights_are_generated_in_blocks() -> None:
    """No block that is written is larger than 4 MB, whatever the size of the weight."""
    sizes = []

    class Counting(io.BytesIO):
        def write(self, data: Any) -> int:
            sizes.append(memoryview(data).nbytes)
            return sizes[-1]

    build_dlrm(specification("dlrm", {"rows": 100_000, "embedding": 64}), WeightsFile(Counting(), "x"))
    assert max(sizes) <= 4 << 20
    assert sum(sizes) > 100 << 20
