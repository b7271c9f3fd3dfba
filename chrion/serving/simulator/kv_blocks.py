"""Keys and values in blocks that requests take as they grow, instead of slots that they reserve when they begin.

Kwon et al., *Efficient memory management for large language model serving with PagedAttention* (SOSP 2023), section 4:
a request that begins takes the blocks of its prompt, and another block whenever its last one is full. If none is free,
the request that arrived last is preempted: it loses its blocks, and later processes its prompt and the tokens that it
has got again (recomputation, section 4.5).

The full blocks of a prefix that several prompts share are kept once. After the last request that uses them they stay
until their memory is needed, those that were used last the longest.

The requests with blocks are always the first ones of the pool: requests begin in the order of their arrival, and the
last one is preempted. So the first request always proceeds, and no two requests wait for each other. This holds for one
batch in flight only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from chrion.generation.scheduling import IterationScheduler, Phase, PooledRequest

#: One block of so many is left to others by a request that begins, so that they can grow; the watermark of vLLM.
_LEFT_OF = 100

#: The number of a prefix, and how many slots its full blocks in a prompt have.
_Prefix = tuple[int, int]


@dataclass(slots=True)
class _Shared:
    """The blocks of a prefix."""

    #: The request that computes them; None if they have been computed and it has left.
    owner: PooledRequest | None
    #: The requests that have begun and use them.
    users: int = 0


class BlockScheduler(IterationScheduler):
    """An iteration-level scheduler with keys and values in blocks, and one batch in flight.

    Args:
        max_batch: The most requests of a batch.
        n_slots: The slots for keys and values; those beyond the last whole block are not used.
        block: The slots of a block; at most ``n_slots``.
        chunk: The most tokens of a prompt that one iteration processes; 0 for all.

    Attributes:
        preempted: How often each request was preempted.
        reused: Tokens of prompts that were not processed because their prefixes were kept.
    """

    def __init__(self, max_batch: int, n_slots: int, *, block: int, chunk: int = 0) -> None:
        super().__init__(max_batch, n_slots // block * block, chunk=chunk)
        self.preempted: Counter[int] = Counter()
        self.reused = 0
        self._block = block
        #: The slots of prefixes that no request uses; the others in use are ``reserved``.
        self._idle = 0
        #: The slots of each request that has begun, without those of its prefix.
        self._own: dict[int, int] = {}
        #: The prefixes of requests, and those of requests that use kept blocks.
        self._prefixes: dict[int, _Prefix] = {}
        self._used: dict[int, _Prefix] = {}
        #: The prefixes that are kept; of those without users, the one that was used last is the last one.
        self._shared: dict[_Prefix, _Shared] = {}
        self._kept: Counter[int] = Counter()

    def set_prefix(self, number: int, prefix: int, tokens: int) -> None:
        """State with which prefix the prompt of a request begins, which is in the pool and has not begun.

        The last token of a prompt is always processed, since the first new one follows from it.

        Args:
            number: The request.
            prefix: The number of the prefix.
            tokens: The tokens of the prompt that belong to it.
        """
        if full := min(tokens, self.pool[number].unread - 1) // self._block * self._block:
            self._prefixes[number] = prefix, full

    def keeps(self, prefix: int) -> bool:
        """Return whether blocks of a prefix are kept or being computed."""
        return self._kept[prefix] > 0

    def _reserve(self, request: PooledRequest) -> bool:
        """Take the blocks that a request needs for its next iteration; return whether there are enough."""
        if request.phase is Phase.INITIATION:
            return self._begin(request)
        if request.unread or request.past % self._block:  # the blocks of a prompt are taken when it begins
            return True
        while self.reserved == self.n_slots:
            last = next(other for other in reversed(self.pool.values()) if other.number in self._own)
            self._preempt(last)
            if last is request:
                return False
        self._own[request.number] += self._block
        self._take(self._block)
        return True

    def _begin(self, request: PooledRequest) -> bool:
        """Take the blocks of a prompt; those of its prefix are taken once, and not computed again."""
        prefix = self._prefixes.get(request.number)
        shared = self._shared.get(prefix) if prefix else None
        if prefix and shared and shared.owner and shared.owner.past < prefix[1]:  # another request computes them
            prefix = None
        own = -(-request.unread // self._block) * self._block - (prefix[1] if prefix else 0)
        needed = own + (prefix[1] if prefix and not (shared and shared.users) else 0)
        left = self.n_slots // self._block // _LEFT_OF * self._block if self.reserved else 0
        if self.reserved + needed > self.n_slots - left:
            return False
        self._own[request.number] = own
        if prefix:
            self._use_prefix(request, prefix)
        self._take(needed)
        self.waiting -= 1
        return True

    def _use_prefix(self, request: PooledRequest, prefix: _Prefix) -> None:
        self._used[request.number] = prefix
        shared = self._shared.get(prefix)
        if shared is None:
            shared = self._shared[prefix] = _Shared(request)
            self._kept[prefix[0]] += 1
        else:
            request.past, request.unread = prefix[1], request.unread - prefix[1]
            self.reused += prefix[1]
            if not shared.users:
                self._idle -= prefix[1]
        shared.users += 1

    def _take(self, slots: int) -> None:
        """Take free slots; prefixes that no request uses make room."""
        self.reserved += slots
        while self.reserved + self._idle > self.n_slots:
            self._drop(next(prefix for prefix, shared in self._shared.items() if not shared.users))

    def _drop(self, prefix: _Prefix) -> None:
        """Forget a prefix that no request uses."""
        del self._shared[prefix]
        self._kept[prefix[0]] -= 1
        self._idle -= prefix[1]

    def _preempt(self, request: PooledRequest) -> None:
        """Take the blocks from a request that is not in flight; what it has got counts as a part of its prompt."""
        self._free(request)
        request.unread = request.past + max(request.unread, 1)
        request.past, request.phase = 0, Phase.INITIATION
        self.waiting += 1
        self.preempted[request.number] += 1

    def _release(self, request: PooledRequest) -> None:
        self._free(request)
        self._prefixes.pop(request.number, None)

    def _free(self, request: PooledRequest) -> None:
        self.reserved -= self._own.pop(request.number)
        prefix = self._used.pop(request.number, None)
        if prefix is None:
            return
        shared = self._shared[prefix]
        shared.users -= 1
        computed = not (shared.owner is request and request.past < prefix[1])
        if shared.owner is request:
            shared.owner = None
        if not shared.users:
            self.reserved -= prefix[1]
            self._idle += prefix[1]
            self._shared[prefix] = self._shared.pop(prefix)
            if not computed:
                self._drop(prefix)
