"""The thread of a generator, with an engine without a model: whoever ends or fails, all others are served."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import pytest

from chrion.errors import GenerationError
from chrion.generation import Stream
from chrion.generation.cache import CacheManager
from chrion.generation.iteration import Outcome, Work
from chrion.generation.scheduling import IterationScheduler
from chrion.generation.text import TextBuilder
from scripted_loop import LONG, Run, ScriptedEngine, Served, counted, serving, wait_for
from seams.generation import refuse_thread


def in_thread(work: Callable[[], object]) -> None:
    """Run a function in a thread, which has to end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("options", [{}, {"n_workers": 3}, {"policy": "request"}, {"chunk": 2}, {"max_batch": 1}])
def test_every_request_has_its_own_tokens(options: dict[str, Any]) -> None:
    """The text of each prompt goes on after its last token, whatever the batches are; all of it is counted."""
    with serving(**options) as served:
        wanted = [([at, at + 9, 3 * at], 1 + at % 7) for at in range(20)]
        streams = [served.submit(prompt, count) for prompt, count in wanted]
        assert [stream.result(60) for stream in streams] == [counted(prompt[-1], n) for prompt, n in wanted]
        served.check_idle()
        counts = served.loop.counts
        assert (counts.finished_requests, counts.finish_reasons["length"]) == (20, 20)
        assert counts.generated_tokens == sum(count for _, count in wanted)
        assert counts.iterations <= counts.iteration_requests


def test_slots_are_free_between_two_iterations() -> None:
    """A request cancelled during an iteration keeps its slots until that one returns; the next one gives them away."""
    begun, steps = SimpleQueue[list[int]](), SimpleQueue[None]()

    def stepped(run: Run, batch: Sequence[Work]) -> list[Outcome]:
        begun.put([work.cache.capacity for work in batch])
        steps.get(timeout=60)
        return run(batch)

    with serving(ScriptedEngine(stepped), n_slots=50) as served:
        long, waiting = served.submit([1], 50), served.submit([2, 3], 10)  # of 50 and 11 slots
        for _ in range(3):
            assert begun.get(timeout=60) == [50]
            steps.put(None)
        assert begun.get(timeout=60) == [50]
        assert (served.loop.requests, served.loop.waiting) == (2, 1)
        long.cancel()
        assert long.finish_reason == "cancelled"
        assert served.loop.scheduler.reserved == 50  # the iteration still reads and writes them
        steps.put(None)
        assert begun.get(timeout=60) == [11]
        assert served.loop.scheduler.reserved == served.loop.caches.reserved == 11
        for _ in range(10):
            steps.put(None)
        assert waiting.result(60) == counted(3, 10)
        assert list(long) == counted(1, 3)


def test_fixed_batches_end_together() -> None:
    """With the policy "request", a request that needs one iteration ends with the one that needs five."""
    with serving(policy="request") as served:
        seen: list[int] = []
        with served.loop.gate:  # both of them in one batch
            short, long = served.submit([1], 1), served.submit([4], 5)
        short.add_done_callback(lambda _: seen.append(served.loop.counts.iterations))
        assert (short.result(60), long.result(60)) == (counted(1, 1), counted(4, 5))
        served.check_idle()
        assert seen == [5]
        assert (served.loop.counts.iterations, served.loop.counts.iteration_requests) == (5, 10)


def test_a_cache_without_memory_fails_its_request_only() -> None:
    """If the memory of one request cannot be mapped, the other requests of its first batch go on."""
    with serving(n_slots=1 << 60) as served:
        with served.loop.gate:  # all of them before the first iteration
            first, good, last = (served.submit([1, 2], new) for new in (1 << 57, 6, 1 << 58))
        for bad, count in ((first, (1 << 57) + 1), (last, (1 << 58) + 1)):
            with pytest.raises(GenerationError, match=f"no memory for the keys and values of {count} tokens"):
                bad.result(60)
        assert good.result(60) == counted(2, 6)


def test_a_stream_ends_before_its_memory_is_given_back() -> None:
    """That takes a fifth of a millisecond, for which its reader need not wait."""
    found: SimpleQueue[tuple[str, int]] = SimpleQueue()

    class NotedCaches(CacheManager):
        def give_back(self) -> None:
            found.put((stream.finish_reason, self.reserved))
            super().give_back()

    with serving(caches=NotedCaches) as served:
        with served.loop.gate:
            stream = served.submit([1, 2], 3)
        assert found.get(timeout=60) == ("length", 0)


