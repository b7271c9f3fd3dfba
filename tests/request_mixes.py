"""Random batches of requests that begin, go on and continue prompts, compared with plain onnxruntime."""

from __future__ import annotations

import numpy as np

from chrion.generation.cache import CachePool, RequestCache
from chrion.generation.equivalence import Run
from chrion.generation.iteration import DecoderEngine, Work
from decoder_support import PlainDecoder, check_scores

LENGTH = 40


class Conversation:
    """A request with all tokens that it has had so far, and its cache, in a pool or with memory of its own."""

    def __init__(self, engine: DecoderEngine, pool: CachePool | None = None) -> None:
        self.engine = engine
        self.cache = RequestCache(engine.signature, LENGTH, by_token=engine.by_token, pool=pool)
        self.ids: list[int] = []

    def work(self, ids: list[int], *, wanted: bool = True) -> Work:
        work = Work(self.cache, np.array(ids, np.int64), len(self.ids), wanted)
        self.ids += ids
        return work


def check_random_mixes(engine: DecoderEngine, plain: PlainDecoder, iterations: int, run: Run | None = None) -> None:
    """Run random batches of initiations, increments and chunks, of which a few scores are not wanted."""
    pick = np.random.default_rng(1)
    memory = CachePool(engine.signature, 6 * LENGTH)
    pool = [Conversation(engine, memory) for _ in range(6)]
    for _ in range(iterations):
        for at in pick.permutation(6)[:2]:
            if len(pool[at].ids) > LENGTH - 10:
                pool[at].cache.release()
                pool[at] = Conversation(engine, memory)
        chosen = [pool[at] for at in pick.permutation(6)[: pick.integers(1, 7)]]
        batch = []
        for request in chosen:
            most = LENGTH - len(request.ids)
            count = 1 if request.ids and pick.random() < 0.9 else int(pick.integers(1, 9))
            ids = [int(t) for t in pick.integers(0, engine.signature.vocabulary, min(count, most))] or [0]
            batch.append(request.work(ids, wanted=bool(pick.random() < 0.8)))
        outcomes = (run or engine.run)(batch)
        wanted = [at for at, work in enumerate(batch) if work.wanted]
        assert [at for at, outcome in enumerate(outcomes) if outcome is not None] == wanted
        check_scores([outcomes[at] for at in wanted], [chosen[at].ids for at in wanted], plain)
