"""The comparison with onnxruntime-genai: its arithmetic, what it refuses, and the prompts of both sides."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from decoding import against_genai
from decoding.against_genai import FORMS, build_endless_decoder, compare, draw_prompts, genai_config

from chrion.zoo.cached_decoder import LlamaDecoderSpec
from seams.commands import replace_clock

NEW = 3


class Clock:
    """A clock that generators move."""

    def __init__(self) -> None:
        self.now_s = 0.0
        #: Who generated, in this order, and pauses.
        self.order: list[str] = []

    def perf_counter(self) -> float:
        """Return the time."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Pause long enough for spinning threads to fall asleep."""
        assert seconds > 0.1
        self.order.append("pause")
        self.now_s += seconds


class MadeGenerator:
    """A generator that takes a second for each request, and answers with its prompt's first tokens."""

    signature = SimpleNamespace(vocabulary=50)

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def submit(self, prompt: list[int], new: int) -> Any:
        """Return a stream."""
        self._clock.order.append("own")
        self._clock.now_s += 1.0
        return SimpleNamespace(result=lambda: prompt[:new])


class MadeGenai:
    """An onnxruntime-genai that takes some seconds for a batch, and may change a token."""

    def __init__(self, clock: Clock, changed: tuple[int, int] | None = None, new: int = NEW) -> None:
        self._clock, self._changed, self._new = clock, changed, new

    def generate(
        self, requests: int, lengths: tuple[int, int], seed: int, vocabulary: int
    ) -> tuple[float, list[list[int]]]:
        """Return seconds and tokens."""
        self._clock.order.append("genai")
        tokens = draw_prompts(requests, lengths[0], seed, vocabulary)[:, : self._new].tolist()
        if self._changed:
            tokens[self._changed[0]][self._changed[1]] += 1
        return 4.0 + seed, tokens


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of the module."""
    made = Clock()
    replace_clock(monkeypatch, against_genai, made)
    return made


def test_ratios_are_times_of_genai_over_own_ones(clock: Clock) -> None:
    """Two requests take two seconds; the first round does not count, and each is first in every second round.

    Both run alone, after a pause that is not timed.
    """
    found = compare(MadeGenerator(clock), MadeGenai(clock), 2, (5, NEW), 3)  # type: ignore[arg-type]
    assert found == pytest.approx([5 / 2, 6 / 2, 7 / 2])
    assert clock.order == ["pause", "genai", "pause", "own", "own", "pause", "own", "own", "pause", "genai"] * 2


@pytest.mark.parametrize(("changed", "message"), [((0, 0), "request 0: token 0"), ((1, 2), "request 1: token 2")])
def test_every_token_of_every_request_is_compared(clock: Clock, changed: tuple[int, int], message: str) -> None:
    """Also the last token of the last request."""
    with pytest.raises(ValueError, match=message):
        compare(MadeGenerator(clock), MadeGenai(clock, changed), 2, (5, NEW), 1)  # type: ignore[arg-type]


def test_all_tokens_have_to_be_generated(clock: Clock) -> None:
    """Fewer tokens take less time, and would not be the same work."""
    with pytest.raises(ValueError, match="request 0: expected 3 tokens, found 3; genai: 2"):
        compare(MadeGenerator(clock), MadeGenai(clock, new=2), 2, (5, NEW), 1)  # type: ignore[arg-type]


def test_forms_have_the_same_weights_and_threads() -> None:
    """Only GroupQueryAttention lets past and present share a buffer; neither form prefers the end token."""
    spec = LlamaDecoderSpec(layers=1, vocabulary=64)
    heads = {}
    for form in FORMS:
        own = replace(spec, attention=form)
        model = build_endless_decoder(own)
        tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        heads[form] = tensors["head/W"], tensors["block0/query/W"]
        assert not tensors["head/W"][:, -1].any()
        assert tensors["head/W"][:, :-1].any(axis=0).all()
        config = genai_config(own, 3)
        assert config["model"]["decoder"]["session_options"]["intra_op_num_threads"] == 3
        assert config["search"]["past_present_share_buffer"] == (form == "grouped")
        assert config["model"]["eos_token_id"] == 63
    for plain, grouped in zip(*heads.values(), strict=True):
        np.testing.assert_array_equal(plain, grouped)


def test_prompts_do_not_have_the_padding_token() -> None:
    """onnxruntime-genai would hide it from attention."""
    ids = draw_prompts(100, 20, 0, 8)
    assert set(ids.ravel().tolist()) == set(range(7))
