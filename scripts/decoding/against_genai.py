"""Tokens per second beside onnxruntime-genai, on the same file, with as many threads.

The decoders have plain operators or GroupQueryAttention. With the latter, onnxruntime-genai appends to a buffer that is
both past and present, as with the models that its own builder writes; a concatenation of plain operators excludes that.
"""

from __future__ import annotations

import functools
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import onnx

from chrion.generation import Generator
from chrion.zoo.cached_decoder import LlamaDecoderSpec, build_llama_decoder

Array = np.ndarray[Any, Any]
#: The time in seconds, and the tokens of each request.
Generated = tuple[float, list[list[int]]]
_WORKER = Path(__file__).with_name("genai_worker.py")
#: The weights of the logits.
_HEAD = "head/W"
#: Before each generation, nothing runs for this time: the threads of onnxruntime-genai's session spin for about 40 ms
#: after the last one, on cores that the other process needs.
_SETTLE_S = 0.2
#: Forms of the same decoder: plain operators, and GroupQueryAttention.
FORMS = ("plain", "grouped")


def build_endless_decoder(spec: LlamaDecoderSpec) -> onnx.ModelProto:
    """Build a decoder that never chooses its last token, the end token of onnxruntime-genai: its logit is always 0."""
    model = build_llama_decoder(spec)
    (head,) = (tensor for tensor in model.graph.initializer if tensor.name == _HEAD)
    weights = onnx.numpy_helper.to_array(head).copy()
    weights[:, -1] = 0.0
    head.CopyFrom(onnx.numpy_helper.from_array(weights, _HEAD))
    return model


class Genai:
    """onnxruntime-genai in a process of its own.

    Args:
        python: An interpreter whose environment has it.
        folder: An empty folder, for the model.
        model: The decoder.
        spec: Its parameters.
        threads: The threads of an operator.

    Raises:
        RuntimeError: It cannot load the model.
    """

    def __init__(self, python: str, folder: Path, model: onnx.ModelProto, spec: LlamaDecoderSpec, threads: int) -> None:
        onnx.save(model, folder / "model.onnx")
        (folder / "genai_config.json").write_text(json.dumps(genai_config(spec, threads)), encoding="utf-8")
        self._process = subprocess.Popen(  # noqa: S603 - given by the caller
            [python, str(_WORKER), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        #: The versions of onnxruntime-genai and of its onnxruntime.
        self.version = self._line()

    def generate(self, requests: int, lengths: tuple[int, int], seed: int, vocabulary: int) -> Generated:
        """Generate greedily for the prompts of :func:`draw_prompts`.

        Args:
            requests: Requests at a time.
            lengths: The tokens of a prompt, and new tokens.
            seed: Determines the prompts.
            vocabulary: The number of different tokens.
        """
        print(requests, *lengths, seed, vocabulary, file=self._process.stdin, flush=True)
        answer = json.loads(self._line())
        return answer["seconds"], answer["tokens"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _line(self) -> str:
        line = self._process.stdout.readline().strip() if self._process.stdout else ""
        if not line:
            raise RuntimeError("onnxruntime-genai has ended; its error is above")
        return line


def compare(generator: Generator, genai: Genai, requests: int, lengths: tuple[int, int], rounds: int) -> list[float]:
    """Return tokens per second of a generator divided by those of onnxruntime-genai, round by round.

    Both generate greedily for prompts of equal length, so that a padded batch has no pads. Each is the first one to be
    timed in every second round, and runs alone: threads of the other one have gone to sleep.

    Args:
        generator: A generator without requests.
        genai: The same model.
        requests: Requests at a time.
        lengths: The tokens of a prompt, and new tokens.
        rounds: Rounds, after one as a warm-up.

    Raises:
        ValueError: They choose different tokens for a request, or not as many as they should.
    """
    vocabulary = generator.signature.vocabulary
    ratios = []
    for seed in range(rounds + 1):
        ways: list[Callable[[], Generated]] = [
            functools.partial(
                generate_own, generator, draw_prompts(requests, lengths[0], seed, vocabulary), lengths[1]
            ),
            functools.partial(genai.generate, requests, lengths, seed, vocabulary),
        ]
        order = (0, 1) if seed % 2 else (1, 0)
        found = {}
        for at in order:
            time.sleep(_SETTLE_S)
            found[at] = ways[at]()
        (own_s, tokens), (other_s, others) = found[0], found[1]
        _check_tokens(tokens, others, lengths[1])
        if seed:  # the first round is slower
            ratios.append(other_s / own_s)
    return ratios


def draw_prompts(requests: int, prompt: int, seed: int, vocabulary: int) -> Array:
    """Return random prompts, [requests, tokens], those of ``genai_worker.py`` for the same seed.

    They do not have the last token, which onnxruntime-genai takes for padding.
    """
    return np.random.default_rng(seed).integers(0, vocabulary - 1, (requests, prompt))


def generate_own(generator: Generator, ids: Array, new: int) -> Generated:
    """Generate greedily with a generator."""
    start_s = time.perf_counter()
    streams = [generator.submit(row.tolist(), new) for row in ids]
    tokens = [stream.result() for stream in streams]
    return time.perf_counter() - start_s, tokens


def _check_tokens(tokens: Sequence[Sequence[int]], others: Sequence[Sequence[int]], new: int) -> None:
    for number, (own, other) in enumerate(zip(tokens, others, strict=True)):
        if len(own) != new or len(other) != new:
            raise ValueError(f"request {number}: expected {new} tokens, found {len(own)}; genai: {len(other)}")
        for at, (one, theirs) in enumerate(zip(own, other, strict=True)):
            if one != theirs:
                raise ValueError(f"request {number}: token {at} is {one}, that of onnxruntime-genai {theirs}")


def genai_config(spec: LlamaDecoderSpec, threads: int) -> dict[str, Any]:
    """Return the configuration of a decoder for onnxruntime-genai.

    Args:
        spec: The parameters of the decoder.
        threads: The threads of an operator.
    """
    cache = {f"{part}_{kind}_names": "" for part in ("past", "present") for kind in ("key", "value")}
    for name in cache:
        part, kind, _ = name.split("_")
        cache[name] = f"{'past_key_values' if part == 'past' else 'present'}.%d.{kind}"
    inputs = {name: name for name in ("input_ids", "attention_mask", "position_ids")}
    decoder = {
        "filename": "model.onnx",
        "head_size": spec.hidden // spec.heads,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "session_options": {"log_id": "genai", "intra_op_num_threads": threads, "provider_options": []},
        "inputs": {**inputs, **{name: value for name, value in cache.items() if name.startswith("past")}},
        "outputs": {"logits": "logits", **{n: value for n, value in cache.items() if n.startswith("present")}},
    }
    tokens = {"bos_token_id": 0, "eos_token_id": spec.vocabulary - 1, "pad_token_id": spec.vocabulary - 1}
    head = {"type": "llama", "vocab_size": spec.vocabulary, "context_length": spec.context, **tokens}
    search = {"do_sample": False, "max_length": spec.context, "num_beams": 1}
    search["past_present_share_buffer"] = spec.attention == "grouped"
    return {
        "model": {**head, "decoder": decoder},
        "search": search,
        "engine": {"static_batching": {"max_batch_size": 64}},
    }
