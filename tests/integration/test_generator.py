"""The generator: streams of tokens for many callers, equal to plain onnxruntime's."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import pickle
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
from onnx import helper
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from chrion import Generator, Graph, Sampling, load
from chrion.errors import ContextLengthError, GenerationError, OptionError, ProviderError
from chrion.generation.engine import PlainDecoderEngine
from decoder_support import PlainDecoder, log_softmax, small_decoder, wait_until_idle
from seams.generation import loop_of

MODEL = small_decoder("llama-decoder", layers=1)


@pytest.fixture(scope="module")
def plain() -> PlainDecoder:
    return PlainDecoder(MODEL)


@pytest.fixture(scope="module")
def opened() -> Iterator[Generator]:
    with Generator(MODEL, threads=1, max_batch=4) as generator:
        yield generator


@pytest.fixture
def generator(opened: Generator) -> Iterator[Generator]:
    """A generator, which has released everything at the end."""
    yield opened
    wait_until_idle(opened)
    assert loop_of(opened).caches.reserved == 0


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    pick = np.random.default_rng(seed)
    return [[int(t) for t in pick.integers(0, 61, pick.integers(1, 12))] for _ in range(count)]


@pytest.mark.parametrize(
    "options", [{"max_batch": 3, "n_workers": 2, "chunk": 2}, {"max_batch": 3, "policy": "request", "kv_slots": 40}]
)
def test_greedy_tokens_equal_plain_onnxruntime(options: dict[str, Any], plain: PlainDecoder) -> None:
    """Every request of a busy generator has its own tokens, whatever the batches are."""
    with Generator(MODEL, threads=1, **options) as generator:
        streams = [generator.submit(ids, 3 + at % 9) for at, ids in enumerate(prompts(16))]
        for at, (ids, stream) in enumerate(zip(prompts(16), streams, strict=True)):
            assert list(stream) == plain.generate(ids, 3 + at % 9)
            assert stream.finish_reason == "length"
        assert generator.statistics().generated_tokens == sum(3 + at % 9 for at in range(16))


def test_seeds_decide_whatever_the_batch(generator: Generator) -> None:
    """A sampled request has the same tokens alone and among others."""
    how = Sampling(temperature=1.0, top_k=20, top_p=0.9, repetition_penalty=1.1, seed=7)
    alone = generator.submit([1, 2, 3], 20, sampling=how).result(60)
    others = [generator.submit(ids, 25) for ids in prompts(6, seed=1)]
    among = generator.submit([1, 2, 3], 20, sampling=how).result(60)
    assert among == alone
    assert generator.submit([1, 2, 3], 20, sampling=dataclasses.replace(how, seed=8)).result(60) != alone
    assert all(len(other.result(60)) == 25 for other in others)


def test_tokens_come_one_by_one(generator: Generator) -> None:
    """A stream yields its first token while the request still runs, and can be read twice."""
    stream = generator.submit([1, 2], 50)
    first = next(iter(stream))
    rest = list(stream)
    assert rest[0] == first
    assert list(stream) == rest
    assert len(rest) == 50


def test_streams_in_an_event_loop(generator: Generator, plain: PlainDecoder) -> None:
    """Async iteration gives the same tokens, for several requests at a time."""

    async def read(ids: Sequence[int]) -> list[int]:
        return [token async for token in generator.submit(ids, 8)]

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(read(ids) for ids in prompts(4)))

    assert asyncio.run(all_of_them()) == [plain.generate(ids, 8) for ids in prompts(4)]


def test_closing_cancels_what_runs() -> None:
    """The end of a stream's block cancels its request, that of a generator all others; later ones are refused."""
    with Generator(small_decoder("llama-decoder", layers=1, context=4000), threads=1) as generator:
        with generator.submit([1], 3900) as left:
            next(iter(left))
        assert left.finish_reason == "cancelled"
        stream = generator.submit([1], 3900)
        next(iter(stream))
    assert stream.finish_reason == "cancelled"
    assert len(list(stream)) < 3900
    with pytest.raises(RuntimeError, match="the generator is closed"):
        generator.submit([1])


