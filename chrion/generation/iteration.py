"""An iteration: what a request brings to it and what it gets from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from chrion.errors import GenerationError
from chrion.generation.cache import RequestCache
from chrion.generation.rewrites.decoder import DecoderSignature

Array = np.ndarray[Any, Any]


@dataclass(slots=True)  # not frozen, which takes longer: there is a new one in every iteration
class Work:
    """The share of a request in an iteration. It is not changed."""

    cache: RequestCache
    #: New tokens, at least one.
    ids: Sequence[int] | Array
    #: Tokens in the cache.
    past: int
    #: True if the scores of the next token are wanted; false for a prompt of which more follows.
    wanted: bool = True


#: The scores of the next token [vocabulary], None if they were not wanted, or the error of the request.
Outcome = Array | GenerationError | None


class DecoderEngine(Protocol):
    """A decoder that runs iterations."""

    #: The decoder's inputs and outputs.
    signature: DecoderSignature
    #: As in :class:`RequestCache`.
    by_token: bool
    #: Why requests run one by one; empty if they run as a batch.
    refused: str
    #: How many times its sessions have the weights in memory.
    weight_copies: int

    def run(self, batch: Sequence[Work]) -> list[Outcome]:
        """Run one iteration; the outcome of a request does not depend on the others, except for rounding."""

    def stop(self) -> None:
        """End the iteration that runs, and all later ones, with errors."""

    def supports_chunks(self) -> bool:
        """Return whether a prompt in several iterations has the results of a whole one; that may have to be tried."""
