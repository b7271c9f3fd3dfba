"""A process that generates with onnxruntime-genai, in an environment that has it.

    python genai_worker.py FOLDER

The folder has ``model.onnx`` and ``genai_config.json``. Each line of standard input, ``REQUESTS PROMPT NEW SEED
VOCABULARY``, is answered by a line with the time in seconds and the first tokens of the first request. One request is
served by a ``Generator``, several by an ``Engine``.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import onnxruntime_genai as genai

Array = np.ndarray[Any, Any]


def generate_one(model: Any, ids: Array, new: int) -> list[int]:
    """Return the tokens of one request."""
    parameters = genai.GeneratorParams(model)
    length = ids.shape[1] + new
    parameters.set_search_options(max_length=length, min_length=length, batch_size=1, do_sample=False)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(ids)
    tokens = []
    for _ in range(new):
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
    return tokens


def generate_several(engine: Any, events: Any, ids: Array, new: int) -> list[int]:
    """Serve several requests, and return the tokens of the first one."""
    requests = []
    for row in ids:
        request = engine.create_request()
        options = genai.TurnOptions(request)
        options.set_do_sample(False)
        options.set_min_generated_tokens(new)
        options.set_max_generated_tokens(new)
        request.begin_turn(row, options)
        requests.append(request)
    tokens: list[list[int]] = [[] for _ in requests]
    while engine.has_pending_requests():
        engine.run(events)
        for at in range(len(events)):
            event = events[at]
            if event.flags & genai.EngineEventFlags.TOKEN:
                tokens[requests.index(event.request)].append(int(event.token))
    for request in requests:
        request.close()
    if any(len(own) != new for own in tokens):
        raise RuntimeError(f"expected {new} tokens of each request, found {[len(own) for own in tokens]}")
    return tokens[0]


def main() -> None:
    """Answer the lines of standard input."""
    model = genai.Model(sys.argv[1])
    engine = genai.Engine(model)
    events = engine.create_event_buffer(1024)
    print(f"onnxruntime-genai {genai.__version__}", flush=True)
    for line in sys.stdin:
        requests, prompt, new, seed, vocabulary = map(int, line.split())
        ids = np.random.default_rng(seed).integers(0, vocabulary, (requests, prompt)).astype(np.int32)
        start_s = time.perf_counter()
        found = generate_one(model, ids, new) if requests == 1 else generate_several(engine, events, ids, new)
        print(time.perf_counter() - start_s, *found[:8], flush=True)


if __name__ == "__main__":
    main()
