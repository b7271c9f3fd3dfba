"""Clients of OpenAI's API that note when tokens come: requests as JSON from stdin, times in ms to stdout.

It runs as a process of its own, so that clients and server do not wait for each other's interpreter.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence

import httpx2


async def send_all(url: str, model: str, requests: Sequence[tuple[float, int, int]]) -> list[list[float]]:
    """Send requests at their times; return the time of each token.

    Args:
        url: The server.
        model: The name of the decoder.
        requests: The time of each request, in ms, and its prompt and new tokens.
    """
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(base_url=url, limits=limits, timeout=None) as client:
        warm = {"model": model, "prompt": [1], "max_tokens": 1}
        (await client.post("/v1/completions", json=warm)).raise_for_status()
        began = time.perf_counter()

        async def send(at_ms: float, prompt: int, new: int) -> list[float]:
            await asyncio.sleep(began + at_ms / 1e3 - time.perf_counter())
            body = {"model": model, "prompt": [1] * prompt, "max_tokens": new, "ignore_eos": True, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                return [
                    (time.perf_counter() - began) * 1e3
                    async for line in answer.aiter_lines()
                    if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]
                ]

        return list(await asyncio.gather(*(send(*request) for request in requests)))


if __name__ == "__main__":
    given = json.load(sys.stdin)
    json.dump(asyncio.run(send_all(**given)), sys.stdout)