def test_an_error_in_an_iteration_fails_its_request_only() -> None:
    """One request fails in the middle of its text; the others of the batch go on."""

    def fail(run: Run, batch: Sequence[Work]) -> list[Outcome]:
        wrong = [work.cache.capacity == 33 and work.past > 10 for work in batch]  # only one request has that many
        return [GenerationError("made up") if bad else own for bad, own in zip(wrong, run(batch), strict=True)]

    with serving(ScriptedEngine(fail)) as served:
        streams = [served.submit([at], 12) for at in range(3)]
        wrong = served.submit([1, 2, 3, 4], 30)
        assert [stream.result(60) for stream in streams] == [counted(at, 12) for at in range(3)]
        reader = iter(wrong)
        assert [next(reader) for _ in range(8)] == counted(4, 8)
        errors = []
        for read in (lambda: next(reader), wrong.result):
            with pytest.raises(GenerationError, match="made up, after 11 tokens") as found:
                read()
            errors.append(found.value)
        assert errors[0] is not errors[1]  # whose traceback names the frames of one reader
        assert wrong.finish_reason == "error"


@pytest.mark.parametrize(("at", "hint"), [(1, ""), (2, ""), (2, "use less memory")])
def test_only_later_failures_without_a_hint_are_about_the_context(at: int, hint: str) -> None:
    """If the context is unknown, the hint needs tokens that were processed; a hint of the engine remains."""
    iterations = itertools.count(1)

    def fail(run: Run, batch: Sequence[Work]) -> list[Outcome]:
        return [GenerationError("it broke", hint=hint)] if next(iterations) == at else run(batch)

    with serving(ScriptedEngine(fail)) as served, pytest.raises(GenerationError) as failed:
        served.submit([1] * 10, 5).result(60)
    about = (failed.value.message, failed.value.hint)
    if at == 2 and not hint:
        assert about[0] == "it broke, after 10 tokens"
        assert "max_position_embeddings" in about[1]
    else:
        assert about == ("it broke", hint)


@pytest.mark.parametrize("n_workers", [1, 2])
def test_an_error_of_a_whole_iteration_fails_its_requests(n_workers: int) -> None:
    """If the engine itself fails, or forgets a request, those of the batch end, and later ones are served."""
    engine = ScriptedEngine()
    with serving(engine, n_workers=n_workers) as served:
        for wrong, message in ((lambda _, __: 1 / 0, "division by zero"), (lambda run, batch: run(batch)[:-1], "0 ou")):
            engine.around = wrong
            with pytest.raises(GenerationError, match=f"the iteration failed: .*{message}"):
                served.submit([1], 3).result(60)
            engine.around = None
            assert served.submit([1], 3).result(60) == counted(1, 3)


