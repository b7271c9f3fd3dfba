"""Generators whose callers are interrupted, fork, exit, or use the generator from callbacks: nothing waits for ever."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from chrion import Generator
from chrion.errors import GenerationError, OptionError
from chrion.generation import Stream
from chrion.generation.iteration import Outcome, Work
from decoder_support import PlainDecoder, small_decoder

MODEL = small_decoder("llama-decoder", context=4000)
LONG = 3000


def run_program(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, which ends with a traceback of all threads if it takes long."""
    head = "import faulthandler; faulthandler.dump_traceback_later(100, exit=True)\n"
    command = [sys.executable, "-W", "ignore", "-c", head + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)  # noqa: S603


def in_thread(work: Callable[[], object]) -> None:
    """Run a function in a thread, which has to end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("n_workers", [1, 2])
@pytest.mark.parametrize("end", ["cancel", "close", "length"])
@pytest.mark.parametrize("use", ["close", "cancel", "statistics in a thread", "submit"])
def test_a_callback_may_use_the_generator(use: str, end: str, n_workers: int) -> None:
    """Whichever thread calls it, a callback can close the generator, cancel streams, submit, and wait for threads."""
    generator = Generator(MODEL, threads=1, kv_slots=LONG + 10, n_workers=n_workers)
    stream, waiting = generator.submit([1], 2 if end == "length" else LONG), generator.submit([2], LONG)
    called = threading.Event()

    def callback(_: Stream) -> None:
        if use == "close":
            generator.close()
        elif use == "cancel":
            waiting.cancel()
            stream.cancel()
        elif use == "submit":
            with pytest.raises(RuntimeError) if end == "close" else pytest.MonkeyPatch.context():
                generator.submit([3], 2)
        else:
            in_thread(generator.statistics)
        called.set()

    stream.add_done_callback(callback)
    ends = {"cancel": stream.cancel, "close": generator.close, "length": stream.result}
    in_thread(ends[end])
    assert called.wait(60)
    in_thread(generator.close)
    assert stream.finish_reason == ("length" if end == "length" else "cancelled")
    assert waiting.finish_reason == "cancelled"
    assert generator.statistics().requests == 0


@pytest.mark.parametrize(
    "error", [SystemExit(1), asyncio.CancelledError(), KeyboardInterrupt(), ValueError()], ids=repr
)
def test_a_callback_that_raises_does_not_end_the_generator(error: BaseException) -> None:
    """Also an exception that is none of Exception is logged, and the other requests are served."""

    def failing(_: Stream) -> None:
        raise error

    with Generator(MODEL, threads=1) as generator:
        other = generator.submit([1], 200)
        generator.submit([1], 3).add_done_callback(failing)
        assert len(other.result(60)) == 200
        assert len(generator.submit([2], 2).result(60)) == 2


class Panic(BaseException):
    """What the library tokenizers raises where its own code fails."""


class PanickingTokenizer:
    """A tokenizer of words, which fails for one token in what it decodes."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        raise NotImplementedError

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return {}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        if self.bad in ids:
            raise Panic(f"token {self.bad}")
        return "".join(f" {token}" for token in ids)


def test_a_panic_of_the_tokenizer_fails_its_request_only() -> None:
    """A request whose text cannot be decoded fails; the others and later ones have their tokens."""
    plain = PlainDecoder(MODEL)
    texts = [plain.generate([start], 6) for start in range(8)]
    bad = next(text[3] for text in texts if sum(text[3] in other for other in texts) == 1)
    with Generator(MODEL, threads=1, tokenizer=PanickingTokenizer(bad)) as generator:
        with pytest.raises(OptionError, match=f"the tokenizer cannot decode it: token {bad}"):
            generator.submit([bad], 2)
        streams = [generator.submit([start], 6) for start in range(8) if start != bad]
        for stream, text in zip(streams, (t for start, t in enumerate(texts) if start != bad), strict=True):
            if bad in text:
                with pytest.raises(GenerationError, match=f"token {bad}"):
                    stream.result(60)
            else:
                assert stream.result(60) == text


INTERRUPTED = """
import random, signal, sys, threading, time
import onnx
from chrion import Generator
armed = [False]
def interrupt(*_):
    if armed[0]:
        raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
pick = random.Random(1)
with Generator(sys.argv[1], threads=1, max_batch=4) as generator:
    uses = {
        "submit": lambda: generator.submit([1, 2], 2),
        "result": lambda: generator.submit([1, 2], 8).result(60),
        "iterate": lambda: list(generator.submit([1, 2], 8)),
        "cancel": lambda: generator.submit([1, 2], 800).cancel(),
        "statistics": generator.statistics,
    }
    until, count = time.monotonic() + 2, 0
    while time.monotonic() < until:
        try:
            armed[0] = True
            signal.setitimer(signal.ITIMER_REAL, pick.uniform(2e-5, 3e-3))
            while True:
                uses[sys.argv[2]]()
        except KeyboardInterrupt:
            count += 1
        finally:
            armed[0] = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        found = []
        other = threading.Thread(target=lambda: found.append(generator.submit([3], 2).result(60)))
        other.start()
        other.join()
        assert len(found[0]) == 2
    assert count > 10
    while generator.statistics().requests:
        time.sleep(0.001)
    assert generator.statistics().reserved_slots == 0
"""


