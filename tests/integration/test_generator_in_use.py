"""Generators as programs use them: cancelled tasks, several of them at a time, and text of many kinds of tokenizers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from chrion import Generator
from chrion.cores import allowed_cores
from chrion.errors import GenerationError, OptionError
from chrion.generation import Stream
from decoder_support import PlainDecoder, small_decoder, wait_until_idle

MODEL = small_decoder("llama-decoder")
BYTES = 256
TEXT = "Grüße, 世界! 👩‍🚀 naïve — עברית end. And more."


@pytest.fixture(scope="module")
def plain() -> PlainDecoder:
    return PlainDecoder(MODEL)


def test_a_cancelled_task_ends_the_request_of_its_block() -> None:
    """A task that reads a long text in a ``with`` block is cancelled: its request, too, and its slots are free."""
    model = small_decoder("llama-decoder", context=4000)
    with Generator(model, threads=1, kv_slots=4000) as generator:
        streams: list[Any] = []

        async def read() -> None:
            with generator.submit([1], 3900) as stream:
                streams.append(stream)
                async for _ in stream:
                    pass

        async def cancelled() -> None:
            task = asyncio.create_task(read())
            while not streams:  # noqa: ASYNC110 - the task has no event for it
                await asyncio.sleep(0)
            await streams[0].wait_async(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancelled())
        wait_until_idle(generator)
        assert streams[0].finish_reason == "cancelled"
        assert generator._loop.caches.reserved == 0


def test_readers_that_give_up_leave_nothing_behind() -> None:
    """Reads with a timeout of a request that waits for slots add nothing to the stream."""
    with Generator(MODEL, threads=1, kv_slots=60) as generator, generator._loop.gate:  # no iteration begins
        stream = generator.submit([1], 60)

        async def poll() -> None:
            for _ in range(20):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(aiter(stream)), 0.001)

        asyncio.run(poll())
        assert stream._waiting == {}


def test_a_stream_outlives_the_event_loop_that_waited_for_it(plain: PlainDecoder) -> None:
    """A loop that ends while a reader waits does not disturb the generator; the stream can be read elsewhere."""
    with Generator(MODEL, threads=1) as generator:
        with generator._loop.gate:
            stream = generator.submit([1, 2], 20)
            loop = asyncio.new_event_loop()
            waiting = loop.create_task(stream.wait_async(0))
            loop.run_until_complete(asyncio.sleep(0))
            waiting.cancel()
            loop.close()
            assert len(stream._waiting) == 1  # the task could not end
        assert stream.result(60) == plain.generate([1, 2], 20)
        assert generator.submit([3], 5).result(60) == plain.generate([3], 5)


def test_two_generators_in_one_process(plain: PlainDecoder) -> None:
    """Each of two generators, used by several threads at a time, has its own requests and slots."""
    other = small_decoder("gpt2-decoder")
    expected = {0: plain, 1: PlainDecoder(other)}
    with Generator(MODEL, threads=1) as first, Generator(other, threads=1) as second, ThreadPoolExecutor(6) as pool:
        generators = {0: first, 1: second}
        pairs = [(which, [at, at + 1]) for at in range(6) for which in (0, 1)]
        found = pool.map(lambda pair: generators[pair[0]].submit(pair[1], 10).result(60), pairs)
        for (which, ids), tokens in zip(pairs, found, strict=True):
            assert tokens == expected[which].generate(ids, 10)
        assert first._loop.caches.reserved == second._loop.caches.reserved == 0


def test_two_processes_at_a_time(tmp_path: Path, plain: PlainDecoder) -> None:
    """Two processes generate with one file and give the same tokens."""
    path = tmp_path / "model.onnx"
    onnx.save(MODEL, path)
    command = [sys.executable, "-m", "chrion", "generate", str(path), "--tokens", "1,2,3", "--max-new-tokens", "20"]
    running = [
        subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)  # noqa: S603
        for _ in range(2)
    ]
    for process in running:
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert json.loads(printed)["tokens"] == plain.generate([1, 2, 3], 20)


@pytest.mark.parametrize("options", [{}, {"n_workers": 2}, {"policy": "request"}], ids=str)
def test_closing_among_many_threads(options: dict[str, Any]) -> None:
    """Threads submit, read and cancel texts while another one closes the generator: all of them end."""
    with Generator(MODEL, threads=1, max_batch=3, kv_slots=150, **options) as generator:
        streams: list[Stream] = []

        def use(seed: int) -> None:
            pick = random.Random(seed)
            while True:
                try:
                    streams.append(stream := generator.submit([seed, 2], 20))
                except RuntimeError:
                    return
                pick.choice([stream.cancel, lambda: next(iter(stream), None), lambda: list(stream)])()

        with ThreadPoolExecutor(8) as pool:
            using = [pool.submit(use, seed) for seed in range(8)]
            while len(streams) < 100 and not any(one.done() for one in using):
                time.sleep(0.001)
            generator.close()
            for one in using:
                one.result(60)
        assert {stream.finish_reason for stream in streams} <= {"length", "cancelled"}
        assert generator.statistics().requests == generator._loop.caches.reserved == 0


@pytest.mark.parametrize("options", ["", ", n_workers=2", ", policy='request'"])
def test_a_process_may_exit_while_texts_are_generated(tmp_path: Path, options: str) -> None:
    """Without ``close``, the process exits as it would without a generator, and what waits for a text ends."""
    onnx.save(small_decoder("llama-decoder", context=20_000), tmp_path / "model.onnx")
    program = f"""
