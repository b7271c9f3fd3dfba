"""The scheduler of iterations: Algorithm 2 of Orca as a state machine without threads and clocks.

Yu et al., *Orca: a distributed serving system for transformer-based generative models* (OSDI 2022), Algorithm 2::

    while true:
        batch, n_rsrv = Select(request_pool, n_rsrv)
        schedule engine to run one iteration of the model for the batch
        foreach req in batch: req.state = RUNNING
        n_scheduled += 1
        if n_scheduled = n_workers:
            wait for return of a scheduled batch
            foreach req in the returned batch:
                req.state = INCREMENT
                if finished(req): n_rsrv -= req.max_tokens
            n_scheduled -= 1

    Select(pool, n_rsrv):
        foreach req in pool that is not RUNNING, by arrival time:
            if batch.size() = max_bs: break
            if req.state = INITIATION:
                if n_rsrv + req.max_tokens > n_slots: break
                n_rsrv += req.max_tokens
            batch += req

Iteration-level first come, first served: of two requests in the pool, the earlier one has run at least as many
iterations. It holds because batches return in the order in which they were selected, whatever ``n_workers`` is.

Three differences:

- A request that needs more than ``n_slots`` is refused when it arrives, because the loop above would wait for it for
  ever.
- An empty batch is not scheduled.
- ``max_tokens``, the slots that a request reserves, is prompt + new - 1. In the paper it is prompt + new, one slot more
  than is ever used: the last token that is generated is never an input, and has no keys and values.

The baseline is request-level scheduling as the paper describes it of FasterTransformer:

- A batch is fixed until all of its requests have ended, and its results are returned together (section 3, C1).
- Requests that have ended keep their rows: each iteration computes one token for them, too (section 3, C1).
- The first iteration processes as many tokens of every prompt as the shortest one has (section 6.2). The rest of longer
  prompts follows one token at a time, beside the tokens that the other requests generate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice

from chrion.common.wrong_values import wrong_value
from chrion.errors import OptionError
from chrion.generation.arguments import at_least, length_error, whole_number

#: Iteration: Orca's. Request: FasterTransformer's, the baseline.
POLICIES = ("iteration", "request")


class Phase(Enum):
    """The state of a request in the pool."""

    INITIATION = auto()
    RUNNING = auto()
    INCREMENT = auto()


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a request in a batch."""

    number: int
    #: New tokens: those of its prompt, or one.
    tokens: int
    #: True if a token follows from this iteration, false for a prompt of which more is unread.
    last: bool
    #: False for a request that has ended and keeps its row in a fixed batch.
    active: bool = True


@dataclass(slots=True)
class PooledRequest:
    """A request in the pool. It is changed by the scheduler only."""

    number: int
    #: Tokens of the prompt that no iteration has processed.
    unread: int
    #: The most tokens with keys and values, the slots that it reserves: its prompt and all new tokens but the last one.
    max_tokens: int
    #: Tokens with keys and values.
    past: int = 0
    phase: Phase = Phase.INITIATION
    #: Iterations that have returned.
    iterations: int = 0
    #: True if the request is cancelled or has ended; it leaves as soon as no batch contains it.
    ended: bool = False
    #: Its share of an iteration after its prompt.
    increment: Share = field(init=False)

    def __post_init__(self) -> None:
        self.increment = Share(self.number, 1, last=True)


Batch = tuple[Share, ...]


