"""Tokens per second beside onnxruntime-genai, on the same file."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import onnx

from chrion.generation import Generator
from chrion.zoo.cached_decoder import LlamaDecoderSpec

_WORKER = Path(__file__).with_name("genai_worker.py")


class Genai:
    """onnxruntime-genai in a process of its own.

    Args:
        python: An interpreter whose environment has it.
        folder: An empty folder, for the model.
        model: The decoder.
        spec: Its parameters.

    Raises:
        RuntimeError: It cannot load the model.
    """

    def __init__(self, python: str, folder: Path, model: onnx.ModelProto, spec: LlamaDecoderSpec) -> None:
        onnx.save(model, folder / "model.onnx")
        (folder / "genai_config.json").write_text(json.dumps(_config(spec)), encoding="utf-8")
        self._process = subprocess.Popen(  # noqa: S603 - given by the caller
            [python, str(_WORKER), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        #: Name and version.
        self.version = self._line()

    def generate(self, requests: int, prompt: int, new: int, seed: int, vocabulary: int) -> tuple[float, list[int]]:
        """Return the time in seconds, and the first tokens of the first request."""
        print(requests, prompt, new, seed, vocabulary, file=self._process.stdin, flush=True)
        seconds, *tokens = self._line().split()
        return float(seconds), list(map(int, tokens))

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


def compare(model: onnx.ModelProto, genai: Genai, requests: int, lengths: tuple[int, int], rounds: int) -> list[float]:
    """Return tokens per second of the generator divided by those of onnxruntime-genai, round by round.

    Both generate greedily for prompts of equal length, so that a padded batch has no pads.

    Raises:
        ValueError: They choose different tokens.
    """
    prompt, new = lengths
    ratios = []
    with Generator(model, max_batch=requests) as generator:
        vocabulary = generator.signature.vocabulary
        for seed in range(rounds + 1):
            ids = np.random.default_rng(seed).integers(0, vocabulary, (requests, prompt))
            start_s = time.perf_counter()
            streams = [generator.submit(row.tolist(), new) for row in ids]
            tokens = [stream.result() for stream in streams]
            own_s = time.perf_counter() - start_s
            other_s, first = genai.generate(requests, prompt, new, seed, vocabulary)
            if tokens[0][: len(first)] != first:
                raise ValueError(f"different tokens: {tokens[0][: len(first)]}, onnxruntime-genai: {first}")
            if seed:  # the first round is slower
                ratios.append(other_s / own_s)
    return ratios


def _config(spec: LlamaDecoderSpec) -> dict[str, Any]:
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
        "session_options": {"log_id": "genai", "provider_options": []},
        "inputs": {**inputs, **{name: value for name, value in cache.items() if name.startswith("past")}},
        "outputs": {"logits": "logits", **{n: value for n, value in cache.items() if n.startswith("present")}},
    }
    tokens = {"bos_token_id": 0, "eos_token_id": spec.vocabulary - 1, "pad_token_id": spec.vocabulary - 1}
    head = {"type": "llama", "vocab_size": spec.vocabulary, "context_length": spec.context, **tokens}
    search = {"do_sample": False, "max_length": spec.context, "num_beams": 1, "past_present_share_buffer": False}
    return {
        "model": {**head, "decoder": decoder},
        "search": search,
        "engine": {"static_batching": {"max_batch_size": 64}},
    }