@pytest.mark.parametrize("use", ["submit", "result", "iterate", "cancel", "statistics"])
def test_an_interrupt_at_any_moment_leaves_the_generator_usable(use: str, tmp_path: Path) -> None:
    """After each of many interrupts of the main thread, another thread is served; in the end nothing is left."""
    onnx.save(MODEL, tmp_path / "model.onnx")
    done = run_program(INTERRUPTED, str(tmp_path / "model.onnx"), use)
    assert (done.returncode, done.stderr) == (0, "")


HANDLED = """
import random, signal, sys
from chrion import Generator
generator = Generator(sys.argv[1], threads=1, max_batch=4)
def terminate(*_):
    generator.close()
    raise SystemExit(7)
signal.signal(signal.SIGALRM, terminate)
signal.setitimer(signal.ITIMER_REAL, random.uniform(0.05, 0.2))
stream = generator.submit([1, 2], 300)
while True:
    generator.submit([1, 2], 2), generator.statistics(), list(stream)
"""


def test_a_signal_handler_may_close_the_generator(tmp_path: Path) -> None:
    """At any moment of a call in the main thread, a handler closes the generator and ends the process."""
    onnx.save(MODEL, tmp_path / "model.onnx")
    for _ in range(6):
        done = run_program(HANDLED, str(tmp_path / "model.onnx"))
        assert (done.returncode, done.stderr) == (7, "")


FORKED = """
import os, sys, threading
from chrion import Generator
with Generator(sys.argv[1], threads=1) as generator:
    stream = generator.submit([1, 2], 30)
    stream.result()
    reading = [threading.Thread(target=lambda: [list(stream) for _ in iter(int, 1)], daemon=True) for _ in range(3)]
    for thread in reading:
        thread.start()
    for _ in range(20):
        child = os.fork()
        if child == 0:
            assert len(stream.result(60)) == len(list(stream)) == 30
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_stream_that_has_ended_can_be_read_in_a_forked_child(tmp_path: Path) -> None:
    """Whatever other threads do with the stream in the moment of the fork."""
    onnx.save(MODEL, tmp_path / "model.onnx")
    done = run_program(FORKED, str(tmp_path / "model.onnx"))
    assert (done.returncode, done.stderr) == (0, "")


LEFT = """
import sys
from chrion import Generator
generator = Generator(sys.argv[1], threads=1, n_workers=int(sys.argv[2]))
stream = generator.submit([1] * 20_000, 5)
while not generator.statistics().reserved_slots:
    pass
"""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_long_iteration_ends_with_the_process(workers: str, tmp_path: Path) -> None:
    """The iteration of a prompt that takes longer than a process may wait is ended when the process exits."""
    sizes = {"hidden": 256, "inner": 688, "layers": 8, "heads": 8}
    onnx.save(small_decoder("llama-decoder", context=30_000, **sizes), tmp_path / "model.onnx")
    done = run_program(LEFT, str(tmp_path / "model.onnx"), workers)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_generator_without_references_ends() -> None:
    """A stream keeps its generator; without both, the threads end and the memory is free."""
    before = set(threading.enumerate())
    generator = Generator(MODEL, threads=1, n_workers=2)
    threads, engine = set(threading.enumerate()) - before, weakref.ref(generator._loop.engine)
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


def test_each_reader_has_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback names the frames of one reader, and does not keep those of others alive."""
    with Generator(MODEL, threads=1) as generator:
        monkeypatch.setattr(generator._loop.engine, "run", lambda _: 1 / 0)
        stream = generator.submit([1], 3)
        errors = []
        for _ in range(2):
            with pytest.raises(GenerationError, match="division by zero") as found:
                stream.result(60)
            errors.append(found.value)
    assert errors[0] is not errors[1]
    assert str(errors[0]) == str(errors[1])


