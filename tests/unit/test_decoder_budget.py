"""Memory of published decoders, computed from their sizes."""

from __future__ import annotations

import pytest
from decoder_budget import DECODERS, ITEM, Decoder

from chrion import load, zoo
from chrion.generation.rewrites.decoder import decoder_signature
from chrion.zoo.cached_decoder import GptDecoderSpec, LlamaDecoderSpec

#: The numbers of weights that are published with the models.
PUBLISHED = {
    "GPT-2": 124_439_808,
    "GPT-2 XL": 1_557_611_200,
    "Llama 3.2 1B": 1_235_814_400,
    "Llama 2 7B": 6_738_415_616,
    "Llama 3 8B": 8_030_261_248,
}


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)
def test_weights_are_those_of_the_publication(decoder: Decoder) -> None:
    """The number of weights follows from the sizes."""
    assert decoder.weights == PUBLISHED[decoder.name]


@pytest.mark.parametrize("name", ["gpt2-decoder", "llama-decoder"])
def test_slots_are_those_of_the_generator(name: str) -> None:
    """The bytes of a slot are what a Generator reserves for a token, for the same sizes in single precision."""
    small = {"layers": 1, "vocabulary": 64}
    spec = LlamaDecoderSpec(**small) if name == "llama-decoder" else GptDecoderSpec(**small)
    groups = spec.kv_heads if isinstance(spec, LlamaDecoderSpec) else spec.heads
    sizes = Decoder(name, spec.layers, spec.hidden, spec.heads, groups, spec.inner, spec.vocabulary, gated=False)
    signature = decoder_signature(load(zoo.build(name, small)))
    assert sizes.slot_bytes == signature.slot_bytes // 4 * ITEM


def test_requests_are_limited_by_the_memory_that_has_their_keys_and_values() -> None:
    """With keys and values on the host, the batch is limited by the host, or by the values of its tokens."""
    decoder = DECODERS[-1]
    cache, device = decoder.slot_bytes * 1024, decoder.weights * ITEM + 10 * decoder.token_bytes
    assert decoder.requests(device, 1024, 100 * cache) == (0, 10)
    assert decoder.requests(device, 1024, 3 * cache) == (0, 3)
    assert decoder.requests(device + 10 * cache, 1024, 0) == (10, 0)
    assert decoder.requests(decoder.weights, 1024, 100 * cache) == (0, 0)
