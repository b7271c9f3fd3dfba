"""Attention of long prompts in blocks of queries: equal to plain onnxruntime, or not used."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import chrion
from chrion.errors import GenerationError
from chrion.generation.cache import CachePool, RequestCache
from chrion.generation.engine import SelectiveEngine
from chrion.generation.equivalence import Run
from chrion.generation.iteration import Outcome, Work
from chrion.generation.open_engine import open_engine
from chrion.generation.query_blocks import BLOCK, PASS, split_queries, supports_query_blocks
from decoder_support import PlainDecoder, check_scores, engine_of, shared_engine, small_decoder
from seams.generation import around_parts, attention_threads, loop_of, parts_of

LENGTH = PASS + 2 * BLOCK
pytestmark = pytest.mark.usefixtures("several_operators")  # as one operator, attention has no use for blocks


def run(engine: SelectiveEngine, texts: list[list[int]], pasts: list[int]) -> list[Outcome]:
    """Return the outcomes of texts of which the first tokens are already in the cache."""
    pool = CachePool(engine.signature, LENGTH * len(texts))
    caches = [RequestCache(engine.signature, LENGTH, by_token=engine.by_token, pool=pool) for _ in texts]
    for text, cache, past in zip(texts, caches, pasts, strict=True):
        for at in range(past):  # one token after the other, so that there are no blocks
            engine.run([Work(cache, np.array(text[at : at + 1]), at, wanted=False)])
    return engine.run([Work(cache, np.array(t[p:]), p) for t, cache, p in zip(texts, caches, pasts, strict=True)])


def count_blocks(engine: SelectiveEngine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list to which the tokens of the requests of each run by parts are added."""
    counts: list[list[int]] = []

    def note(run_whole: Run, batch: Sequence[Work]) -> list[Outcome]:
        counts.append([len(work.ids) for work in batch])
        return run_whole(batch)

    around_parts(monkeypatch, engine, note)
    return counts