def test_stop_tokens_end_a_text(generator: Generator, plain: PlainDecoder) -> None:
    """A stop token ends the text and is not part of it."""
    expected = plain.generate([4, 5], 30)
    at = next(at for at in range(1, 30) if expected[at] not in expected[:at])
    stream = generator.submit([4, 5], 30, stop_tokens=[expected[at]])
    assert stream.result(60) == expected[:at]
    assert stream.finish_reason == "stop"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "expected at least one token"),
        ({"prompt": [61]}, "tokens of 0 to 60, found 61"),
        ({"prompt": [-1]}, "found -1"),
        ({"prompt": "text"}, "needs a tokenizer"),
        ({"prompt": [1.5]}, "prompt: expected a whole number, found 1.5"),
        ({"prompt": [[1, 2]]}, r"prompt: expected a whole number, found \[1, 2\]"),
        ({"prompt": [True]}, "prompt: expected a whole number, found True"),
        ({"prompt": 5}, "prompt: expected a list of token ids, found 5"),
        ({"prompt": None}, "prompt: expected a list of token ids, found None"),
        ({"prompt": {1, 2}}, "prompt: expected a list of token ids"),
        ({"prompt": b"ab"}, "prompt: expected a list of token ids"),
        ({"prompt": np.array(3)}, "prompt: expected a list of token ids"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least one token, found 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens: expected a whole number, found 2.5"),
        (
            {"prompt": [1] * 65, "max_new_tokens": 1},
            r"for 64 tokens, .*needs 65 \(the prompt alone has 65 tokens, short",
        ),
        ({"prompt": [1] * 64}, "generate at most 1"),
        ({"prompt": [1] * 60, "max_new_tokens": 6}, "generate at most 5"),
        ({"stop": 5}, "stop: expected a list of strings, found 5"),
        ({"stop": [5]}, "stop: expected strings, found 5"),
        ({"stop": ["a"]}, "stop: text needs a tokenizer"),
        ({"stop_tokens": 5}, "stop_tokens: expected a list of token ids, found 5"),
        ({"stop_tokens": b"a"}, "stop_tokens: expected a list of token ids"),
        ({"stop_tokens": ["x"]}, "stop_tokens: expected a whole number, found 'x'"),
        ({"sampling": {"seed": 1}}, "sampling: expected a Sampling, found {'seed': 1}"),
        ({"sampling": Sampling(logit_bias={61: 1.0})}, "logit_bias: expected tokens of 0 to 60, found 61"),
        ({"logprobs": -1}, "logprobs: expected 0 or more, found -1"),
        ({"logprobs": True + 0.5}, "logprobs: expected a whole number, found 1.5"),
        ({"min_new_tokens": 3}, "min_new_tokens: expected 0 to 2, found 3"),
    ],
    ids=str,
)
def test_wrong_requests_are_refused(opened: Generator, arguments: dict[str, Any], message: str) -> None:
    """The message names the argument and what was expected; nothing fails later in the middle of a text."""
    with pytest.raises(OptionError, match=message):
        opened.submit(**{"prompt": [1], "max_new_tokens": 2, **arguments})
    assert opened.statistics().requests == 0


@pytest.mark.parametrize(
    "how", [None, Sampling(temperature=0.7, top_k=3, repetition_penalty=1.5, logit_bias={5: 3.0}, seed=4)]
)
def test_tokens_have_their_probabilities(generator: Generator, plain: PlainDecoder, how: Sampling | None) -> None:
    """They are those of the model, whatever the choice depends on, and of as many most probable tokens as wanted."""
    prompt = [2, 3, 4]
    events = list(generator.submit(prompt, 8, sampling=how, logprobs=3).events())
    ids = [event.id for event in events if event.id is not None]
    for event, scores in zip(events, plain.scores([*prompt, *ids])[len(prompt) - 1 : -1], strict=True):
        expected = log_softmax(scores)
        assert event.logprob == pytest.approx(expected[event.id], abs=1e-4)
        assert [token for token, _ in event.top] == [int(token) for token in np.argsort(-expected)[:3]]
        np.testing.assert_allclose([value for _, value in event.top], np.sort(expected)[:-4:-1], atol=1e-4)
    assert [event.time for event in events] == sorted(event.time for event in events)
    bare = generator.submit(prompt, 2, sampling=how, logprobs=0).events()
    assert [(event.logprob is not None, event.top) for event in bare] == [(True, ())] * 2
    assert {event.logprob for event in generator.submit(prompt, 2, sampling=how).events()} == {None}


def test_penalties_and_biases_change_greedy_tokens(generator: Generator, plain: PlainDecoder) -> None:
    """The tokens are those of the formula of the OpenAI API on the scores of plain onnxruntime."""
    how = Sampling(presence_penalty=0.6, frequency_penalty=0.3, logit_bias={7: 1.5, 9: -100})
    ids = [2, 3, 4]
    counts, bias = np.zeros(61), np.zeros(61)
    bias[7], bias[9] = 1.5, -100
    for _ in range(14):
        scores = plain.scores(ids)[-1] + bias - counts * 0.3 - (counts > 0) * 0.6
        ids.append(int(np.argmax(scores)))
        counts[ids[-1]] += 1
    assert generator.submit([2, 3, 4], 14, sampling=how).result(60) == ids[3:]
    assert ids[3:] != plain.generate([2, 3, 4], 14)


