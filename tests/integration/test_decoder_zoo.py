"""The zoo's decoders: published structure, and a cache that changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from chrion.errors import OptionError
from chrion.zoo import build
from decoder_support import FORMS, PlainDecoder, small_decoder


def empty_caches(session: ort.InferenceSession) -> dict[str, np.ndarray[Any, Any]]:
    """Return the keys and values of no tokens."""
    return {
        i.name: np.zeros((1, i.shape[1], 0, i.shape[3]), np.float32) for i in session.get_inputs() if "past" in i.name
    }


@pytest.mark.parametrize("name", FORMS)
def test_models_are_valid(name: str) -> None:
    """The checker of ONNX accepts the model, where it knows the operators."""
    onnx.checker.check_model(small_decoder(name), full_check=not name.endswith("grouped"))


@pytest.mark.parametrize("name", FORMS)
def test_the_cache_changes_nothing(name: str) -> None:
    """Three tokens after a cache of four have the logits of all seven at once."""
    model = small_decoder(name)
    session = ort.InferenceSession(model.SerializeToString())
    shape = next(i.shape for i in session.get_inputs() if i.name == "past_key_values.0.key")
    ids = np.array([[5, 9, 2, 44, 7, 7, 60]])
    cache = empty_caches(session)
    logits = []
    for first, last in ((0, 4), (4, 7)):
        feed = {"input_ids": ids[:, first:last], "attention_mask": np.ones((1, last), np.int64)}
        feed["position_ids"] = np.arange(first, last)[None]
        known = {i.name for i in session.get_inputs()}
        found = session.run(None, {**{k: v for k, v in feed.items() if k in known}, **cache})
        logits.append(found[0])
        cache = dict(zip(cache, found[1:], strict=True))
        assert all(value.shape == (1, shape[1], last, shape[3]) for value in cache.values())
    np.testing.assert_allclose(np.concatenate(logits, 1)[0], PlainDecoder(model).scores(ids[0].tolist()), atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_all_forms_of_attention_are_one_function(family: str) -> None:
    """Plain operators, ONNX's Attention and GroupQueryAttention give equal logits with equal seeds."""
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    scores = [PlainDecoder(small_decoder(name)).scores(ids) for name in FORMS if name.startswith(family)]
    for other in scores[1:]:
        np.testing.assert_allclose(other, scores[0], atol=1e-4)
    assert np.std(scores[0]) > 0.1


@pytest.mark.parametrize("name", [name for name in FORMS if not name.endswith("grouped")])
def test_padding_that_the_attention_mask_leaves_out_changes_nothing(name: str) -> None:
    """Tokens after padding of any ids have the logits that they have alone."""
    model = small_decoder(name)
    session = ort.InferenceSession(model.SerializeToString())
    feed = {"position_ids": np.array([[0, 0, 0, 1, 2]]), **empty_caches(session)}
    expected = PlainDecoder(model).scores([1, 2, 3])
    for padding, hidden in (([7, 9], True), ([60, 0], True), ([7, 9], False)):
        feed["input_ids"] = np.array([[*padding, 1, 2, 3]])
        feed["attention_mask"] = np.array([[not hidden, not hidden, 1, 1, 1]], np.int64)
        found = session.run(["logits"], feed)[0][0, 2:]
        assert np.allclose(found, expected, atol=1e-4) == hidden


def test_logits_do_not_depend_on_later_tokens() -> None:
    """The mask is causal."""
    plain = PlainDecoder(small_decoder("llama-decoder"))
    np.testing.assert_allclose(plain.scores([1, 2, 3, 4])[:2], plain.scores([1, 2])[:2], atol=1e-5)
    assert np.abs(plain.scores([2, 2, 3])[2] - plain.scores([1, 2, 3])[2]).max() > 1e-3


def test_rotary_positions_are_relative() -> None:
    """Without the embedding of positions, scores depend on distances only: a shifted text has equal logits."""
    model = small_decoder("llama-decoder")
    session = ort.InferenceSession(model.SerializeToString())
    first, shifted = (
        session.run(
            ["logits"],
            {
                "input_ids": np.array([[1, 2, 3]]),
                "attention_mask": np.ones((1, 3), np.int64),
                "position_ids": np.arange(start, start + 3)[None],
                **empty_caches(session),
            },
        )[0]
        for start in (0, 40)
    )
    np.testing.assert_allclose(first, shifted, atol=1e-4)


def test_published_structure_of_llama() -> None:
    """A layer has seven matrices, of which keys and values are as narrow as their heads (Llama 2 70B: 8 of 64)."""
    model = build(
        "llama-decoder", {"layers": 3, "hidden": 64, "heads": 8, "kv_heads": 2, "inner": 96, "vocabulary": 50}
    )
    shapes = [tuple(t.dims) for t in model.graph.initializer if len(t.dims) == 2 and t.name.startswith("block0")]
    assert sorted(shapes) == sorted([(64, 64), (64, 16), (64, 16), (64, 64), (64, 96), (64, 96), (96, 64)])


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("llama-decoder", {"heads": 4, "kv_heads": 3}, "kv_heads: 3 does not divide the 4 heads"),
        ("llama-decoder", {"hidden": 12, "heads": 4, "kv_heads": 2}, "a width of 3 per head is odd"),
        ("llama-decoder-grouped", {"hidden": 32, "heads": 4, "kv_heads": 2}, "a multiple of 16, found 8"),
        ("gpt2-decoder", {"hidden": 30, "heads": 4}, "heads: 4 does not divide the width of 30"),
        ("gpt2-decoder", {"context": 0}, "context: expected 1 or more, found 0"),
    ],
)
def test_wrong_sizes_are_refused(name: str, parameters: dict[str, int], message: str) -> None:
    """The message names the parameter."""
    with pytest.raises(OptionError, match=message):
        build(name, parameters)
