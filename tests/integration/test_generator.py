"""The generator: streams of tokens for many callers, equal to plain onnxruntime's."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import pickle
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from chrion import Generator, Sampling
from chrion.errors import ContextLengthError, GenerationError, OptionError, ProviderError
from chrion.generation.cache import RequestCache
from chrion.generation.engine import PlainEngine
from chrion.generation.iteration import Outcome, Work
from chrion.generation.text import TextBuilder
from decoder_support import FORMS, PlainDecoder, log_softmax, small_decoder, wait_until_idle

MODEL = small_decoder("llama-decoder")
#: The same with positions for texts that do not end while a test waits for something else.
LONG = small_decoder("llama-decoder", context=4000)
VARIANTS: list[dict[str, Any]] = [
    {},
    {"max_batch": 1},
    {"max_batch": 3, "n_workers": 2},
    {"max_batch": 3, "policy": "request"},
    {"chunk": 2},
    {"kv_slots": 40},
]


@pytest.fixture(scope="module")
def plain() -> PlainDecoder:
    return PlainDecoder(MODEL)


@pytest.fixture
def generator() -> Iterator[Generator]:
    """A generator, which has released everything at the end."""
    with Generator(MODEL, threads=1, max_batch=4) as opened:
        yield opened
        wait_until_idle(opened)
    assert opened._loop.caches.reserved == 0


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    pick = np.random.default_rng(seed)
    return [[int(t) for t in pick.integers(0, 61, pick.integers(1, 12))] for _ in range(count)]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_greedy_tokens_equal_plain_onnxruntime(variant: dict[str, Any], plain: PlainDecoder) -> None:
    """Every request of a busy generator has its own tokens, whatever the batches are."""
    with Generator(MODEL, threads=1, **variant) as generator:
        streams = [generator.submit(ids, 3 + at % 9) for at, ids in enumerate(prompts(16))]
        for at, (ids, stream) in enumerate(zip(prompts(16), streams, strict=True)):
            assert list(stream) == plain.generate(ids, 3 + at % 9)
            assert stream.finish_reason == "length"
        assert generator.statistics().generated_tokens == sum(3 + at % 9 for at in range(16))


@pytest.mark.parametrize("name", FORMS)
def test_all_forms_of_attention_generate_alike(name: str) -> None:
    """Models with caches that are appended to, and with shared buffers, generate what plain onnxruntime does."""
    model = small_decoder(name)
    plain = PlainDecoder(model)
    with Generator(model, threads=1) as generator:
        streams = [generator.submit(ids, 10) for ids in prompts(5)]
        assert [stream.result(60) for stream in streams] == [plain.generate(ids, 10) for ids in prompts(5)]


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


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_a_thread_that_the_system_refuses_leaves_none(refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one of the threads of a generator cannot start, opening it fails, and the others end."""
    start, begun = threading.Thread.start, itertools.count()

    def refusing(thread: threading.Thread) -> None:
        if next(begun) == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refusing)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            Generator(MODEL, threads=1, n_workers=2)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


def test_callbacks_follow_the_end(generator: Generator, caplog: pytest.LogCaptureFixture) -> None:
    """A callback is called once, after the end or at once; one that fails is logged, and the generator goes on."""
    ended: list[Any] = []
    stream = generator.submit([1, 2], 20)
    stream.add_done_callback(lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    stream.add_done_callback(ended.append)
    assert len(stream.result(60)) == 20
    while not ended:  # callbacks follow the readers
        threading.Event().wait(0.001)
    stream.add_done_callback(ended.append)
    assert ended == [stream, stream]
    assert "a callback of a stream failed" in caplog.text


def test_fixed_batches_end_together_and_keep_their_rows(plain: PlainDecoder) -> None:
    """With the policy "request", a request that needs one iteration ends with the one that needs five."""
    with Generator(MODEL, threads=1, policy="request") as generator:
        seen: list[int] = []
        with generator._loop.gate:  # both of them in one batch
            short, long = generator.submit([1, 2, 3], 1), generator.submit([4, 5, 6], 5)
        short.add_done_callback(lambda _: seen.append(generator.statistics().iterations))
        assert short.result(60) == plain.generate([1, 2, 3], 1)
        assert long.result(60) == plain.generate([4, 5, 6], 5)
        found = generator.statistics()
    assert seen == [5]
    assert (found.iterations, found.iteration_requests) == (5, 10)


def test_streams_in_an_event_loop(generator: Generator, plain: PlainDecoder) -> None:
    """Async iteration gives the same tokens, for several requests at a time."""

    async def read(ids: Sequence[int]) -> list[int]:
        return [token async for token in generator.submit(ids, 8)]

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(read(ids) for ids in prompts(4)))

    assert asyncio.run(all_of_them()) == [plain.generate(ids, 8) for ids in prompts(4)]


