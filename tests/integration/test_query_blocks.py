"""Attention of long prompts in blocks of queries: equal to plain onnxruntime, or not used."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import chrion
from chrion.errors import GenerationError
from chrion.generation.cache import CachePool, RequestCache
from chrion.generation.engine import SelectiveEngine
from chrion.generation.iteration import Work
from chrion.generation.open_engine import open_engine
from chrion.generation.query_blocks import BLOCK, PASS, split_queries, supports_query_blocks
from decoder_support import FORMS, PlainDecoder, parts_of, small_decoder

Array = np.ndarray[Any, Any]
LENGTH = 4 * BLOCK
pytestmark = pytest.mark.usefixtures("several_operators")  # as one operator, attention has no use for blocks


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
        for at in range(past):  # one token after the other, so that there are no blocks
            engine.run([Work(cache, np.array(text[at : at + 1]), at, wanted=False)])
    batch = [Work(cache, np.array(t[p:]), p) for t, cache, p in zip(texts, caches, pasts, strict=True)]
    outcomes = []
    for outcome in engine.run(batch):
        assert isinstance(outcome, np.ndarray), outcome
        outcomes.append(outcome)
    return outcomes


def count_blocks(engine: SelectiveEngine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list to which the tokens of the requests of each run by parts are added."""
    counts: list[list[int]] = []
    parts = parts_of(engine)
    run_whole = parts.run_whole

    def counted(batch: list[Work]) -> list[Any]:
        counts.append([len(work.ids) for work in batch])
        return run_whole(batch)

    monkeypatch.setattr(parts, "run_whole", counted)
    return counts