class IterationScheduler:
    """The pool of requests and the batches in flight.

    Args:
        max_batch: The most requests of a batch.
        n_slots: The slots for keys and values.
        n_workers: The most batches in flight.
        policy: One of :data:`POLICIES`.
        chunk: The most tokens of a prompt that one iteration processes; 0 for all.

    Raises:
        OptionError: An argument is out of range.
    """

    def __init__(
        self, max_batch: int, n_slots: int, *, n_workers: int = 1, policy: str = "iteration", chunk: int = 0
    ) -> None:
        if policy not in POLICIES:
            raise wrong_value("policy", f"one of {', '.join(POLICIES)}", policy)
        self.max_batch, self.n_slots = at_least("max_batch", max_batch, 1), at_least("n_slots", n_slots, 1)
        self.n_workers, self.chunk = at_least("n_workers", n_workers, 1), at_least("chunk", chunk, 0)
        self.policy = policy
        #: The requests in the order of their arrival.
        self.pool: dict[int, PooledRequest] = {}
        #: The batches in flight, the earliest first.
        self.in_flight: deque[Batch] = deque()
        self.reserved = 0
        #: The requests that have not begun.
        self.waiting = 0
        self._groups: list[list[int]] = []  # with the policy "request": batches that are fixed

    def needed_slots(self, prompt: int, max_new_tokens: int) -> int:
        """Return the slots that a request reserves: one for each token with keys and values.

        Args:
            prompt: The tokens of its prompt, at least one.
            max_new_tokens: The most tokens to generate, at least one.

        Raises:
            ContextLengthError: It needs more slots than there are.
            OptionError: A number is not whole, or below one.
        """
        prompt, max_new_tokens = whole_number("prompt", prompt), whole_number("max_new_tokens", max_new_tokens)
        # The last token that is generated is never an input, and has no keys and values.
        needed = prompt + max_new_tokens - 1
        for name, value in (("prompt", prompt), ("max_new_tokens", max_new_tokens)):
            if value < 1:
                raise OptionError(f"{name}: expected at least one token, found {value}")
        if needed > self.n_slots:
            limits = f"the request needs {needed} slots for keys and values, there are {self.n_slots}"
            raise length_error(limits, self.n_slots, prompt, max_new_tokens, memory=True)
        return needed

    def submit(self, number: int, prompt: int, max_new_tokens: int) -> None:
        """Add a request to the pool; the numbers are as in :meth:`needed_slots`.

        Args:
            number: A number that no other request has.
            prompt: The tokens of its prompt.
            max_new_tokens: The most tokens to generate.

        Raises:
            ContextLengthError: It needs more slots than there are.
            OptionError: A number is not whole, or below one.
        """
        self.pool[number] = PooledRequest(number, prompt, self.needed_slots(prompt, max_new_tokens))
        self.waiting += 1

    def select(self) -> Batch:
        """Return the next batch, which is then in flight, or an empty one if none can run now."""
        if len(self.in_flight) == self.n_workers:
            return ()
        chosen = self._by_iteration() if self.policy == "iteration" else self._by_request()
        most = self._most_tokens(chosen)
        shares = []
        for request in chosen:
            shares.append(self._share(request, most))
            request.phase = Phase.RUNNING
        batch = tuple(shares)
        if batch:
            self.in_flight.append(batch)
        return batch

    def complete(self, ended: Collection[int]) -> list[int]:
        """Take back the earliest batch in flight.

        Args:
            ended: Its requests that have ended.

        Returns:
            The requests that leave the pool, whose slots are free.
        """
        leaving = []
        for share in self.in_flight.popleft():
            request = self.pool[share.number]
            request.phase = Phase.INCREMENT
            request.iterations += 1
            if share.active:
                request.past += share.tokens
            if request.unread:
                request.unread -= share.tokens
            if share.number in ended:
                request.ended = True
            if request.ended:
                leaving.append(request)
        return self._leave(leaving) if leaving else []

    def cancel(self, number: int) -> list[int]:
        """End a request; return the requests that leave the pool at once."""
        request = self.pool.get(number)
        if request is None:
            return []
        request.ended = True
        return self._leave([request])

    def _by_iteration(self) -> list[PooledRequest]:
        """Return the first requests that are not running, up to one whose reservation does not fit."""
        chosen: list[PooledRequest] = []
        for request in self.pool.values():
            if len(chosen) == self.max_batch:
                break
            if request.phase is Phase.RUNNING:
                continue
            if not self._reserve(request):
                break
            chosen.append(request)
        return chosen

    def _by_request(self) -> list[PooledRequest]:
        """Return a fixed batch of which no request is running, or a new one."""
        for group in self._groups:
            members = [self.pool[number] for number in group]
            if all(request.phase is not Phase.RUNNING for request in members):
                return members
        if len(self._groups) == self.n_workers:
            return []
        chosen = []
        for request in islice(self._waiting(), self.max_batch):
            if not self._reserve(request):
                break
            chosen.append(request)
        if chosen:
            self._groups.append([request.number for request in chosen])
        return chosen

    def _waiting(self) -> Iterator[PooledRequest]:
        return (request for request in self.pool.values() if request.phase is Phase.INITIATION)

    def _reserve(self, request: PooledRequest) -> bool:
        """Reserve the slots that a request needs for its next iteration; return whether enough are free.

        One that has begun has all of its slots.
        """
        if request.phase is not Phase.INITIATION:
            return True
        if self.reserved + request.max_tokens > self.n_slots:
            return False
        self.reserved += request.max_tokens
        self.waiting -= 1
        return True

    def _release(self, request: PooledRequest) -> None:
        """Free the slots of a request that leaves."""
        self.reserved -= request.max_tokens

    def _most_tokens(self, chosen: Sequence[PooledRequest]) -> int | None:
        """Return the most tokens of a prompt in a batch, or None for all."""
        if self.policy == "iteration" or not chosen:
            return self.chunk or None
        shortest = max(min(request.unread for request in chosen), 1)
        return min(shortest, self.chunk) if self.chunk else shortest

    @staticmethod
    def _share(request: PooledRequest, most: int | None) -> Share:
        if request.ended:
            return Share(request.number, 1, last=False, active=False)
        if request.unread == 0:
            return request.increment
        tokens = request.unread if most is None else min(request.unread, most)
        return Share(request.number, tokens, last=tokens == request.unread)

    def _leave(self, changed: Sequence[PooledRequest]) -> list[int]:
        """Remove the requests that have ended and that no batch contains.

        Args:
            changed: Requests that have ended and returned, or end now. Others leave only with all of a fixed batch.
        """
        candidates = changed
        if self.policy == "request":
            candidates = [request for request in changed if not any(request.number in group for group in self._groups)]
            for group in [group for group in self._groups if any(request.number in group for request in changed)]:
                members = [self.pool[number] for number in group]
                if all(request.ended and request.phase is not Phase.RUNNING for request in members):
                    self._groups.remove(group)
                    candidates += members
        left = [request for request in candidates if request.phase is not Phase.RUNNING]
        for request in left:
            del self.pool[request.number]
            if request.phase is Phase.INITIATION:
                self.waiting -= 1
            else:
                self._release(request)
        return [request.number for request in left]