def test_the_least_number_of_tokens(generator: Generator, plain: PlainDecoder) -> None:
    """Stop tokens are not chosen before it; the next most probable token is."""
    prompt = [4, 5]
    first = plain.generate(prompt, 1)[0]
    ids = [*prompt]
    for _ in range(5):
        scores = plain.scores(ids)[-1]
        scores[first] = -np.inf
        ids.append(int(np.argmax(scores)))
    assert generator.submit(prompt, 9, stop_tokens=[first]).result(60) == []
    found = generator.submit(prompt, 9, stop_tokens=[first, 1000], min_new_tokens=5).result(60)
    assert found[:5] == ids[2:]
    assert first not in found


def test_stop_tokens_that_the_vocabulary_does_not_have(generator: Generator, plain: PlainDecoder) -> None:
    """They never end a text and exclude no token, also if they are negative."""
    prompt = [4, 5]
    expected = plain.generate(prompt, 9)
    unknown = [expected[0] - 61, 61, -(10**9), 10**9, -(10**20), 10**20]
    for least in (0, 5):
        assert generator.submit(prompt, 9, stop_tokens=unknown, min_new_tokens=least).result(60) == expected


def test_few_slots() -> None:
    """Requests share them equally; what never fits is refused, so that it does not block others."""
    with Generator(MODEL, threads=1, max_batch=4, kv_slots=40) as generator:
        # A longer prompt is followed by half a share, or by what is left.
        assert [generator.default_new_tokens(prompt) for prompt in (1, 3, 10, 36, 38, 40)] == [10, 8, 5, 5, 3, 1]
        assert [generator.most_new_tokens(prompt) for prompt in (1, 40, 60)] == [40, 1, 1]
        for prompt, new, about in ((36, 6, "generate at most 5"), (41, 1, "the prompt alone has 41 tokens")):
            with pytest.raises(ContextLengthError, match=f"needs 41 slots.*{about}") as refused:
                generator.submit([1] * prompt, new)
            error = pickle.loads(pickle.dumps(refused.value))  # noqa: S301 - as between processes
            assert (error.limit, error.prompt_tokens, error.new_tokens) == (40, prompt, new)
        assert len(generator.submit([1] * 36, 5).result(60)) == 5


