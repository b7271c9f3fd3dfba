"""Generators as programs use them: cancelled tasks, several of them at a time, and text of many kinds of tokenizers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from chrion import Generator
from chrion.errors import OptionError
from decoder_support import PlainDecoder, small_decoder

MODEL = small_decoder("llama-decoder")
BYTES = 256
TEXT = "Grüße, 世界! 👩‍🚀 naïve — עברית end. And more."


@pytest.fixture(scope="module")
def plain() -> PlainDecoder:
    return PlainDecoder(MODEL)


def wait_until_idle(generator: Generator) -> None:
    async def idle() -> None:
        while generator.statistics().requests:  # noqa: ASYNC110 - a generator has no event for it
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(idle(), 60))


def test_a_cancelled_task_ends_the_request_of_its_block() -> None:
    """A task that reads a stream in a ``with`` block is cancelled; the slots are free, and nothing waits on."""
    with Generator(MODEL, threads=1, kv_slots=60) as generator:
        streams: list[Any] = []

        async def read() -> None:
            with generator.submit([1], 60) as stream:
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
        assert streams[0].finish_reason in {"cancelled", "length"}
        assert generator._caches.reserved == 0


def test_readers_that_give_up_leave_nothing_behind() -> None:
    """Reads with a timeout of a request that waits for slots add nothing to the stream."""
    with Generator(MODEL, threads=1, kv_slots=60) as generator, generator._lock:  # no iteration begins
        stream = generator.submit([1], 60)

        async def poll() -> None:
            for _ in range(20):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(aiter(stream)), 0.001)

        asyncio.run(poll())
        assert stream._waiting == []


def test_a_stream_outlives_the_event_loop_that_waited_for_it(plain: PlainDecoder) -> None:
    """A loop that ends while a reader waits does not disturb the generator; the stream can be read elsewhere."""
    with Generator(MODEL, threads=1) as generator:
        with generator._lock:
            stream = generator.submit([1, 2], 20)
            loop = asyncio.new_event_loop()
            waiting = loop.create_task(stream.wait_async(0))
            loop.run_until_complete(asyncio.sleep(0))
            waiting.cancel()
            loop.close()
            stream._waiting.append((loop, asyncio.Future(loop=loop)))
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
        assert first._caches.reserved == second._caches.reserved == 0


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


@pytest.mark.parametrize("name", ["gpt2-decoder", "llama-decoder-grouped"])
def test_prompts_up_to_the_number_of_positions(name: str) -> None:
    """The longest prompt has one token after it; one more is refused, and so is a prompt without tokens."""
    model = small_decoder(name)
    plain = PlainDecoder(model)
    ids = [at % 61 for at in range(64)]
    with Generator(model, threads=1, chunk=7) as generator:
        assert generator.submit(ids, 1).result(60) == plain.generate(ids, 1)
        with pytest.raises(OptionError, match="positions for 64 tokens, the request needs 65"):
            generator.submit([*ids, 1], 1)
        with pytest.raises(OptionError, match="expected at least one token"):
            generator.submit([], 1)


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
    monkeypatch.setattr("chrion.generation.sampling.Sampler._choose", lambda *_: next(rest))
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