def test_an_unexpected_error_ends_all_requests() -> None:
    """If the loop fails, no caller waits for ever: requests fail, also those that arrive meanwhile."""
    late: list[Stream] = []

    class FailingScheduler(IterationScheduler):
        def complete(self, _: object) -> list[int]:
            late.append(served.submit([2], 3))
            raise ZeroDivisionError("made up")

    with serving(scheduler=FailingScheduler) as served:
        with served.loop.gate:  # all of them before the first iteration ends
            streams = [served.submit([1, 2], 30) for _ in range(3)]
        for stream in streams:
            with pytest.raises(GenerationError, match="the generator failed: made up"):
                stream.result(60)
            stream.cancel()
        in_thread(served.loop.close)
        with pytest.raises(GenerationError, match="the generator failed"):
            late[0].result(60)
        with pytest.raises(RuntimeError, match="the generator failed: made up"):
            served.submit([1], 1)
        counts = served.loop.counts
        assert counts.finished_requests == counts.finish_reasons["error"] == 4
        served.loop.scheduler = IterationScheduler(1, 1)  # the one that failed keeps its requests


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_a_thread_that_the_system_refuses_leaves_none(refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one of the threads cannot start, opening the loop fails, and the others end."""
    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        refuse_thread(patch, refused)
        with pytest.raises(RuntimeError, match="can't start new thread"), serving(n_workers=2):
            pass
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("n_workers", [1, 2])
@pytest.mark.parametrize("end", ["cancel", "close", "length"])
@pytest.mark.parametrize("use", ["close", "cancel", "read in a thread", "submit"])
def test_a_callback_may_use_the_loop(use: str, end: str, n_workers: int) -> None:
    """Whichever thread calls it, a callback can close the loop, cancel streams, submit, and wait for threads."""
    with serving(n_slots=LONG + 10, n_workers=n_workers) as served:
        stream, waiting = served.submit([1], 2 if end == "length" else LONG), served.submit([2], LONG)
        called = threading.Event()

        def callback(_: Stream) -> None:
            if use == "close":
                served.loop.close()
            elif use == "cancel":
                waiting.cancel()
                stream.cancel()
            elif use == "submit":
                with pytest.raises(RuntimeError) if end == "close" else nullcontext():
                    served.submit([3], 2)
            else:
                in_thread(lambda: served.loop.requests)
            called.set()

        stream.add_done_callback(callback)
        ends = {"cancel": stream.cancel, "close": served.loop.close, "length": stream.result}
        in_thread(ends[end])
        assert called.wait(60)
        in_thread(served.loop.close)
        assert stream.finish_reason == ("length" if end == "length" else "cancelled")
        assert waiting.finish_reason == "cancelled"


def test_a_callback_that_raises_does_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    """Also an exception that is none of Exception is logged, and the other requests are served."""
    with serving() as served:
        other = served.submit([1], 500)
        for error in (SystemExit(1), asyncio.CancelledError(), KeyboardInterrupt(), ValueError()):

            def failing(_: Stream, error: BaseException = error) -> None:
                raise error

            served.submit([1], 3).add_done_callback(failing)
        assert len(other.result(60)) == 500
        served.check_idle()
    assert caplog.text.count("a callback of a stream failed") == 4


def test_an_idle_worker_takes_a_request_that_arrives() -> None:
    """While one batch runs, a request that arrives is not left until that batch returns."""
    second = threading.Event()

    def watch(run: Run, batch: Sequence[Work]) -> list[Outcome]:
        if batch[0].past == 0:
            if len(batch[0].ids) == 1:
                second.set()
            else:
                assert second.wait(60)
        return run(batch)

    with serving(ScriptedEngine(watch), max_batch=1, n_workers=2) as served:
        first = served.submit([1, 2], 2)
        wait_for(lambda: served.loop.scheduler.in_flight)
        later = served.submit([3], 2)
        assert (first.result(60), later.result(60)) == (counted(2, 2), counted(3, 2))


@pytest.mark.parametrize("options", [{}, {"n_workers": 2}, {"policy": "request"}], ids=str)
def test_closing_among_many_threads(options: dict[str, Any]) -> None:
    """Threads submit, read and cancel texts while another one closes the loop: all of them end."""
    with serving(n_slots=150, max_batch=3, **options) as served:
        streams: list[Stream] = []

        def use(seed: int) -> None:
            pick = random.Random(seed)
            while True:
                try:
                    streams.append(stream := served.submit([seed, 2], 20))
                except RuntimeError:
                    return
                pick.choice([stream.cancel, lambda: next(iter(stream), None), lambda: list(stream)])()

        with ThreadPoolExecutor(8) as pool:
            using = [pool.submit(use, seed) for seed in range(8)]
            wait_for(lambda: len(streams) >= 60 or any(one.done() for one in using))
            served.loop.close()
            for one in using:
                one.result(60)
        assert {stream.finish_reason for stream in streams} <= {"length", "cancelled"}


def test_a_cancelled_task_ends_the_request_of_its_block() -> None:
    """A task that reads a long text in a ``with`` block is cancelled: its request, too, and its slots are free."""

    async def read(served: Served, streams: list[Stream]) -> None:
        with served.submit([1], LONG) as stream:
            streams.append(stream)
            async for _ in stream:
                pass

    async def cancel(served: Served) -> Stream:
        streams: list[Stream] = []
        task = asyncio.create_task(read(served, streams))
        while not streams:  # noqa: ASYNC110 - the task has no event for it
            await asyncio.sleep(0)
        await streams[0].wait_async(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return streams[0]

    with serving() as served:
        assert asyncio.run(cancel(served)).finish_reason == "cancelled"
        served.check_idle()


class Panic(BaseException):
    """What the library tokenizers raises where its own code fails."""


class PanickingTokenizer:
    """A tokenizer of words, which fails for one token in what it decodes."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        if self.bad in ids:
            raise Panic(f"token {self.bad}")
        return "".join(f" {token}" for token in ids)


def test_a_panic_of_the_tokenizer_fails_its_request_only() -> None:
    """A request whose text cannot be decoded fails, also in its last text; the others have their tokens."""

    class FailingEnd(TextBuilder):
        def finish(self) -> str:
            raise Panic("the end")

    tokenizer = PanickingTokenizer(bad=24)
    with serving() as served:
        streams = [served.submit([start], 6, TextBuilder(tokenizer, (), [start])) for start in (10, 20, 30)]
        wrong = served.submit([50], 3, FailingEnd(tokenizer, (), [50]))
        for stream, message in ((streams[1], "token 24"), (wrong, "no end of the text: the end")):
            with pytest.raises(GenerationError, match=message):
                stream.result(60)
        assert [streams[at].result(60) for at in (0, 2)] == [counted(10, 6), counted(30, 6)]
        assert streams[0].text == " 11 12 13 14 15 16"


class ByteTokenizer:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(ids).decode(errors="replace")


def test_a_stop_string_in_the_last_text_is_the_reason_of_the_end() -> None:
    """The end of a text completes a stop string: the character that its last token did not complete."""
    content = "naïve — end".encode()
    engine = ScriptedEngine(follow=lambda work: content[work.past + len(work.ids)])
    with serving(engine) as served:
        for stop, count, text, reason in (
            ("\N{REPLACEMENT CHARACTER}", 2, "a", "stop"),
            ("—", 11, "aïve ", "stop"),
            ("never", 13, "aïve — end", "length"),
        ):
            stream = served.submit([content[0]], count, TextBuilder(ByteTokenizer(), [stop], [content[0]]))
            pieces = [event.text for event in stream.events()]
            assert ("".join(pieces), stream.finish_reason) == (text, reason)
            assert stream.text == text
            assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
