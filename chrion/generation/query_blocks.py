"""Attention of a long prompt in blocks of queries, one after another.

Attention of L new tokens computes L x L scores, of which a causal mask hides nearly half. A block of a prompt attends
to itself and to the blocks before it: most hidden scores are not computed, and those of a block fit in the caches of a
core. Token-wise parts still run once on the tokens of all blocks.

What blocks compute for themselves, such as their rows of the mask, is in memory until all layers have read it, and
grows with the square of the tokens. So a very long prompt runs in passes through all layers, each of some blocks.

A block is to attention what a chunk of a prompt is to the scheduler. If blocks change the results of a decoder, its
prompts run whole; that is tried once, with less than a hundred new tokens.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from chrion.generation.equivalence import Run, find_difference, longest_past, make_requests
from chrion.generation.iteration import Outcome, Work
from chrion.generation.rewrites.decoder import DecoderSignature

Array = np.ndarray[Any, Any]
log = logging.getLogger(__name__)

#: The most tokens of a block, and of a request in one pass through all layers.
BLOCK, PASS = 128, 512
#: The same when it is tried, and the past and new tokens of requests: last blocks have three tokens, one, and four.
_SHORT_BLOCK, _SHORT = 4, ((0, 15), (5, 9), (0, 12))
#: The new tokens of one more request, which has a long past.
_AFTER_LONG = 6


def split_queries(batch: Sequence[Work], most: int) -> tuple[list[Work], list[int]]:
    """Return the blocks of requests, and where the last block of each request is.

    Args:
        batch: The requests.
        most: The most tokens of a block.
    """
    blocks: list[Work] = []
    last = []
    for work in batch:
        end = len(work.ids)
        blocks += [
            replace(work, ids=work.ids[at : at + most], past=work.past + at, wanted=False)
            for at in range(0, end - most, most)
        ]
        done = (end - 1) // most * most
        blocks.append(replace(work, ids=work.ids[done:], past=work.past + done) if done else work)
        last.append(len(blocks) - 1)
    return blocks, last


def split_passes(batch: Sequence[Work], most: int) -> Iterator[tuple[list[Work], list[int]]]:
    """Yield the requests of each pass with their numbers; a request is in as many as it needs, the first ones.

    Args:
        batch: The requests.
        most: The most tokens of a request in a pass.
    """
    pieces = [split_queries([work], most)[0] for work in batch]
    for at in range(max(map(len, pieces))):
        numbers = [number for number, own in enumerate(pieces) if at < len(own)]
        yield [pieces[number][at] for number in numbers], numbers


def supports_query_blocks(signature: DecoderSignature, run: Run, *, by_token: bool) -> bool:
    """Return whether a decoder gives the same results for prompts in blocks.

    Args:
        signature: Its inputs and outputs.
        run: Runs an iteration without blocks.
        by_token: As in :class:`RequestCache`.
    """
    examples = functools.partial(make_requests, signature, _sizes(signature), by_token=by_token)

    def run_blocks(batch: Sequence[Work]) -> list[Outcome]:
        blocks, last = split_queries(batch, _SHORT_BLOCK)
        outcomes = run(blocks)
        return [outcomes[at] for at in last]

    if different := find_difference(signature, run_blocks, run, examples):
        log.info("prompts run as a whole: in blocks, %s", different)
        return False
    return True


def _sizes(signature: DecoderSignature) -> list[tuple[int, int]]:
    """Return the past and new tokens of the requests of a trial, as far as the model has positions for them."""
    long = (max(longest_past(signature) + 1 - _AFTER_LONG, 0), _AFTER_LONG)
    context = signature.context or sys.maxsize
    return [(past, min(new, context - past)) for past, new in (*_SHORT, long) if past < context]
