"""Long prompts run in pieces: equal to plain onnxruntime, or not used."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import chrion
from chrion.generation.cache import CachePool, RequestCache
from chrion.generation.engine import SelectiveEngine
from chrion.generation.generator import open_engine
from chrion.generation.iteration import Work
from chrion.generation.pieces import PIECE, in_pieces
from decoder_support import FORMS, PlainDecoder, small_decoder

Array = np.ndarray[Any, Any]
LENGTH = 4 * PIECE


def engine_of(model: onnx.ModelProto, threads: int = 2) -> SelectiveEngine:
    """Return an engine whose prompts may be long."""
    engine = open_engine(chrion.load(model), threads)
    assert isinstance(engine, SelectiveEngine)
    return engine


def run(engine: SelectiveEngine, texts: list[list[int]], pasts: list[int]) -> list[Array]:
    """Return the scores after texts of which the first tokens are already in the cache."""
    pool = CachePool(engine.signature, LENGTH * len(texts))
    caches = [RequestCache(engine.signature, LENGTH, by_token=engine.by_token, pool=pool) for _ in texts]
    for text, cache, past in zip(texts, caches, pasts, strict=True):
        for at in range(past):  # one token after the other, so that no piece is involved
            engine.run([Work(cache, np.array(text[at : at + 1]), at, wanted=False)])
    batch = [Work(cache, np.array(t[p:]), p) for t, cache, p in zip(texts, caches, pasts, strict=True)]
    outcomes = []
    for outcome in engine.run(batch):
        assert isinstance(outcome, np.ndarray), outcome
        outcomes.append(outcome)
    return outcomes


def count_pieces(engine: SelectiveEngine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list to which the tokens of the requests of each run by parts are added."""
    counts: list[list[int]] = []
    run_pieces = engine._run_pieces

    def counted(batch: list[Work]) -> list[Any]:
        counts.append([len(work.ids) for work in batch])
        return run_pieces(batch)

    monkeypatch.setattr(engine, "_run_pieces", counted)
    return counts


@pytest.mark.parametrize("name", FORMS)
def test_long_prompts_equal_plain_onnxruntime(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several pieces, of exactly one, after other tokens, and beside a single token."""
    model = small_decoder(name, context=LENGTH)
    engine, plain = engine_of(model), PlainDecoder(model)
    pick = np.random.default_rng(6)
    lengths, pasts = [2 * PIECE + 44, PIECE, 2 * PIECE + 3, 4], [0, 0, 3, 3]
    texts = [[int(token) for token in pick.integers(0, 61, length)] for length in lengths]
    counts = count_pieces(engine, monkeypatch)
    for text, found in zip(texts, run(engine, texts, pasts), strict=True):
        expected = plain.scores(text)[-1]
        np.testing.assert_allclose(found, expected, atol=2e-5 * max(1, np.abs(expected).max()), rtol=0)
        assert np.argmax(found) == np.argmax(expected)
    assert counts[-1] == [PIECE, PIECE, 44, PIECE, PIECE, PIECE, 1]


def test_tokens_after_a_prompt_in_pieces_read_its_keys_and_values() -> None:
    """The caches hold what plain onnxruntime computes: the next tokens are those of the whole text."""
    model = small_decoder("llama-decoder", context=LENGTH)
    prompt = [at % 61 for at in range(2 * PIECE + 9)]
    with chrion.Generator(model, threads=2) as generator:
        found = generator.submit(prompt, 8, stop_tokens=()).result()
    assert found == PlainDecoder(model).generate(prompt, 8)


def test_a_model_whose_prompts_see_what_follows_runs_them_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix language model lets each token of a prompt see all others, as well those of later pieces."""
    model = small_decoder("llama-decoder", context=LENGTH)
    at, causal = next((at, node) for at, node in enumerate(model.graph.node) if node.op_type == "LessOrEqual")
    visible, causal.output[0] = causal.output[0], "causal"
    model.graph.node.insert(at + 1, helper.make_node("Equal", [causal.input[0]] * 2, ["all"]))
    model.graph.node.insert(at + 2, helper.make_node("Or", ["causal", "all"], [visible]))
    engine, plain = engine_of(model), PlainDecoder(model)
    counts = count_pieces(engine, monkeypatch)
    text = [at % 61 for at in range(PIECE + 30)]
    np.testing.assert_allclose(run(engine, [text], [0])[0], plain.scores(text)[-1], atol=2e-5)
    assert counts == [[PIECE + 30]]


@pytest.mark.parametrize("wanted", [True, False])
def test_pieces_are_the_request_in_their_order(*, wanted: bool) -> None:
    """Every token is in one piece, after those before it, and only the last piece has scores."""
    engine = engine_of(small_decoder("gpt2-decoder"), threads=1)
    cache = RequestCache(engine.signature, 30, by_token=True)
    for count, most in itertools.product(range(1, 14), (1, 3, 4, 100)):
        work = Work(cache, np.arange(count), 5, wanted=wanted)
        pieces, last = in_pieces([work, work], most)
        assert last == [len(pieces) // 2 - 1, len(pieces) - 1]
        own = pieces[: len(pieces) // 2]
        assert max(len(piece.ids) for piece in own) <= most
        assert len(own) == -(-count // most)
        assert np.array_equal(np.concatenate([piece.ids for piece in own]), work.ids)
        assert [piece.past - 5 for piece in own] == [piece.ids[0] for piece in own]
        assert [piece.wanted for piece in own] == [False] * (len(own) - 1) + [wanted]
        assert all(piece.cache is cache for piece in own)