import atexit, sys
atexit.register(lambda: print(*(stream.finish_reason for stream in streams)))  # runs after the hook of chrion
from chrion import Generator
generator = Generator(sys.argv[1], threads=1{options})
streams = [generator.submit([1, at], 15_000) for at in range(5)]
next(iter(streams[0]))
"""
    command = [sys.executable, "-c", program, str(tmp_path / "model.onnx")]
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.split() == ["cancelled"] * 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_refuses_instead_of_waiting(tmp_path: Path) -> None:
    """Requests of the parent fail in the child and go on in the parent; the child opens a generator of its own."""
    onnx.save(MODEL, tmp_path / "model.onnx")
    program = """
import os, sys
from chrion import Generator
from chrion.errors import GenerationError
with Generator(sys.argv[1], threads=1) as generator:
    with generator._loop.gate:
        stream = generator.submit([1, 2], 20)
        child = os.fork()
    if child == 0:
        for use in (stream.result, lambda: list(stream), lambda: generator.submit([1], 1)):
            try:
                use()
            except (GenerationError, RuntimeError) as error:
                assert "forked" in str(error)
            else:
                raise AssertionError
        stream.cancel()
        with Generator(sys.argv[1], threads=1) as own:
            assert len(own.submit([1, 2], 20).result(60)) == 20
        os._exit(0)  # a normal exit would wait for onnxruntime's threads of the parent
    else:
        assert os.waitpid(child, 0)[1] == 0
        assert len(stream.result(60)) == 20
"""
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "model.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)  # noqa: S603
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def neighbours() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start processes that occupy all cores; end them after the test."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in allowed_cores()]
    try:
        yield busy
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_beside_busy_neighbours_in_two_processes(
    tmp_path: Path, plain: PlainDecoder, neighbours: list[subprocess.Popen[bytes]]
) -> None:
    """While other processes occupy all cores, two processes give their requests the tokens that each has alone."""
    path = tmp_path / "model.onnx"
    onnx.save(MODEL, path)
    program = """
import json, sys
from chrion import Generator, Sampling
with Generator(sys.argv[1], max_batch=3, threads=2) as generator:
    greedy = [generator.submit([at, at + 1], 6 + at) for at in range(6)]
    how = [Sampling(temperature=1.0, seed=at) for at in range(3)]
    drawn = [generator.submit([1, 2], 12, sampling=one) for one in how]
    print(json.dumps([stream.result(100) for stream in [*greedy, *drawn]]))
