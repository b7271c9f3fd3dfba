"""Generation with the token-wise operators on a second device and attention on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from decoding.on_device import WAYS, DeviceDecoder
from decoding.repeated_iterations import Shape, selective_run

from chrion import Generator
from chrion.devices import Device
from chrion.generation.session_threads import DeviceSession
from decoder_support import PlainDecoder, small_decoder

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11], [12], [13, 14, 15]]


@pytest.mark.parametrize("n_workers", [1, 2])
@pytest.mark.parametrize("name", ["gpt2-decoder", "llama-decoder", "llama-decoder-grouped"])
def test_greedy_tokens_equal_those_of_the_cpu(name: str, n_workers: int, device: Device) -> None:
    """Requests in one batch, or in two that alternate between the devices, have plain onnxruntime's tokens."""
    model = small_decoder(name)
    plain = PlainDecoder(model)
    with Generator(model, threads=1, max_batch=3, n_workers=n_workers, providers=[device.provider]) as generator:
        assert generator.refused == ""
        streams = [generator.submit(ids, 8) for ids in PROMPTS]
        assert [stream.result(300) for stream in streams] == [plain.generate(ids, 8) for ids in PROMPTS]


def test_the_token_wise_operators_run_on_the_device(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All products with weights run on the device's provider, and no session of the device has attention."""
    opened: list[DeviceSession] = []

    class Recorded(DeviceSession):
        def __init__(self, model: bytes, options: ort.SessionOptions, providers: list[str]) -> None:
            options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / str(len(opened)))
            super().__init__(model, options, providers)
            opened.append(self)

    monkeypatch.setattr("chrion.generation.session_threads.DeviceSession", Recorded)
    with Generator(small_decoder("llama-decoder"), threads=1, providers=[device.provider]) as generator:
        assert len(generator.submit([1, 2, 3], 3).result(300)) == 3
    events = [event for session in opened for event in json.loads(Path(session.end_profiling()).read_text())]
    run = {(event["args"]["op_name"], event["args"]["provider"]) for event in events if event["cat"] == "Node"}
    assert ("MatMul", device.provider) in run
    assert {provider for _, provider in run} == {device.provider}
    assert "Softmax" not in {kind for kind, _ in run}


def test_logits_of_the_device_are_close(device: Device) -> None:
    """The scores of the first token differ by rounding only, so that equal tokens are no accident."""
    model = small_decoder("llama-decoder")
    session = ort.InferenceSession(model.SerializeToString(), providers=[device.provider])
    feed = {
        "input_ids": np.array([[1, 2, 3]]),
        "attention_mask": np.ones((1, 3), np.int64),
        "position_ids": np.arange(3)[None],
    }
    caches = [argument.name for argument in session.get_inputs() if argument.name not in feed]
    empty = dict.fromkeys(caches, np.zeros((1, 1, 0, 16), np.float32))
    (found,) = session.run(["logits"], feed | empty)
    np.testing.assert_allclose(found[0], PlainDecoder(model).scores([1, 2, 3]), atol=1e-3)


def test_keys_and_values_on_the_device_give_the_scores_of_those_in_host_memory(device: Device) -> None:
    """The benchmark's two ways to serve a batch compute the same, and two batches in flight are timed."""
    decoder = DeviceDecoder(small_decoder("llama-decoder"), device.provider, threads=1)
    shapes = [Shape(9, 1)] * 3
    found = selective_run(decoder.engine, shapes)()
    assert isinstance(found, list)
    np.testing.assert_allclose(decoder.on_device(shapes)(), np.stack(found), atol=1e-4)
    assert [times.way for times in decoder.time([2], 9, 1, WAYS)] == list(WAYS)
