"""A process that generates with onnxruntime-genai, in an environment that has it.

    python genai_worker.py FOLDER

The folder has ``model.onnx`` and ``genai_config.json``. The first line of standard output has the versions. Each line
of standard input, ``REQUESTS PROMPT NEW SEED VOCABULARY``, is answered by a line of JSON with the time in ``seconds``
and the ``tokens`` of every request. One request is served by a ``Generator``, several by an ``Engine``.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from typing import Any

import numpy as np
import onnxruntime_genai as genai

Array = np.ndarray[Any, Any]


def generate_one(model: Any, ids: Array, new: int) -> list[list[int]]:
    """Return the tokens of one request, in a list of one."""
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=ids.shape[1] + new, batch_size=1, do_sample=False)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(ids)
    tokens: list[int] = []
    while len(tokens) < new and not generator.is_done():
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
    return [tokens]


def generate_several(engine: Any, events: Any, ids: Array, new: int) -> list[list[int]]:
    """Serve several requests, and return their tokens."""
    requests = []
    for row in ids:
        request = engine.create_request()
        options = genai.TurnOptions(request)
        options.set_do_sample(False)
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
    return tokens


def main() -> None:
    """Answer the lines of standard input."""
    model = genai.Model(sys.argv[1])
    engine = genai.Engine(model)
    events = engine.create_event_buffer(1024)
    print(
        f"onnxruntime-genai {genai.__version__} with onnxruntime {importlib.metadata.version('onnxruntime')}",
        flush=True,
    )
    for line in sys.stdin:
        requests, prompt, new, seed, vocabulary = map(int, line.split())
        ids = np.random.default_rng(seed).integers(0, vocabulary - 1, (requests, prompt)).astype(np.int32)
        start_s = time.perf_counter()
        found = generate_one(model, ids, new) if requests == 1 else generate_several(engine, events, ids, new)
        print(json.dumps({"seconds": time.perf_counter() - start_s, "tokens": found}), flush=True)


if __name__ == "__main__":
    main()