@pytest.mark.parametrize("name", ["gpt2-decoder", "llama-decoder-onnx", "llama-decoder-grouped"])
def test_long_prompts_equal_plain_onnxruntime(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several blocks, of exactly one, after other tokens, and beside a single token; one in two passes."""
    engine, plain = shared_engine(name, native=False, context=LENGTH), PlainDecoder(small_decoder(name, context=LENGTH))
    pick = np.random.default_rng(6)
    counts = count_blocks(engine, monkeypatch)
    for lengths, pasts, expected in (
        ([2 * BLOCK + 44, BLOCK, 2 * BLOCK + 3, 4], [0, 0, 3, 3], [[BLOCK, BLOCK, 44, BLOCK, BLOCK, BLOCK, 1]]),
        ([PASS + BLOCK + 9, 5, PASS + 4], [0, 4, 3], [[*[BLOCK] * 4, 1, *[BLOCK] * 4], [BLOCK, 9, 1]]),
    ):
        texts = [[int(token) for token in pick.integers(0, 61, length)] for length in lengths]
        check_scores(run(engine, texts, pasts), texts, plain)
        assert counts[-len(expected) :] == expected


def test_a_pass_that_fails_ends_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second pass of a prompt fails, the other request of the batch has its scores."""
    engine = shared_engine("gpt2-decoder", native=False, context=LENGTH)

    def fail(run_whole: Run, batch: Sequence[Work]) -> list[Outcome]:
        if any(work.past == PASS for work in batch):
            raise RuntimeError("the second pass")
        return run_whole(batch)

    around_parts(monkeypatch, engine, fail)
    failed, found = run(engine, [[at % 61 for at in range(length)] for length in (PASS + BLOCK, 7)], [0, 0])
    assert isinstance(failed, GenerationError)
    assert "the second pass" in str(failed)
    check_scores([found], [range(7)], PlainDecoder(small_decoder("gpt2-decoder", context=LENGTH)))


@pytest.mark.parametrize("options", [{"chunk": 200}, {"n_workers": 2}], ids=["chunked", "two batches"])
def test_tokens_after_long_prompts_are_those_of_the_whole_text(options: dict[str, int]) -> None:
    """The caches hold what plain onnxruntime computes, also in chunks and with two batches in flight."""
    model = small_decoder("llama-decoder", context=LENGTH)
    prompts = [[(at * step) % 61 for at in range(2 * BLOCK + 9 * step)] for step in (1, 7, 11)]
    with chrion.Generator(model, threads=2, max_batch=2, **options) as generator:
        engine = loop_of(generator).engine
        assert isinstance(engine, SelectiveEngine)
        assert parts_of(engine).block == BLOCK
        streams = [generator.submit(prompt, 8, stop_tokens=()) for prompt in prompts]
        found = [stream.result() for stream in streams]
    plain = PlainDecoder(model)
    assert found == [plain.generate_with_cache(prompt, 8) for prompt in prompts]


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
    engine = engine_of(model)
    assert not engine.by_token
    assert parts_of(engine).block == BLOCK
    text = [at % 61 for at in range(2 * BLOCK + 30)]
    check_scores(run(engine, [text], [3]), [text], PlainDecoder(model))


def test_only_the_prompt_with_a_wrong_block_fails() -> None:
    """A token outside the vocabulary in the second block of one prompt leaves the other prompt as it is."""
    engine = shared_engine("gpt2-decoder", native=False, context=LENGTH)
    text = [at % 61 for at in range(BLOCK + 30)]
    failed, found = run(engine, [[*text[:-1], 61], text], [0, 0])
    assert isinstance(failed, GenerationError)
    check_scores([found], [text], PlainDecoder(small_decoder("gpt2-decoder", context=LENGTH)))


def test_many_new_tokens_run_on_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 64 tokens on, attention runs in the sessions of several threads."""
    engine = engine_of(small_decoder("gpt2-decoder", layers=1, context=LENGTH), threads=2)
    used = attention_threads(monkeypatch, engine)
    for count in (63, 64, BLOCK + 63):
        run(engine, [[at % 61 for at in range(count)]], [0])
    assert used == [1, 2, 2, 1]


def test_models_without_blocks() -> None:
    """Short contexts need none; a decoder that fails on a block has none."""
    engine = engine_of(small_decoder("gpt2-decoder", layers=1, context=BLOCK))
    assert parts_of(engine).block > BLOCK
    long = engine_of(small_decoder("gpt2-decoder", layers=1, context=BLOCK + 1))
    assert parts_of(long).block == BLOCK

    def fail_after_others(batch: Sequence[Work]) -> list[Outcome]:
        if any(0 < work.past < 5 for work in batch):
            raise RuntimeError("no tokens after others")
        return parts_of(long).run_whole(batch)

    assert not supports_query_blocks(long.signature, fail_after_others, by_token=long.by_token)


def test_positions_that_depend_on_the_length_beyond_a_trial() -> None:
    """A model that changes all positions once a text has 2100 tokens runs prompts whole, and increments by parts."""
    model = small_decoder("llama-decoder", layers=1, context=4096)
    for name, value in (("most", 2100), ("two", 2)):
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
    prompts = [[at * at % 61 for at in range(length)] for length in (2098, 20)]
    with chrion.Generator(model, threads=1, chunk=1000) as generator:
        engine = loop_of(generator).engine
        assert isinstance(engine, SelectiveEngine)
        assert parts_of(engine).block > BLOCK
        assert engine.pooled is None
        streams = [generator.submit(prompt, 4) for prompt in prompts]
        assert [s.result(120) for s in streams] == [plain.generate_with_cache(prompt, 4) for prompt in prompts]


def test_trials_stay_within_the_stated_context(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A table that is read with an offset does not show its length; the configuration does, and nothing fails."""
    model = small_decoder("gpt2-decoder", layers=1, context=2 * BLOCK + 2)
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
    assert engine.pooled is not None
    assert engine.pooled.longest == 2 * BLOCK - 1
    assert capfd.readouterr().err == ""


def test_a_model_whose_prompts_see_what_follows_runs_them_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix language model lets each token of a prompt see all others, those of later blocks as well."""
    model = small_decoder("llama-decoder", context=LENGTH)
    at, causal = next((at, node) for at, node in enumerate(model.graph.node) if node.op_type == "LessOrEqual")
    visible, causal.output[0] = causal.output[0], "causal"
    model.graph.node.insert(at + 1, helper.make_node("Equal", [causal.input[0]] * 2, ["all"]))
    model.graph.node.insert(at + 2, helper.make_node("Or", ["causal", "all"], [visible]))
    engine = engine_of(model)
    counts = count_blocks(engine, monkeypatch)
    text = [at % 61 for at in range(BLOCK + 30)]
    check_scores(run(engine, [text], [0]), [text], PlainDecoder(model))
    assert counts == [[BLOCK + 30]]


@pytest.mark.parametrize("wanted", [True, False])
def test_blocks_are_the_request_in_its_order(*, wanted: bool) -> None:
    """Every token is in one block, after those before it, and only the last block has scores."""
    engine = shared_engine("gpt2-decoder", native=False)
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