@pytest.fixture(scope="module")
def graph() -> Graph:
    return load(MODEL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 5}, "model: expected a file"),
        ({"model": None}, "model: expected a file"),
        ({"model": bytearray(b"x")}, "model: expected a file"),
        ({"kv_slots": 10.5}, "kv_slots: expected a whole number, found 10.5"),
        ({"kv_slots": True}, "kv_slots: expected a whole number, found True"),
        ({"kv_slots": 0}, "kv_slots: expected 1 or more, found 0"),
        ({"kv_bytes": "1GB"}, "kv_bytes: expected a whole number, found '1GB'"),
        ({"kv_bytes": None}, "kv_bytes: expected a whole number, found None"),
        ({"kv_bytes": 100}, "kv_bytes: 100 bytes hold no token, which needs 128 bytes"),
        ({"threads": 0}, "threads: expected 1 or more, found 0"),
        ({"threads": 2**40}, "threads: expected at most 1024, found 1099511627776"),
        ({"max_batch": 0}, "max_batch: expected 1 or more, found 0"),
        ({"providers": 5}, "providers: expected a list of names, found 5"),
        ({"providers": [None]}, "providers: expected names, found None"),
        ({"providers": [("CPUExecutionProvider", {})]}, "providers: expected names, found"),
        ({"providers": ["Unknown"]}, "unknown accelerator 'Unknown'"),
        ({"tokenizer": 5}, "tokenizer: expected a file or a Tokenizer, found 5"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(graph: Graph, options: dict[str, Any], message: str) -> None:
    """The message names the option; a provider that does not exist is not replaced by the CPU without a word."""
    arguments: dict[str, Any] = {"model": graph, "threads": 1, **options}
    with pytest.raises(ProviderError if "Unknown" in message else OptionError, match=message):
        Generator(arguments.pop("model"), **arguments)


def test_numbers_of_numpy_are_numbers(plain: PlainDecoder) -> None:
    """An option may have any type of integer, of which small ones do not overflow; one provider is a list of it."""
    for options in (
        {"chunk": np.uint8(2), "kv_slots": np.int16(30_000), "max_batch": np.int8(3), "n_workers": np.uint8(2)},
        {"kv_bytes": np.uint16(60_000), "threads": np.int8(1), "providers": "CPUExecutionProvider"},
    ):
        with Generator(MODEL, **{"threads": 1, **options}) as generator:  # type: ignore[arg-type]
            assert generator.default_new_tokens(3) > 0
            assert type(generator.statistics().slots) is int
            tokens = generator.submit(np.array([1, 2, 3, 4, 5]), np.int64(6)).result(60)  # type: ignore[arg-type]
            assert tokens == plain.generate([1, 2, 3, 4, 5], 6)


def test_models_that_cannot_be_split_are_served_one_by_one() -> None:
    """The generator says why, and gives plain onnxruntime's tokens."""
    model = small_decoder("gpt2-decoder", layers=1)
    producer = next(node for node in model.graph.node if "logits" in node.output)
    producer.output[0] = "own"
    model.graph.node.append(helper.make_node("ReduceMean", ["own"], ["mean"], "over-tokens", axes=[1], keepdims=1))
    model.graph.node.append(helper.make_node("Sub", ["own", "mean"], ["logits"]))
    with Generator(model, threads=1) as generator:
        assert isinstance(loop_of(generator).engine, PlainDecoderEngine)
        assert "over-tokens" in generator.refused
        assert generator.submit([1, 2], 5).result(60) == PlainDecoder(model).generate_with_cache([1, 2], 5)


@pytest.mark.parametrize("name", ["gpt2-decoder", "llama-decoder-grouped"])
def test_prompts_up_to_the_number_of_positions(name: str) -> None:
    """The longest prompt has one token after it, the next shorter one two."""
    model = small_decoder(name, layers=1)
    plain = PlainDecoder(model)
    ids = [at % 61 for at in range(64)]
    with Generator(model, threads=1, chunk=7) as generator:
        for prompt, count in ((ids, 1), (ids[:-1], 2)):
            assert generator.submit(prompt, count).result(60) == plain.generate(prompt, count)


def test_two_generators_in_one_process(generator: Generator, plain: PlainDecoder) -> None:
    """Each of two generators, used by several threads at a time, has its own requests and slots."""
    other = small_decoder("gpt2-decoder", layers=1)
    expected = {0: plain, 1: PlainDecoder(other)}
    with Generator(other, threads=1) as second, ThreadPoolExecutor(6) as pool:
        generators = {0: generator, 1: second}
        pairs = [(which, [at, at + 1]) for at in range(6) for which in (0, 1)]
        found = pool.map(lambda pair: generators[pair[0]].submit(pair[1], 10).result(60), pairs)
        for (which, ids), tokens in zip(pairs, found, strict=True):
            assert tokens == expected[which].generate(ids, 10)
        wait_until_idle(second)
        assert loop_of(second).caches.reserved == 0


def test_scores_that_are_no_numbers_fail_their_request_only() -> None:
    """Keys and values of one request are NaN; the others of its batches, and those that get its slots, are not."""
    model = small_decoder("llama-decoder")
    plain = PlainDecoder(model)
    prompts = [*([at, at + 1, at + 2] for at in range(5)), *([at + 20] for at in range(5))]
    expected = [plain.generate(ids, 10) for ids in prompts]
    bad = min(set(range(61)).difference(*prompts, *expected))
    words = next(tensor for tensor in model.graph.initializer if [*tensor.dims] == [61, 32])
    rows = onnx.numpy_helper.to_array(words).copy()
    rows[bad] = np.nan
    words.CopyFrom(onnx.numpy_helper.from_array(rows, words.name))
    with Generator(model, threads=1, max_batch=4, kv_slots=80) as generator:
        for _ in range(2):
            streams = [generator.submit(ids, 10) for ids in prompts[:5]]
            wrong = generator.submit([3, bad, 4], 10)
            streams += [generator.submit(ids, 10) for ids in prompts[5:]]
            with pytest.raises(GenerationError, match="scores are not numbers"):
                wrong.result(60)
            assert [stream.result(60) for stream in streams] == expected


def test_many_requests_of_all_ends_leave_nothing(generator: Generator) -> None:
    """After requests that finish, stop, are cancelled or refused, memory and slots are as before."""

    def serve(rounds: int) -> None:
        for at in range(rounds):
            streams = [generator.submit([1 + at % 50, 2], 2 + n, stop_tokens=[n]) for n in range(12)]
            for stream in streams[::3]:
                stream.cancel()
            with generator.submit([1], 50) as left, contextlib.suppress(StopIteration):
                next(iter(left))
            with pytest.raises(OptionError):
                generator.submit([1], 1000)
            for stream in streams:
                stream.result(60)
        wait_until_idle(generator)

    finished = generator.statistics().finished_requests
    serve(10)
    gc.collect()
    before = psutil.Process().memory_info().rss
    serve(50)
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 3e6
    found = generator.statistics()
    assert found.finished_requests - finished == 60 * 13
    assert found.finished_requests == sum(found.finish_reasons.values())
    assert found.reserved_slots == 0


def test_a_generator_without_references_ends() -> None:
    """A stream keeps its generator; without both, the threads end and the memory is free."""
    before = set(threading.enumerate())
    generator = Generator(MODEL, threads=1, n_workers=2)
    threads, engine = set(threading.enumerate()) - before, weakref.ref(loop_of(generator).engine)
    stream = generator.submit([1], 50)
    del generator
    assert len(stream.result(60)) == 50
    assert len(threads) == 3
    assert all(thread.is_alive() for thread in threads)
    del stream
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    gc.collect()
    assert engine() is None


def test_a_stream_that_has_ended_needs_no_collector() -> None:
    """Reference counts alone free it, and a generator that nothing else refers to."""
    generator = Generator(MODEL, threads=1)
    stream = generator.submit([1], 2)
    assert len(stream.result(60)) == 2
    left = weakref.ref(stream), weakref.ref(generator)
    generator.close()  # its thread may still refer to the request
    gc.disable()
    try:
        del stream, generator
        assert [reference() for reference in left] == [None, None]
    finally:
        gc.enable()


def words(tokens: Sequence[int]) -> str:
    return "".join(f" w{token}" for token in tokens)


def test_text_in_and_out(tmp_path: Path, plain: PlainDecoder) -> None:
    """Files beside the model turn text into tokens and back, and name special tokens and those that end texts."""
    text, special, ended = (plain.generate(prompt, 9) for prompt in ([1, 2], [8, 9], [9, 10]))
    mark = next(token for token in special[1:] if token not in text)
    end = next(token for token in ended[1:] if token not in [*text, *special])
    onnx.save(MODEL, tmp_path / "model.onnx")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    tokenizer = Tokenizer(WordLevel({f"w{at}": at for at in range(61)}, unk_token="w0"))  # noqa: S106 - a word
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([f"w{mark}"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with Generator(tmp_path / "model.onnx", threads=1) as generator:
        stream = generator.submit("w1 w2", 9)
        pieces = [event.text for event in stream.events()]
        assert "".join(pieces) == stream.text == words(text)
        assert len([piece for piece in pieces if piece]) == 9
        stopped = generator.submit("w1 w2", 9, stop=f"w{text[2]}")
        assert stopped.result(60) == text[:3]
        assert (stopped.text, stopped.finish_reason) == (words(text[:2]) + " ", "stop")
        # A special token, which texts omit, ends the text as a stop string.
        stopped = generator.submit([8, 9], 9, stop=[f"w{mark}"])
        assert (stopped.result(60), stopped.finish_reason) == (special[: special.index(mark)], "stop")
        assert generator.submit([8, 9], 9).result(60) == special
        # The token of the configuration is a stop token unless others are given.
        assert generator.stop_tokens == {end}
        assert generator.submit([9, 10], 9).result(60) == ended[: ended.index(end)]
        assert generator.submit([9, 10], 9, stop_tokens=[]).result(60) == ended
        with pytest.raises(OptionError, match="prompt: expected text that UTF-8 can represent"):
            generator.submit("\ud800", 1)


class Panic(BaseException):
    """What the library tokenizers raises where its own code fails."""


class PanickingTokenizer:
    """A tokenizer that cannot decode anything."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        raise NotImplementedError

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return {}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        raise Panic(f"token {ids[0]}, {skip_special_tokens}")


def test_a_panic_of_the_tokenizer_refuses_a_prompt() -> None:
    """A prompt that cannot be decoded is refused, whatever the library raises."""
    with (
        Generator(MODEL, threads=1, tokenizer=PanickingTokenizer()) as generator,
        pytest.raises(OptionError, match="the tokenizer cannot decode it: token 5, True"),
    ):
        generator.submit([5], 2)