@pytest.mark.parametrize("name", FORMS)
def test_long_prompts_equal_plain_onnxruntime(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several blocks, of exactly one, after other tokens, and beside a single token."""
    model = small_decoder(name, context=LENGTH)
    engine, plain = engine_of(model), PlainDecoder(model)
    pick = np.random.default_rng(6)
    lengths, pasts = [2 * BLOCK + 44, BLOCK, 2 * BLOCK + 3, 4], [0, 0, 3, 3]
    texts = [[int(token) for token in pick.integers(0, 61, length)] for length in lengths]
    counts = count_blocks(engine, monkeypatch)
    for text, found in zip(texts, run(engine, texts, pasts), strict=True):
        expected = plain.scores(text)[-1]
        np.testing.assert_allclose(found, expected, atol=2e-5 * max(1, np.abs(expected).max()), rtol=0)
        assert np.argmax(found) == np.argmax(expected)
    assert counts[-1] == [BLOCK, BLOCK, 44, BLOCK, BLOCK, BLOCK, 1]


@pytest.mark.parametrize("name", FORMS)
def test_very_long_prompts_run_in_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass has more tokens of a request than the most; the scores are plain onnxruntime's."""
    model = small_decoder(name, context=LENGTH)
    engine, plain = engine_of(model), PlainDecoder(model)
    assert engine._pass == PASS
    monkeypatch.setattr(engine, "_pass", 2 * BLOCK)
    pick = np.random.default_rng(8)
    texts = [[int(token) for token in pick.integers(0, 61, length)] for length in (3 * BLOCK + 9, 5, 2 * BLOCK + 4)]
    counts = count_blocks(engine, monkeypatch)
    for text, found in zip(texts, run(engine, texts, [0, 4, 3]), strict=True):
        expected = plain.scores(text)[-1]
        np.testing.assert_allclose(found, expected, atol=2e-5 * max(1, np.abs(expected).max()), rtol=0)
    assert counts[-2:] == [[BLOCK, BLOCK, 1, BLOCK, BLOCK], [BLOCK, 9, 1]]


def test_a_pass_that_fails_ends_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second pass of a prompt fails, the other request of the batch has its scores."""
    model = small_decoder("gpt2-decoder", context=LENGTH)
    engine, plain = engine_of(model), PlainDecoder(model)
    monkeypatch.setattr(engine, "_pass", 2 * BLOCK)
    parts = parts_of(engine)
    run_whole = parts.run_whole

    def failing(batch: list[Work]) -> list[Any]:
        if any(work.past == 2 * BLOCK for work in batch):
            raise RuntimeError("the second pass")
        return run_whole(batch)

    monkeypatch.setattr(parts, "run_whole", failing)
    caches = [RequestCache(engine.signature, LENGTH, by_token=engine.by_token) for _ in range(2)]
    failed, found = engine.run([Work(caches[0], np.arange(3 * BLOCK) % 61, 0), Work(caches[1], np.arange(7), 0)])
    assert isinstance(failed, GenerationError)
    assert "the second pass" in str(failed)
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, plain.scores(range(7))[-1], atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"chunk": 200}, {"n_workers": 2}], ids=["whole", "chunked", "two batches"])
def test_tokens_after_long_prompts_are_those_of_the_whole_text(options: dict[str, int]) -> None:
    """The caches hold what plain onnxruntime computes, also in chunks and with two batches in flight."""
    model = small_decoder("llama-decoder", context=LENGTH)
    prompts = [[(at * step) % 61 for at in range(2 * BLOCK + 9 * step)] for step in (1, 7, 11)]
    with chrion.Generator(model, threads=2, max_batch=2, **options) as generator:
        assert isinstance(generator._loop.engine, SelectiveEngine)
        assert parts_of(generator._loop.engine).block == BLOCK
        streams = [generator.submit(prompt, 8, stop_tokens=()) for prompt in prompts]
        found = [stream.result() for stream in streams]
    plain = PlainDecoder(model)
    assert found == [plain.generate(prompt, 8) for prompt in prompts]


def test_caches_that_are_copied() -> None:
    """The present of a model that computes with it is a copy, of which each block has its own part."""
    model = small_decoder("llama-decoder", context=LENGTH)
    for node in [node for node in model.graph.node if node.output[0].startswith("present")]:
        name = node.output[0]
        node.output[0] = f"{name}-joined"
        model.graph.node.append(helper.make_node("Identity", [f"{name}-joined"], [name]))
        for other in model.graph.node:
            if other.op_type != "Identity":
                other.input[:] = [f"{name}-joined" if i == name else i for i in other.input]
    engine, plain = engine_of(model), PlainDecoder(model)
    assert not engine.by_token
    assert parts_of(engine).block == BLOCK
    text = [at % 61 for at in range(2 * BLOCK + 30)]
    np.testing.assert_allclose(run(engine, [text], [3])[0], plain.scores(text)[-1], atol=2e-5)


def test_only_the_prompt_with_a_wrong_block_fails() -> None:
    """A token outside the vocabulary in the second block of one prompt leaves the other prompt as it is."""
    model = small_decoder("llama-decoder", context=LENGTH)
    engine, plain = engine_of(model), PlainDecoder(model)
    text = [at % 61 for at in range(BLOCK + 30)]
    wrong = [*text[:-1], 61]
    caches = [RequestCache(engine.signature, LENGTH, by_token=engine.by_token) for _ in range(2)]
    failed, found = engine.run([Work(c, np.array(t), 0) for c, t in zip(caches, (wrong, text), strict=True)])
    assert isinstance(failed, GenerationError)
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, plain.scores(text)[-1], atol=2e-5)


def test_many_new_tokens_run_on_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 64 tokens on, attention runs in the sessions of several threads; with one thread there are no others."""
    engine = engine_of(small_decoder("gpt2-decoder", context=LENGTH), threads=2)
    attention = next(part.attention for part in parts_of(engine)._parts[1:] if part.attention is not None)
    assert [
        session.get_session_options().intra_op_num_threads for session in (attention._session, attention._parallel)
    ] == [1, 2]
    used: list[int] = []
    for threads, name in enumerate(("_session", "_parallel"), 1):
        session = getattr(attention, name)

        def noted(*call: Any, own: Any = session, number: int = threads) -> Any:
            used.append(number)
            return own.run(*call)

        monkeypatch.setattr(attention, name, SimpleNamespace(run=noted))
    for count in (63, 64, BLOCK + 63):
        run(engine, [[at % 61 for at in range(count)]], [0])
    assert used == [1, 2, 2, 1]
    single = engine_of(small_decoder("gpt2-decoder"), threads=1)
    attention = next(part.attention for part in parts_of(single)._parts[1:] if part.attention is not None)
    assert attention._session is attention._parallel


def test_models_without_blocks() -> None:
    """Short contexts need none; a decoder that fails on a block has none."""
    engine = engine_of(small_decoder("gpt2-decoder", context=BLOCK))
    assert parts_of(engine).block > BLOCK
    long = engine_of(small_decoder("gpt2-decoder", context=BLOCK + 1))
    assert parts_of(long).block == BLOCK

    def fail_after_others(batch: Sequence[Work]) -> list[Any]:
        if any(0 < work.past < 5 for work in batch):
            raise RuntimeError("no tokens after others")
        return parts_of(long).run_whole(batch)

    assert not supports_query_blocks(long.signature, fail_after_others, by_token=long.by_token)


def test_positions_that_depend_on_the_length_beyond_a_trial() -> None:
    """A model that changes all positions once a text has 3000 tokens runs prompts whole, and increments by parts."""
    model = small_decoder("llama-decoder", context=4096)
    for name, value in (("most", 3000), ("two", 2)):
        model.graph.initializer.append(numpy_helper.from_array(np.array(value), name))
    for node in model.graph.node:
        node.input[:] = ["chosen" if name == "position_ids" else name for name in node.input]
    for node in (
        helper.make_node("Where", ["long", "halves", "position_ids"], ["chosen"]),
        helper.make_node("Div", ["position_ids", "two"], ["halves"]),
        helper.make_node("GreaterOrEqual", ["last", "most"], ["long"]),
        helper.make_node("ReduceMax", ["position_ids"], ["last"], keepdims=0),
    ):
        model.graph.node.insert(0, node)
    plain = PlainDecoder(model)
    prompts = [[at * at % 61 for at in range(length)] for length in (3100, 2998, 20)]
    with chrion.Generator(model, threads=1, chunk=1000) as generator:
        assert isinstance(generator._loop.engine, SelectiveEngine)
        assert parts_of(generator._loop.engine).block > BLOCK
        assert generator._loop.engine._pooled is None
        streams = [generator.submit(prompt, 4) for prompt in prompts]
        assert [s.result(120) for s in streams] == [plain.generate_with_cache(prompt, 4) for prompt in prompts]


def test_trials_stay_within_the_stated_context(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A table that is read with an offset does not show its length; the configuration does, and nothing fails."""
    model = small_decoder("gpt2-decoder", context=2 * BLOCK + 2)
    model.graph.initializer.append(numpy_helper.from_array(np.array(2), "offset"))
    for node in model.graph.node:
        node.input[:] = ["shifted" if name == "position_ids" else name for name in node.input]
    model.graph.node.insert(0, helper.make_node("Add", ["position_ids", "offset"], ["shifted"]))
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 2 * BLOCK}))
    engine = open_engine(chrion.load(tmp_path / "model.onnx"), threads=1)
    assert isinstance(engine, SelectiveEngine)
    assert engine.signature.context == 2 * BLOCK
    assert parts_of(engine).block == BLOCK
    assert engine._pooled is not None
    assert engine._pooled.longest == 2 * BLOCK - 1
    assert capfd.readouterr().err == ""


def test_a_model_whose_prompts_see_what_follows_runs_them_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix language model lets each token of a prompt see all others, those of later blocks as well."""
    model = small_decoder("llama-decoder", context=LENGTH)
    at, causal = next((at, node) for at, node in enumerate(model.graph.node) if node.op_type == "LessOrEqual")
    visible, causal.output[0] = causal.output[0], "causal"
    model.graph.node.insert(at + 1, helper.make_node("Equal", [causal.input[0]] * 2, ["all"]))
    model.graph.node.insert(at + 2, helper.make_node("Or", ["causal", "all"], [visible]))
    engine, plain = engine_of(model), PlainDecoder(model)
    counts = count_blocks(engine, monkeypatch)
    text = [at % 61 for at in range(BLOCK + 30)]
    np.testing.assert_allclose(run(engine, [text], [0])[0], plain.scores(text)[-1], atol=2e-5)
    assert counts == [[BLOCK + 30]]


@pytest.mark.parametrize("wanted", [True, False])
def test_blocks_are_the_request_in_its_order(*, wanted: bool) -> None:
    """Every token is in one block, after those before it, and only the last block has scores."""
    engine = engine_of(small_decoder("gpt2-decoder"), threads=1)
    cache = RequestCache(engine.signature, 30, by_token=True)
    for count, most in itertools.product(range(1, 14), (1, 3, 4, 100)):
        work = Work(cache, np.arange(count), 5, wanted=wanted)
        blocks, last = split_queries([work, work], most)
        assert last == [len(blocks) // 2 - 1, len(blocks) - 1]
        own = blocks[: len(blocks) // 2]
        assert max(len(block.ids) for block in own) <= most
        assert len(own) == -(-count // most)
        assert np.array_equal(np.concatenate([block.ids for block in own]), work.ids)
        assert [block.past - 5 for block in own] == [block.ids[0] for block in own]
        assert [block.wanted for block in own] == [False] * (len(own) - 1) + [wanted]
        assert all(block.cache is cache for block in own)