def test_cancelled_requests_free_their_slots(plain: PlainDecoder) -> None:
    """A request that fills all slots is cancelled; the one that waited for them runs."""
    with Generator(MODEL, threads=1, kv_slots=50) as generator:
        long = generator.submit([1], 50)
        waiting = generator.submit([2, 3], 10)
        next(iter(long))
        long.cancel()
        assert waiting.result(60) == plain.generate([2, 3], 10)
        assert long.finish_reason == "cancelled"
        assert len(list(long)) < 50


def test_slots_are_free_between_two_iterations(plain: PlainDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request cancelled during an iteration keeps its slots until that one returns; the next one gives them away."""
    with Generator(MODEL, threads=1, kv_slots=50) as generator:
        run, begun, steps = generator._loop.engine.run, SimpleQueue[list[int]](), SimpleQueue[None]()

        def stepped(batch: Sequence[Work]) -> list[Outcome]:
            begun.put([work.cache.capacity for work in batch])
            steps.get(timeout=60)
            return run(batch)

        monkeypatch.setattr(generator._loop.engine, "run", stepped)
        long, waiting = generator.submit([1], 50), generator.submit([2, 3], 10)  # of 50 and 11 slots
        for _ in range(3):
            assert begun.get(timeout=60) == [50]
            steps.put(None)
        assert begun.get(timeout=60) == [50]
        long.cancel()
        assert generator.statistics().reserved_slots == 50  # the iteration still reads and writes them
        steps.put(None)
        assert begun.get(timeout=60) == [11]
        assert generator.statistics().reserved_slots == generator._loop.caches.reserved == 11
        for _ in range(10):
            steps.put(None)
        assert waiting.result(60) == plain.generate([2, 3], 10)
        assert list(long) == plain.generate([1], 3)


def test_a_block_cancels_its_stream() -> None:
    """Leaving the block of a stream ends its request."""
    with Generator(LONG, threads=1) as generator:
        with generator.submit([1], 3900) as stream:
            next(iter(stream))
        assert stream.finish_reason == "cancelled"


def test_closing_cancels_what_runs() -> None:
    """A stream in the middle of a long text ends, and later requests are refused."""
    with Generator(LONG, threads=1) as generator:
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
    ("prompt", "count", "message"),
    [
        ([], 5, "expected at least one token"),
        ([61], 5, "tokens of 0 to 60, found 61"),
        ([-1], 5, "found -1"),
        ("text", 5, "needs a tokenizer"),
        ([1], 0, "max_new_tokens: expected at least one token, found 0"),
        ([1], 2.5, "max_new_tokens: expected a whole number, found 2.5"),
        ([1.5], 3, "prompt: expected a whole number, found 1.5"),
        ([[1, 2]], 3, r"prompt: expected a whole number, found \[1, 2\]"),
        ([1] * 65, 1, r"positions for 64 tokens, the request needs 65 \(the prompt alone has 65 tokens, shorten it"),
        ([1] * 64, 2, "generate at most 1"),
        ([1] * 60, 6, "generate at most 5"),
    ],
)
def test_wrong_requests_are_refused(generator: Generator, prompt: str | list[int], count: int, message: str) -> None:
    """The message says what was expected, and the next request is served."""
    with pytest.raises(OptionError, match=message):
        generator.submit(prompt, count)
    assert len(generator.submit(np.array([1, 2]), np.int64(3)).result(60)) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": [5]}, "stop: expected strings, found 5"),
        ({"stop_tokens": ["x"]}, "stop_tokens: expected a whole number, found 'x'"),
        ({"sampling": {"seed": 1}}, "sampling: expected a Sampling, found {'seed': 1}"),
        ({"sampling": Sampling(logit_bias={61: 1.0})}, "logit_bias: expected tokens of 0 to 60, found 61"),
        ({"logprobs": -1}, "logprobs: -1 is below 0"),
        ({"logprobs": True + 0.5}, "logprobs: expected a whole number, found 1.5"),
        ({"min_new_tokens": 3}, "min_new_tokens: expected 0 to 2, found 3"),
    ],
)
def test_arguments_of_other_types_are_refused(generator: Generator, options: dict[str, Any], message: str) -> None:
    """The message names the argument; nothing fails later in the middle of a text."""
    with pytest.raises(OptionError, match=message):
        generator.submit([1], 2, **options)


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


def test_requests_that_never_fit_are_refused() -> None:
    """A request of more slots than there are does not block others."""
    with Generator(MODEL, threads=1, kv_slots=10) as generator:
        for prompt, new, about in ((6, 6, "generate at most 5"), (11, 1, "the prompt alone has 11 tokens")):
            with pytest.raises(ContextLengthError, match=f"needs 11 slots.*{about}") as refused:
                generator.submit([1] * prompt, new)
            error = pickle.loads(pickle.dumps(refused.value))  # noqa: S301 - as between processes
            assert (error.limit, error.prompt_tokens, error.new_tokens) == (10, prompt, new)
        assert len(generator.submit([1] * 6, 5).result(60)) == 5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kv_slots": 10.5}, OptionError, "kv_slots: expected a whole number, found 10.5"),
        ({"kv_slots": 0}, OptionError, "kv_slots: 0 is below 1"),
        ({"kv_bytes": "1GB"}, OptionError, "kv_bytes: expected a whole number, found '1GB'"),
        ({"threads": 0}, OptionError, "threads: 0 is below 1"),
        ({"max_batch": 0}, OptionError, "max_batch: 0 is below 1"),
        ({"providers": ["Unknown"]}, ProviderError, "unknown accelerator 'Unknown'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """A provider that does not exist is not replaced by the CPU without a word."""
    with pytest.raises(error, match=message):
        Generator(MODEL, **{"threads": 1, **options})


def test_default_numbers_of_tokens() -> None:
    """Requests share the slots equally; a longer prompt is followed by half a share, or by what is left."""
    with Generator(MODEL, threads=1, max_batch=4, kv_slots=80) as generator:
        found = [generator.default_new_tokens(prompt) for prompt in (1, 3, 20, 40, 60, 64)]
    assert found == [20, 18, 10, 10, 5, 1]


def test_a_cache_without_memory_fails_its_request_only(plain: PlainDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the memory of one request cannot be mapped, the other requests of its first batch go on."""
    with Generator(MODEL, threads=1, max_batch=4) as generator:
        get = generator._loop.caches.get

        def refusing(request: int, capacity: int) -> RequestCache:
            if capacity in {10, 11}:
                raise OSError("made up")
            return get(request, capacity)

        monkeypatch.setattr(generator._loop.caches, "get", refusing)
        with generator._loop.gate:  # all of them before the first iteration
            prompts = ([5, 6], 10), ([1, 2], 6), ([3, 4], 9)
            first, good, last = (generator.submit(prompt, new) for prompt, new in prompts)
        for bad, count in ((first, 11), (last, 10)):
            with pytest.raises(GenerationError, match=f"no memory for the keys and values of {count} tokens: made up"):
                bad.result(60)
        assert good.result(60) == plain.generate([1, 2], 6)
        wait_until_idle(generator)
        assert generator.statistics().reserved_slots == 0


def test_a_stream_ends_before_its_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes a fifth of a millisecond, for which its reader need not wait."""
    with Generator(MODEL, threads=1) as generator:
        caches = generator._loop.caches
        found: SimpleQueue[tuple[str, int]] = SimpleQueue()
        monkeypatch.setattr(caches, "give_back", lambda: found.put((stream.finish_reason, caches.reserved)))
        with generator._loop.gate:
            stream = generator.submit([1, 2], 3)
        assert found.get(timeout=60) == ("length", 0)


def test_an_error_in_an_iteration_fails_its_request_only(
    generator: Generator, plain: PlainDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request fails in the middle of its text; the others of the batch go on."""
    run, capacity = generator._loop.engine.run, 33  # only one request has this capacity

    def failing(batch: Sequence[Work]) -> list[Outcome]:
        wrong = [work.cache.capacity == capacity and work.past > 10 for work in batch]
        return [GenerationError("made up") if bad else own for bad, own in zip(wrong, run(batch), strict=True)]

    monkeypatch.setattr(generator._loop.engine, "run", failing)
    streams = [generator.submit(ids, 12) for ids in prompts(3)]
    wrong = generator.submit([1, 2, 3, 4], 30)
    assert [stream.result(60) for stream in streams] == [plain.generate(ids, 12) for ids in prompts(3)]
    with pytest.raises(GenerationError, match="made up"):
        wrong.result(60)
    with pytest.raises(GenerationError, match="made up"):
        list(wrong)
    assert wrong.finish_reason == "error"


def test_an_error_of_a_whole_iteration_fails_its_requests(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the engine itself fails, the requests of the batch end, and the generator serves later ones."""

    def failing(_: Sequence[Work]) -> list[Outcome]:
        raise MemoryError("made up")

    with monkeypatch.context() as patch:
        patch.setattr(generator._loop.engine, "run", failing)
        with pytest.raises(GenerationError, match="made up"):
            generator.submit([1], 3).result(60)
    assert len(generator.submit([1], 3).result(60)) == 3


def test_an_error_at_the_end_of_a_text_fails_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that fails when the last text is decoded fails its request, and later ones are served."""
    with Generator(write_model(tmp_path), threads=1) as generator:
        with monkeypatch.context() as patch:
            patch.setattr(TextBuilder, "finish", lambda _: 1 / 0)
            with pytest.raises(GenerationError, match="division by zero"):
                generator.submit("w1", 3).result(60)
        assert len(generator.submit("w1", 3).result(60)) == 3


def test_an_unexpected_error_ends_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the loop of a generator fails, no caller waits for ever: requests fail, and new ones are refused."""
    with Generator(MODEL, threads=1) as generator:
        monkeypatch.setattr(generator._loop.scheduler, "complete", lambda _: 1 / 0)
        with generator._loop.gate:  # all of them before the first iteration ends
            streams = [generator.submit([1, 2], 30) for _ in range(3)]
        for stream in streams:
            with pytest.raises(GenerationError, match="division by zero"):
                stream.result(60)
            stream.cancel()
        assert generator.statistics().requests == 0
        with pytest.raises(RuntimeError, match="the generator failed: division by zero"):
            generator.submit([1], 1)


def test_models_that_cannot_be_split_are_served_one_by_one() -> None:
    """The generator says why, and gives plain onnxruntime's tokens."""
    model = small_decoder("gpt2-decoder")
    producer = next(node for node in model.graph.node if "logits" in node.output)
    producer.output[0] = "own"
    model.graph.node.append(helper.make_node("ReduceMean", ["own"], ["mean"], "over-tokens", axes=[1], keepdims=1))
    model.graph.node.append(helper.make_node("Sub", ["own", "mean"], ["logits"]))
    with Generator(model, threads=1) as generator:
        assert isinstance(generator._loop.engine, PlainEngine)
        assert "over-tokens" in generator.refused
        assert generator.submit([1, 2], 5).result(60) == PlainDecoder(model).generate_with_cache([1, 2], 5)


def write_model(folder: Path) -> Path:
    """Write a decoder with a tokenizer of words and its configuration, as transformers does."""
    path = folder / "model.onnx"
    onnx.save(MODEL, path)
    tokenizer = Tokenizer(WordLevel({f"w{at}": at for at in range(61)}, unk_token="w0"))  # noqa: S106 - a word
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return path


def test_text_in_and_out(tmp_path: Path, plain: PlainDecoder) -> None:
    """A tokenizer beside the model turns text into tokens and back, piece by piece."""
    expected = plain.generate([1, 2, 3], 9)
    text = "".join(f" w{token}" for token in expected)
    with Generator(write_model(tmp_path), threads=1) as generator:
        stream = generator.submit("w1 w2 w3", 9)
        pieces = [event.text for event in stream.events()]
        assert "".join(pieces) == stream.text == text
        assert len([piece for piece in pieces if piece]) == 9
        stopped = generator.submit("w1 w2 w3", 9, stop=f"w{expected[2]}")
        stopped.result(60)
        assert stopped.text == text[: text.find(f"w{expected[2]}")]
        assert stopped.finish_reason == "stop"


def test_special_tokens_are_stop_strings(tmp_path: Path, plain: PlainDecoder) -> None:
    """A special token ends the text as a stop string, though texts omit it."""
    expected = plain.generate([1, 2, 3], 9)
    at = next(at for at in range(1, 9) if expected[at] not in expected[:at])
    path = write_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens([f"w{expected[at]}"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with Generator(path, threads=1) as generator:
        stream = generator.submit([1, 2, 3], 9, stop=[f"w{expected[at]}"])
        assert stream.result(60) == expected[:at]
        assert stream.finish_reason == "stop"


def test_the_end_token_of_the_configuration_ends_texts(tmp_path: Path, plain: PlainDecoder) -> None:
    """``eos_token_id`` of generation_config.json is a stop token unless others are given."""
    expected = plain.generate([1, 2, 3], 9)
    path = write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": expected[4]}))
    with Generator(path, threads=1) as generator:
        assert generator.stop_tokens == {expected[4]}
        assert generator.submit([1, 2, 3], 9).result(60) == expected[: expected.index(expected[4])]
        assert generator.submit([1, 2, 3], 9, stop_tokens=[]).result(60) == expected
