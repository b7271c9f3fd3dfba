"""The requests of a generator: their tokens, their texts, and how they end."""

from __future__ import annotations

from dataclasses import dataclass, field

from chrion.errors import ChrionError, GenerationError
from chrion.generation.cache import RequestCache
from chrion.generation.iteration import Array, Work
from chrion.generation.sampling import Sampler, log_probabilities
from chrion.generation.scheduling import Share
from chrion.generation.streams import Stream, Token
from chrion.generation.text import TextBuilder


@dataclass(slots=True)
class GenerationRequest:
    """A request that waits or runs. It belongs to the thread of the generator, but for its cache."""

    number: int
    stream: Stream
    sampler: Sampler
    prompt: list[int]
    max_new_tokens: int
    #: Tokens that end the text.
    stop: frozenset[int]
    #: None without a tokenizer.
    text: TextBuilder | None
    #: The slots that it reserves.
    capacity: int
    #: The number of most probable tokens that each token has beside its own probability; None for neither.
    logprobs: int | None = None
    #: Its keys and values; the thread that runs its first batch gets them.
    cache: RequestCache | None = None
    #: Tokens in the cache.
    past: int = 0
    generated: list[int] = field(default_factory=list)
    #: As in :attr:`Stream.finish_reason`.
    reason: str = ""
    error: Exception | None = None

    def work(self, share: Share, cache: RequestCache) -> Work:
        """Return the share of the request in an iteration; one that has ended repeats its last token."""
        past = self.past if share.active else max(self.past - 1, 0)
        after = past - len(self.prompt)
        known = self.prompt[past : past + share.tokens] if after < 0 else self.generated[after : after + 1]
        return Work(cache, known, past, share.last or not share.active)

    def append(self, scores: Array) -> int:
        """Choose the next token, and determine whether it ends the request; return how many tokens are new, 0 or 1.

        Args:
            scores: The logits, [vocabulary].

        Raises:
            Exception: The scores are not numbers, or the tokenizer raises.
        """
        token = self.sampler.choose(scores)
        if token in self.stop:
            self.reason = "stop"
            return 0
        logprob, top = (None, ()) if self.logprobs is None else log_probabilities(scores, token, self.logprobs)
        self.generated.append(token)
        text = self.text.add(token) if self.text is not None else ""
        self.stream.put(Token(token, text, logprob, top))
        if self.text is not None and self.text.stopped:
            self.reason = "stop"
        elif len(self.generated) == self.max_new_tokens:
            self.reason = "length"
        return 1


def of_unknown_context(error: Exception, request: GenerationRequest) -> Exception:
    """Return an error of a model whose context length is unknown, which may have been exceeded.

    The error of a first iteration, or one that has a hint of its own, is left as it is.
    """
    message, hint = (error.message, error.hint) if isinstance(error, ChrionError) else (str(error), "")
    if not request.past or hint:
        return error
    return GenerationError(
        f"{message}, after {request.past} tokens",
        hint="the model does not state its context length; config.json beside it may, as max_position_embeddings",
    )