"""
    command = [sys.executable, "-c", program, str(path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]  # noqa: S603
    found = [json.loads(process.communicate(timeout=120)[0]) for process in running]
    assert all(process.poll() is None for process in neighbours)
    assert found[0] == found[1]
    assert found[0][:6] == [plain.generate([at, at + 1], 6 + at) for at in range(6)]
    assert len({tuple(tokens) for tokens in found[0][6:]}) == 3


@pytest.mark.parametrize("name", ["llama-decoder", "llama-decoder-grouped"])
def test_scores_that_are_no_numbers_fail_their_request_only(name: str) -> None:
    """Keys and values of one request are NaN; the others of its batches, and those that get its slots, are not."""
    model = small_decoder(name)
    plain = PlainDecoder(model)
    prompts = [*([at, at + 1, at + 2] for at in range(5)), *([at + 20] for at in range(5))]
    expected = [plain.generate(ids, 10) for ids in prompts]
    bad = min(set(range(61)).difference(*prompts, *expected))
    words = next(tensor for tensor in model.graph.initializer if [*tensor.dims] == [61, 32])
    rows = onnx.numpy_helper.to_array(words).copy()
    rows[bad] = np.nan
    words.CopyFrom(onnx.numpy_helper.from_array(rows, words.name))
    with Generator(model, threads=1, max_batch=4, kv_slots=80) as generator:
        for _ in range(3):
            streams = [generator.submit(ids, 10) for ids in prompts[:5]]
            wrong = generator.submit([3, bad, 4], 10)
            streams += [generator.submit(ids, 10) for ids in prompts[5:]]
            with pytest.raises(GenerationError, match="scores are not numbers"):
                wrong.result(60)
            assert [stream.result(60) for stream in streams] == expected
        assert generator._loop.caches.reserved == 0


def test_thousands_of_requests_of_all_ends_leave_nothing() -> None:
    """After requests that finish, stop, fail, are cancelled or refused, memory and slots are as before."""
    with Generator(MODEL, threads=1, max_batch=8, kv_slots=200) as generator:

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

        serve(40)
        gc.collect()
        before = psutil.Process().memory_info().rss
        serve(160)
        gc.collect()
        assert psutil.Process().memory_info().rss - before < 8e6
        assert generator.statistics().finished_requests == 200 * 13
        assert generator.statistics().reserved_slots == generator._loop.caches.reserved == 0
        assert len(generator._loop.scheduler.pool) == len(generator._loop.scheduler.in_flight) == 0


@pytest.mark.parametrize("name", ["gpt2-decoder", "llama-decoder-grouped"])
def test_prompts_up_to_the_number_of_positions(name: str) -> None:
    """The longest prompt has one token after it, the next shorter one two; one more is refused."""
    model = small_decoder(name)
    plain = PlainDecoder(model)
    ids = [at % 61 for at in range(64)]
    with Generator(model, threads=1, chunk=7) as generator:
        for prompt, count in ((ids, 1), (ids[:-1], 2)):
            assert generator.submit(prompt, count).result(60) == plain.generate(prompt, count)
        with pytest.raises(OptionError, match="positions for 64 tokens, the request needs 65"):
            generator.submit([*ids, 1], 1)


def byte_level() -> Tokenizer:
    """Return a tokenizer of single bytes as GPT-2's, which writes each byte as a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({token: at for at, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Return a tokenizer of single bytes as those of SentencePiece models write unknown characters."""
    vocabulary = {f"<0x{value:02X}>": value for value in range(BYTES)}
    tokenizer = Tokenizer(BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.fixture(params=[byte_level, byte_fallback])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    request.param().save(str(path))
    return path


def speaking(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a generator choose the tokens of the text, one byte after another; return them."""
    tokens = generator.encode(TEXT)
    assert len(tokens) == len(TEXT.encode())
    rest = iter(tokens)
    monkeypatch.setattr("chrion.generation.sampling.Sampler.choose", lambda *_: next(rest))
    return tokens


def test_characters_of_several_tokens_arrive_whole(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No piece of a streamed text has a part of a character, and the pieces are the text."""
    model = small_decoder("llama-decoder", vocabulary=BYTES, context=256)
    with Generator(model, threads=1, tokenizer=tokenizer) as generator:
        tokens = speaking(generator, monkeypatch)
        stream = generator.submit("é", len(tokens))
        pieces = [event.text for event in stream.events()]
        assert "".join(pieces) == stream.text == TEXT
        assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
        assert [*stream] == tokens


def test_a_stop_string_in_the_last_text_is_the_reason_of_the_end(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a text completes a stop string: the character that its last tokens did not complete."""
    model = small_decoder("llama-decoder", vocabulary=BYTES, context=256)
    with Generator(model, threads=1, tokenizer=tokenizer) as generator:
        cut = next(at for at, byte in enumerate(TEXT.encode()) if byte > 127) + 1
        speaking(generator, monkeypatch)
        stream = generator.submit("é", cut, stop=["\N{REPLACEMENT CHARACTER}"])
        assert len(stream.result(60)) == cut
        assert stream.text == TEXT.encode()[: cut - 1].decode()
        assert stream.finish_reason == "stop"


@pytest.mark.parametrize("stop", ["世界!", "👩‍🚀", "end. And", "—"])
def test_stop_strings_of_several_tokens_are_not_released(
    tokenizer: Path, stop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text ends before the stop string, of which no part was released."""
    model = small_decoder("llama-decoder", vocabulary=BYTES, context=256)
    with Generator(model, threads=1, tokenizer=tokenizer) as generator:
        tokens = speaking(generator, monkeypatch)
        stream = generator.submit("é", len(tokens), stop=["never", stop])
        pieces = [event.text for event in stream.events()]
        assert "".join(pieces) == TEXT[: TEXT.index(stop)]
        assert stream.finish_reason == "stop"