def test_an_idle_worker_takes_a_request_that_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one batch runs, a request that arrives is not left until that batch returns."""
    with Generator(MODEL, threads=1, max_batch=1, n_workers=2) as generator:
        run, second = generator._loop.engine.run, threading.Event()

        def watched(batch: Sequence[Work]) -> list[Outcome]:
            if batch[0].past == 0:
                if len(batch[0].ids) == 1:
                    second.set()
                else:
                    assert second.wait(60)
            return run(batch)

        monkeypatch.setattr(generator._loop.engine, "run", watched)
        first = generator.submit([1, 2], 2)
        while not generator._loop.scheduler.in_flight:
            pass
        later = generator.submit([3], 2)
        plain = PlainDecoder(MODEL)
        assert first.result(60) == plain.generate([1, 2], 2)
        assert later.result(60) == plain.generate([3], 2)


@pytest.mark.parametrize(
    "options",
    [
        *({"chunk": np.int32(2)}, {"chunk": np.uint8(2)}, {"kv_slots": np.int16(30_000)}, {"kv_slots": np.uint8(200)}),
        *({"kv_bytes": np.uint16(60_000)}, {"max_batch": np.int8(3)}, {"threads": np.int8(1)}),
        {"n_workers": np.uint8(2)},
    ],
    ids=str,
)
def test_numbers_of_numpy_are_numbers(options: dict[str, Any]) -> None:
    """An option may have any type of integer; small types do not overflow."""
    plain = PlainDecoder(MODEL)
    with Generator(MODEL, **{"threads": 1, **options}) as generator:
        assert generator.default_new_tokens(3) > 0
        assert type(generator.statistics().slots) is int
        assert generator.submit([1, 2, 3, 4, 5], 6).result(60) == plain.generate([1, 2, 3, 4, 5], 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 5}, "model: expected a file"),
        ({"model": None}, "model: expected a file"),
        ({"model": bytearray(b"x")}, "model: expected a file"),
        ({"providers": 5}, "providers: expected a list of names, found 5"),
        ({"providers": [None]}, "providers: expected names, found None"),
        ({"providers": [("CPUExecutionProvider", {})]}, "providers: expected names, found"),
        ({"kv_bytes": None}, "kv_bytes: expected a whole number, found None"),
        ({"kv_slots": True}, "kv_slots: expected a whole number, found True"),
        ({"threads": 2**40}, "threads: 1099511627776 is above 1024"),
        ({"tokenizer": 5}, "tokenizer: expected a file or a Tokenizer, found 5"),
    ],
    ids=str,
)
def test_options_of_other_types_are_refused(options: dict[str, Any], message: str) -> None:
    """The message names the option, and what was expected and found."""
    arguments: dict[str, Any] = {"model": MODEL, "threads": 1, **options}
    with pytest.raises(OptionError, match=message):
        Generator(arguments.pop("model"), **arguments)


def test_a_provider_may_be_a_single_name() -> None:
    """One name is as good as a list of it."""
    with Generator(MODEL, threads=1, providers="CPUExecutionProvider") as generator:
        assert generator.submit([1], 3).result(60) == PlainDecoder(MODEL).generate([1], 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": 5}, "prompt: expected a list of token ids, found 5"),
        ({"prompt": None}, "prompt: expected a list of token ids, found None"),
        ({"prompt": {1, 2}}, "prompt: expected a list of token ids"),
        ({"prompt": b"ab"}, "prompt: expected a list of token ids"),
        ({"prompt": np.array(3)}, "prompt: expected a list of token ids"),
        ({"prompt": [True]}, "prompt: expected a whole number, found True"),
        ({"stop": 5}, "stop: expected a list of strings, found 5"),
        ({"stop_tokens": 5}, "stop_tokens: expected a list of token ids, found 5"),
        ({"stop_tokens": b"a"}, "stop_tokens: expected a list of token ids"),
    ],
    ids=str,
)
def test_requests_of_other_types_are_refused(arguments: dict[str, Any], message: str) -> None:
    """The message names the argument; nothing fails later in the middle of a text."""
    with Generator(MODEL, threads=1) as generator, pytest.raises(OptionError, match=message):
        generator.submit(**{"prompt": [1], "max_new_tokens": 2, **arguments})


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


@pytest.mark.parametrize("n_workers", [1, 2])
def test_an_engine_that_forgets_a_request_fails_its_batch(n_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests of that iteration end with an error, and later ones are served."""
    with Generator(MODEL, threads=1, n_workers=n_workers) as generator:
        run = generator._loop.engine.run
        monkeypatch.setattr(generator._loop.engine, "run", lambda batch: run(batch)[:-1])
        with pytest.raises(GenerationError, match="the iteration failed"):
            generator.submit([1], 3).result(60)
        monkeypatch.undo()
        assert len(generator.submit([1], 3).result(60)) == 3


def test_a_request_that_arrives_while_the_generator_fails_gets_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was accepted, so an empty text would look like a result."""
    with Generator(MODEL, threads=1) as generator:
        late: list[Stream] = []

        def fail(_: object) -> None:
            late.append(generator.submit([2], 3))
            raise ZeroDivisionError

        monkeypatch.setattr(generator._loop.scheduler, "complete", fail)
        with pytest.raises(GenerationError, match="the generator failed"):
            generator.submit([1], 3).result(60)
        in_thread(generator.close)
        with pytest.raises(GenerationError, match="the generator failed"):
            late[0].result(60)
        statistics = generator.statistics()
        assert statistics.finished_requests == statistics.finish_reasons["error"] == 2
