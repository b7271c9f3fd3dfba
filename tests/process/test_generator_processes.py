"""Generators in processes of their own: interrupts, exits, forks and neighbours; nothing waits for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

from chrion.machine.cores import allowed_cores
from decoder_support import PlainDecoder, small_decoder

MODEL = small_decoder("llama-decoder", context=4000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a decoder."""
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    onnx.save(MODEL, path)
    return path


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    """Run Python code in a process of its own, which ends with a traceback of all threads if it takes long."""
    head = "import faulthandler; faulthandler.dump_traceback_later(100, exit=True)\n"
    command = [sys.executable, "-W", "ignore", "-c", head + program, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # noqa: S603


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    """Wait for a process, which must end with a code and without an error; return what it has printed."""
    printed, errors = process.communicate(timeout=150)
    assert (process.returncode, errors) == (code, "")
    return printed


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
    uses = (
        lambda: generator.submit([1, 2], 2),
        lambda: generator.submit([1, 2], 8).result(60),
        lambda: list(generator.submit([1, 2], 8)),
        lambda: generator.submit([1, 2], 800).cancel(),
        generator.statistics,
    )
    for use in uses:
        until, count = time.monotonic() + 1, 0
        while time.monotonic() < until or count < 10:
            try:
                armed[0] = True
                signal.setitimer(signal.ITIMER_REAL, pick.uniform(2e-5, 3e-3))
                while True:
                    use()
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
        while generator.statistics().requests:
            time.sleep(0.001)
        assert generator.statistics().reserved_slots == 0
"""


def test_an_interrupt_at_any_moment_leaves_the_generator_usable(model: Path) -> None:
    """After each of many interrupts of every call, another thread is served; in the end nothing is left."""
    finish(start(INTERRUPTED, model))


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


def test_a_signal_handler_may_close_the_generator(model: Path) -> None:
    """At any moment of a call in the main thread, a handler closes the generator and ends the process."""
    for _ in range(3):
        finish(start(HANDLED, model), 7)


LEFT = """
import atexit, json, sys
atexit.register(lambda: print(*(stream.finish_reason for stream in streams)))  # runs after the hook of chrion
from chrion import Generator
generator = Generator(sys.argv[1], threads=1, **json.loads(sys.argv[2]))
streams = [generator.submit([1] * int(sys.argv[3]), 10_000) for _ in range(5)]
while not getattr(generator.statistics(), sys.argv[4]):
    pass
"""


@pytest.mark.parametrize("options", [{}, {"n_workers": 2}, {"policy": "request"}], ids=str)
def test_a_process_may_exit_while_texts_are_generated(tmp_path: Path, options: dict[str, object]) -> None:
    """Without ``close``, the process exits as it would without a generator, and what waits for a text ends."""
    onnx.save(small_decoder("llama-decoder", context=20_000), tmp_path / "model.onnx")
    assert (
        finish(start(LEFT, tmp_path / "model.onnx", json.dumps(options), 2, "generated_tokens")).split()
        == ["cancelled"] * 5
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_a_long_iteration_ends_with_the_process(workers: int, tmp_path: Path) -> None:
    """The iteration of a prompt that takes longer than a process may wait is ended when the process exits."""
    sizes = {"hidden": 256, "inner": 688, "layers": 8, "heads": 8}
    onnx.save(small_decoder("llama-decoder", context=30_000, **sizes), tmp_path / "model.onnx")
    options = json.dumps({"n_workers": workers})
    found = finish(start(LEFT, tmp_path / "model.onnx", options, 20_000, "reserved_slots"))
    assert found.split() == ["cancelled"] * 5


FORKED = """
import os, sys, threading
from chrion import Generator
from chrion.errors import GenerationError
with Generator(sys.argv[1], threads=1) as generator:
    running, stream = generator.submit([1, 2], 3900), generator.submit([1, 2], 30)
    next(iter(running))
    child = os.fork()
    if child == 0:
        for use in (running.result, lambda: list(running), lambda: generator.submit([1], 1)):
            try:
                use()
            except (GenerationError, RuntimeError) as error:
                assert "forked" in str(error)
            else:
                raise AssertionError
        running.cancel()
        with Generator(sys.argv[1], threads=1) as own:
            assert len(own.submit([1, 2], 20).result(60)) == 20
        os._exit(0)  # a normal exit would wait for onnxruntime's threads of the parent
    assert os.waitpid(child, 0)[1] == 0
    assert len(running.result(60)) == 3900
    stream.result(60)
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
def test_a_forked_child_refuses_instead_of_waiting(model: Path) -> None:
    """Requests of the parent fail in the child, which opens its own generator; streams that have ended are readable."""
    finish(start(FORKED, model))


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


SEVERAL = """
import json, sys
from chrion import Generator, Sampling
with Generator(sys.argv[1], max_batch=3, threads=2) as generator:
    greedy = [generator.submit([at, at + 1], 6 + at) for at in range(6)]
    how = [Sampling(temperature=1.0, seed=at) for at in range(3)]
    drawn = [generator.submit([1, 2], 12, sampling=one) for one in how]
    print(json.dumps([stream.result(100) for stream in [*greedy, *drawn]]))
"""


def test_beside_busy_neighbours_in_two_processes(model: Path, neighbours: list[subprocess.Popen[bytes]]) -> None:
    """While other processes occupy all cores, two processes give their requests the tokens that each has alone."""
    plain = PlainDecoder(MODEL)
    running = [start(SEVERAL, model) for _ in range(2)]
    found = [json.loads(finish(process)) for process in running]
    assert all(process.poll() is None for process in neighbours)
    assert found[0] == found[1]
    assert found[0][:6] == [plain.generate([at, at + 1], 6 + at) for at in range(6)]
    assert len({tuple(tokens) for tokens in found[0][6:]}) == 3
