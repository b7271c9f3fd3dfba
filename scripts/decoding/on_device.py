"""Decode iterations on an accelerator, with keys and values in host memory and with all of them on the device.

Every request has one new token after equally many others, so that a padded batch has no pads. The ways:

- *device*: one session of the whole model. Keys and values stay on the device; scores return to host memory.
- *host*: selective batching. Token-wise operators run on the device, and attention on the cores of the CPU.
- *host, two batches*: the same with two batches in flight, one on the device during the attention of the other one.

Within a memory budget, keys and values on the device limit the batch; in host memory they do not.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import onnx
import onnxruntime as ort

import chrion
from chrion.devices import CPU_PROVIDER, Device
from chrion.generation.open_engine import open_engine
from chrion.generation.rewrites.decoder import LOGITS, DecoderSignature
from chrion.generation.session_threads import open_for_threads
from chrion.graph.model import TensorInfo
from decoding.repeated_iterations import Shape, padded_feed, selective_run, time_in_turn

DEVICE, HOST, TWO_BATCHES = "device", "host", "host, two batches"
WAYS = (DEVICE, HOST, TWO_BATCHES)
_FLOAT = "tensor(float)"
#: Iterations of each of two batches that are timed together.
_TOGETHER = 4


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """The time of an iteration in one way."""

    way: str
    #: Requests of one batch.
    batch: int
    #: The median; with two batches, that of two iterations side by side divided by two.
    iteration_ms: float

    @property
    def tokens_per_s(self) -> float:
        """The tokens of all requests in a second."""
        return self.batch / self.iteration_ms * 1e3


class DeviceDecoder:
    """A decoder whose iterations run on a device in all three ways.

    Args:
        model: The decoder.
        provider: The execution provider of the device.
        threads: The threads of the CPU.
    """

    def __init__(self, model: onnx.ModelProto, provider: str, threads: int) -> None:
        self._device = Device(provider)
        self._providers = [provider] if provider == CPU_PROVIDER else [provider, CPU_PROVIDER]
        #: Its engine with keys and values in host memory.
        self.engine = open_engine(chrion.load(model), threads, self._providers)
        if self.engine.refused:
            raise ValueError(self.engine.refused)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = open_for_threads("the decoder", model.SerializeToString(), options, self._providers)
        #: Bytes of the weights.
        self.weight_bytes = model.ByteSize()

    @property
    def signature(self) -> DecoderSignature:
        """The inputs and outputs of the decoder."""
        return self.engine.signature

    def most_requests(self, budget: int, tokens: int) -> int:
        """Return how many requests fit on the device with their keys and values.

        In an iteration both are there: those of all tokens before the new one (``past``), and those of all tokens
        (``present``).

        Args:
            budget: Bytes of device memory; values other than weights, keys and values are not counted.
            tokens: The tokens of a request before the new one.
        """
        return max(budget - self.weight_bytes, 0) // (self.signature.slot_bytes * (tokens + tokens + 1))

    def time(self, batches: Sequence[int], past: int, rounds: int, ways: Sequence[str]) -> list[DeviceTimes]:
        """Measure iterations in turn.

        Args:
            batches: Requests of a batch.
            past: The tokens before the new one.
            rounds: Rounds.
            ways: Some of ``device``, ``host`` and ``host, two batches``.
        """
        found = []
        for batch in batches:
            shapes = [Shape(past, 1)] * batch
            with ThreadPoolExecutor(2) as pool:
                runs: dict[str, Callable[[], object]] = {}
                if DEVICE in ways:
                    runs[DEVICE] = self.on_device(shapes)
                if HOST in ways:
                    runs[HOST] = selective_run(self.engine, shapes)
                if TWO_BATCHES in ways:
                    runs[TWO_BATCHES] = _both(pool, [selective_run(self.engine, shapes) for _ in range(2)])
                times = time_in_turn(runs, rounds)
            for way, own in times.items():
                iterations = 2 * _TOGETHER if way == TWO_BATCHES else 1
                found.append(DeviceTimes(way, batch, statistics.median(own) / iterations))
        return found

    def on_device(self, shapes: Sequence[Shape]) -> Callable[[], object]:
        """Return an iteration of the whole model whose keys and values are on the device."""
        binding = self._session.io_binding()
        inputs = []
        for name, array in padded_feed(self.signature, shapes).items():
            value = ort.OrtValue.ortvalue_from_numpy(array)
            if name in self.signature.past:
                value = self._device.to_device(TensorInfo(name, _FLOAT, array.shape), array)
            with self._device.exclusive():
                binding.bind_ortvalue_input(name, value)
            inputs.append((array, value))
        return functools.partial(self._run_bound, binding, inputs)

    def _run_bound(self, binding: ort.IOBinding, inputs: object) -> object:
        """Return the scores of bound inputs, which live as long as this call can be repeated."""
        del inputs
        with self._device.exclusive():
            binding.clear_binding_outputs()
            binding.bind_output(LOGITS)
            for name in self.signature.present:
                binding.bind_output(name, self._device.name if self._device.supports(_FLOAT) else "cpu")
            self._session.run_with_iobinding(binding)
            return binding.get_outputs()[0].numpy()[:, -1]


def _both(pool: ThreadPoolExecutor, runs: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Return a function that repeats two iterations side by side and waits for both."""

    def repeat(run: Callable[[], object]) -> None:
        for _ in itertools.repeat(None, _TOGETHER):
            run()

    def run() -> None:
        for running in [pool.submit(repeat, one) for one in runs]:
            running.result()

    return run
