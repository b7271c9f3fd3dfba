"""Long prompts in pieces, one after another in each attention part.

Attention of L new tokens computes L x L scores, of which a causal mask hides nearly half. A piece of a prompt attends
to itself and to the pieces before it: most hidden scores are not computed, and those of a piece fit in the caches of a
core and take memory in proportion to L. Token-wise parts still run once on the tokens of all pieces.

So a piece is to attention what a chunk of a prompt is to the scheduler (chunked prefill). A decoder for which a prompt
in pieces is not the same, as a trial at its start shows, gets prompts as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from chrion.generation.cache import RequestCache
from chrion.generation.iteration import Work
from chrion.generation.trials import Run, find_difference
from chrion.graph.decoder import DecoderSignature

Array = np.ndarray[Any, Any]
log = logging.getLogger(__name__)

#: The most tokens of a piece.
PIECE = 128
#: Of a trial: the most tokens of a piece, and the past and new tokens of its requests.
_TRIAL_PIECE, _TRIAL = 16, ((0, 49), (5, 33))


def in_pieces(batch: Sequence[Work], most: int) -> tuple[list[Work], list[int]]:
    """Return requests in pieces, and where the last piece of each request is.

    Args:
        batch: The requests.
        most: The most tokens of a piece.
    """
    pieces: list[Work] = []
    last = []
    for work in batch:
        end = len(work.ids)
        pieces += [
            replace(work, ids=work.ids[at : at + most], past=work.past + at, wanted=False)
            for at in range(0, end - most, most)
        ]
        done = (end - 1) // most * most
        pieces.append(replace(work, ids=work.ids[done:], past=work.past + done) if done else work)
        last.append(len(pieces) - 1)
    return pieces, last


def serves_pieces(signature: DecoderSignature, run: Run, *, by_token: bool) -> bool:
    """Return whether a decoder gives the same results for prompts in pieces.

    Args:
        signature: Its inputs and outputs.
        run: Runs an iteration without pieces.
        by_token: As in :class:`RequestCache`.
    """

    def examples() -> tuple[list[Work], list[Array]]:
        random = np.random.default_rng(0)
        batch = []
        for past, new in _TRIAL:
            cache = RequestCache(signature, past + new, by_token=by_token)
            for array in cache.arrays:
                array[...] = random.random(array.shape, np.float32) * 4 - 2
            batch.append(Work(cache, random.integers(0, signature.vocabulary, new), past))
        return batch, [array for work in batch for array in work.cache.arrays]

    def run_pieces(batch: Sequence[Work]) -> list[Any]:
        pieces, last = in_pieces(batch, _TRIAL_PIECE)
        outcomes = run(pieces)
        return [outcomes[at] for at in last]

    if 0 < signature.context <= PIECE:
        return False  # there are no long prompts
    if different := find_difference(signature, (run_pieces, run), examples):
        log.info("prompts run as a whole: in pieces, %s", different)
        return False
    return True
