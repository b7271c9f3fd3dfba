"""Keys and values in blocks: hand-computed schedules, invariants, and a literal loop with the two queues of vLLM."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.errors import OptionError
from chrion.generation.scheduling import Phase
from chrion.serving.simulator.decoder_requests import DecoderWorkload
from chrion.serving.simulator.decoder_scenario import DecoderScenario, build_decoder_scenario
from chrion.serving.simulator.iterations import DecoderResult, simulate_decoder
from chrion.serving.simulator.kv_blocks import BlockScheduler
from chrion.serving.simulator.scenario import ScenarioSource
from property_tests import examples

BLOCK = 4


def scenario(slots: int, **sections: Any) -> DecoderScenario:
    """Return a scenario whose iterations take 10 ms and 1 ms for each token."""
    costs = {"fixed_ms": 10.0, "token_ms": 1.0, "request_ms": 0.0, "pair_ms": 0.0}
    batching = {"block": BLOCK, **sections.pop("batching", {})}
    content = {"decoder": {"slots": slots, "costs": costs}, "policies": ["iteration"], "batching": batching}
    return build_decoder_scenario(ScenarioSource("test", {**content, **sections}, Path()))


def run(checked: DecoderScenario, *rows: tuple[float, int, int], prefixes: Any = None) -> DecoderResult:
    """Simulate requests, given their arrival in ms, prompt and new tokens; ``prefixes`` are numbers and tokens."""
    arrivals, prompts, new = map(np.array, zip(*rows, strict=True))
    numbers, tokens = (None, None) if prefixes is None else map(np.array, zip(*prefixes, strict=True))
    workload = DecoderWorkload(arrivals.astype(float), prompts, new, None, numbers, tokens)
    (result,) = simulate_decoder(checked, workload=workload)
    return result


def test_the_latest_request_is_preempted_and_recomputed() -> None:
    """Two prompts of 3 tokens and 3 blocks: the second request loses its block when both need another one.

    The first begins alone (13 ms), the second at 13 beside it (14 ms). At 27 the first has 4 tokens in its block, and
    takes the third one (12 ms). At 39 the second has 4 tokens, and is preempted: its prompt now has 5. The first ends
    at 61 with its fifth token. Then the second processes 5 tokens (15 ms), and has two more iterations of 11 ms.
    """
    result = run(scenario(12), (0.0, 3, 5), (0.0, 3, 5))
    assert result.first_ms == pytest.approx([13.0, 27.0])
    assert result.ends_ms == pytest.approx([61.0, 61.0 + 15.0 + 11.0 + 11.0])
    assert result.preempted.tolist() == [0, 1]
    assert result.most_reserved == 12
    assert result.gaps.sum() == 8


def test_blocks_admit_more_requests_than_reservations() -> None:
    """Of requests that reserve 4 + 12 - 1 slots each, two have room in 40; with a block of 4 each, all begin."""
    rows = [(0.0, 4, 12)] * 4
    blocks, slots = run(scenario(40), *rows), run(scenario(40, batching={"block": 0}), *rows)
    assert blocks.first_ms == pytest.approx([14.0, *[14.0 + 10 + 1 + 3 * 4] * 3])
    assert slots.first_ms[:2] == pytest.approx([14.0, 14.0 + 10 + 1 + 4])
    assert (slots.first_ms[2:] > 100.0).all()


def test_a_request_that_never_fits_is_refused() -> None:
    """Of 11 slots only two blocks of 4 are used; a request that needs 8 of them fits."""
    scheduler = BlockScheduler(2, 11, block=BLOCK)
    with pytest.raises(OptionError, match="needs 9 slots for keys and values, there are 8"):
        scheduler.submit(0, 5, 5)
    scheduler.submit(1, 5, 4)
    assert len(scheduler.select()) == 1
    assert run(scenario(11), (0.0, 5, 5), (0.0, 5, 4)).refused == 1


def test_a_kept_prefix_is_not_processed_again() -> None:
    """Of a prefix of 10 tokens two blocks of 4 are kept: the prompt of 12 then has 4 tokens, and a fresh one has 12."""
    result = run(scenario(100), (0.0, 12, 1), (50.0, 12, 1), (100.0, 12, 1), prefixes=[(7, 10), (7, 10), (8, 10)])
    assert result.ends_ms - result.workload.arrivals_ms == pytest.approx([22.0, 14.0, 22.0])
    assert result.reused == 8


def test_a_prefix_is_shared_once_it_is_computed() -> None:
    """A request that begins while another one computes the prefix computes its own; the blocks are then shared.

    After a request without a prefix, two with 3 blocks each begin at 11 and process 18 tokens. At 39 the fourth takes
    the two kept blocks and a new one, and processes one token beside theirs.
    """
    rows = ((0.0, 1, 1), (1.0, 9, 2), (1.0, 9, 2), (20.0, 9, 2))
    result = run(scenario(4 * 7), *rows, prefixes=[(-1, 0), *[(1, 8)] * 3])
    assert result.reused == 8
    assert result.first_ms == pytest.approx([11.0, 39.0, 39.0, 52.0])
    assert result.most_reserved == 4 * 7


def test_the_least_recently_used_prefix_makes_room() -> None:
    """Prefixes 1, 2 and 1 again fill 4 blocks; the third needs two: prefix 2 goes, and prefix 1 is still kept."""
    rows = [(100.0 * at, 9, 1) for at in range(5)]
    numbers = [1, 2, 1, 3, 1]
    result = run(scenario(4 * 5), *rows, prefixes=[(number, 8) for number in numbers])
    spans_ms = result.ends_ms - result.workload.arrivals_ms
    assert spans_ms == pytest.approx([19.0, 19.0, 11.0, 19.0, 11.0])


def test_a_prompt_is_never_empty() -> None:
    """A prompt that is its prefix processes its last block again, since a token follows from it."""
    result = run(scenario(100), (0.0, 8, 1), (50.0, 8, 1), prefixes=[(1, 8)] * 2)
    assert result.ends_ms - result.workload.arrivals_ms == pytest.approx([18.0, 14.0])


class LiteralRequest:
    """A request of the literal loop."""

    def __init__(self, number: int, arrival_ms: float, prompt: int, new: int, prefix: tuple[int, int]) -> None:
        self.number, self.arrival_ms, self.new = number, arrival_ms, new
        self.todo, self.cached, self.made = prompt, 0, 0
        #: The ids of its blocks, of which the first ones may belong to its prefix, and the prefix's full blocks.
        self.blocks: list[int] = []
        self.prefix = prefix


class LiteralMemory:
    """Blocks with ids, and the prefixes whose blocks are kept."""

    def __init__(self, total: int, block: int) -> None:
        self.free, self.block = set(range(total)), block
        self.users: dict[int, set[int]] = {at: set() for at in range(total)}
        #: Blocks of a prefix in their order, and who computes them; the one that was released last is the last one.
        self.kept: dict[tuple[int, int], list[int]] = {}
        self.computed_by: dict[tuple[int, int], LiteralRequest | None] = {}

    def available(self, but: list[int]) -> int:
        """Return the blocks that are free, or kept without users, besides some."""
        idle = [at for blocks in self.kept.values() for at in blocks if not self.users[at] and at not in but]
        return len(self.free) + len(idle)

    def shared(self, request: LiteralRequest) -> list[int]:
        """Return the kept blocks that a request which begins need not compute."""
        owner = self.computed_by.get(request.prefix)
        computing = owner is not None and owner.cached < request.prefix[1] * self.block
        return [] if computing else self.kept.get(request.prefix, [])

    def take(self, request: LiteralRequest, count: int) -> None:
        """Give a request blocks; prefixes without users make room, the first ones first."""
        for prefix in list(self.kept):
            if len(self.free) >= count:
                break
            if not any(self.users[at] for at in self.kept[prefix]):
                self.free |= set(self.kept.pop(prefix))
                del self.computed_by[prefix]
        for _ in range(count):
            at = self.free.pop()
            self.users[at].add(request.number)
            request.blocks.append(at)

    def begin(self, request: LiteralRequest, count: int) -> None:
        """Give a request the blocks of its prompt."""
        shared = self.shared(request)
        for at in shared:
            self.users[at].add(request.number)
        request.blocks = [*shared]
        request.cached += len(shared) * self.block
        request.todo -= len(shared) * self.block
        self.take(request, count)
        if request.prefix[1] and request.prefix not in self.kept:
            self.kept[request.prefix] = request.blocks[: request.prefix[1]]
            self.computed_by[request.prefix] = request

    def give(self, request: LiteralRequest) -> None:
        """Take the blocks from a request; a prefix that it has not computed is forgotten."""
        for at in request.blocks:
            self.users[at].discard(request.number)
        kept = self.kept.get(request.prefix, [])
        if self.computed_by.get(request.prefix) is request:
            if request.cached < request.prefix[1] * self.block:
                self.kept.pop(request.prefix)
                del self.computed_by[request.prefix]
                kept = []
            else:
                self.computed_by[request.prefix] = None
        if kept and request.blocks[: len(kept)] == kept and not any(self.users[at] for at in kept):
            self.kept[request.prefix] = self.kept.pop(request.prefix)
        self.free |= {at for at in request.blocks if at not in kept}
        request.blocks = []


def literal_requests(workload: DecoderWorkload, block: int, total: int) -> list[LiteralRequest]:
    """Return the requests that fit."""
    found = []
    lengths = zip(workload.arrivals_ms.tolist(), workload.prompts.tolist(), workload.new.tolist(), strict=True)
    for number, (arrival_ms, prompt, new) in enumerate(lengths):
        prefix = (-1, 0)
        if workload.prefixes is not None and workload.prefix_tokens is not None:
            full = min(int(workload.prefix_tokens[number]), prompt - 1) // block
            prefix = (int(workload.prefixes[number]), full) if full else prefix
        if math.ceil((prompt + new - 1) / block) <= total:
            found.append(LiteralRequest(number, arrival_ms, prompt, new, prefix))
    return found


def literal_blocks(  # noqa: PLR0915 - one algorithm
    checked: DecoderScenario, workload: DecoderWorkload
) -> tuple[list[float], list[float], list[int]]:
    """Return first tokens, ends and preemptions, with a queue of waiting requests and one of running requests."""
    batching, total = checked.batching, checked.slots // checked.batching.block
    number = len(workload.arrivals_ms)
    first, ends, preempted = [math.nan] * number, [math.nan] * number, [0] * number
    coming = literal_requests(workload, batching.block, total)
    waiting: list[LiteralRequest] = []
    running: list[LiteralRequest] = []
    memory, now_ms = LiteralMemory(total, batching.block), 0.0
    while coming or waiting or running:
        if not waiting and not running:
            now_ms = max(now_ms, coming[0].arrival_ms)
        while coming and coming[0].arrival_ms <= now_ms:
            waiting.append(coming.pop(0))
        batch: list[tuple[LiteralRequest, int]] = []
        cut = False  # by a request that preempted itself
        for request in (*running,):
            if request not in running or len(batch) == batching.max_batch:
                break
            needed = 0 if request.todo else math.ceil((request.cached + 1) / batching.block) - len(request.blocks)
            while request in running and needed > memory.available([]):
                victim = running.pop()
                memory.give(victim)
                victim.todo, victim.cached = victim.cached + max(victim.todo, 1), 0
                waiting.insert(0, victim)
                preempted[victim.number] += 1
            if request not in running:
                cut = True
                break
            memory.take(request, needed)
            batch.append((request, min(request.todo, batching.chunk or request.todo) or 1))
        while waiting and not cut and len(batch) < batching.max_batch:
            request = waiting[0]
            shared = memory.shared(request)
            needed = math.ceil(request.todo / batching.block) - len(shared)
            if memory.available(shared) - needed < (total // 100 if running else 0):
                break
            running.append(waiting.pop(0))
            memory.begin(request, needed)
            batch.append((request, min(request.todo, batching.chunk or request.todo)))
        now_ms += 10.0 + sum(tokens for _, tokens in batch)
        for request, tokens in batch:
            request.cached += tokens
            request.todo = max(0, request.todo - tokens)
            if request.todo:
                continue
            request.made += 1
            if request.made == 1:
                first[request.number] = now_ms
            if request.made == request.new:
                ends[request.number] = now_ms
                memory.give(request)
                running.remove(request)
    assert memory.available([]) == total
    return first, ends, preempted


@examples(80)
@given(
    st.fixed_dictionaries({"max_batch": st.integers(1, 8), "chunk": st.sampled_from([0, 1, 3, 16])}),
    st.integers(1, 7),
    st.sampled_from([40, 90, 700]),
    st.floats(2.0, 60.0),
    st.sampled_from([{}, {"prefixes": 2, "prefix_tokens": 9}, {"prefixes": 5, "prefix_tokens": 25}]),
    st.integers(0, 1000),
)
def test_it_is_the_loop_of_two_queues(
    batching: dict[str, int], block: int, slots: int, rate: float, prefixes: dict[str, int], seed: int
) -> None:
    """Requests get first tokens, end and are preempted as in the literal loop."""
    spec = {"requests": 60, "rate_per_s": rate, "prompt_least": 1, "prompt_most": 30, "new_most": 25, **prefixes}
    checked = scenario(slots, seed=seed, batching={**batching, "block": block}, requests=spec)
    (result,) = simulate_decoder(checked)
    first, ends, preempted = literal_blocks(checked, result.workload)
    np.testing.assert_allclose(result.first_ms, first)
    np.testing.assert_allclose(result.ends_ms, ends)
    assert result.preempted.tolist() == preempted
    assert result.most_reserved <= slots


@examples(60)
@given(st.data())
def test_blocks_are_conserved(data: st.DataObject) -> None:
    """Blocks of a scheduler hold the tokens of its requests, are never more than there are, and all return."""
    slots, max_batch = data.draw(st.integers(8, 60)), data.draw(st.integers(1, 5))
    scheduler = BlockScheduler(max_batch, slots, block=BLOCK, chunk=data.draw(st.sampled_from([0, 3])))
    left: dict[int, int] = {}
    for number in range(data.draw(st.integers(1, 12))):
        new = data.draw(st.integers(1, 8))
        prompt = data.draw(st.integers(1, slots // BLOCK * BLOCK - new + 1))
        left[number] = new
        scheduler.submit(number, prompt, new)
        scheduler.set_prefix(number, data.draw(st.integers(0, 2)), data.draw(st.integers(0, prompt)))
    for _ in range(10_000):
        batch = scheduler.select()
        if not batch:
            break
        begun = [request for request in scheduler.pool.values() if request.phase is not Phase.INITIATION]
        assert scheduler.reserved <= slots
        chosen = {share.number: share.tokens for share in batch}
        assert max(request.past + chosen.get(request.number, 0) for request in begun) <= scheduler.reserved
        for share in batch:
            left[share.number] -= share.last
        scheduler.complete([share.number for share in batch if not left[share.number]])
    assert not scheduler.pool
    assert scheduler.reserved == scheduler.waiting == 0
    assert set(left.values()) == {0}


@examples(20)
@given(st.integers(1, 6), st.sampled_from([0, 5]), st.integers(0, 1000))
def test_ample_blocks_are_reservations(max_batch: int, chunk: int, seed: int) -> None:
    """If no request ever waits for memory, it does not matter how requests get theirs."""
    spec = {"requests": 50, "rate_per_s": 20.0, "prompt_least": 1, "prompt_most": 30, "new_most": 25}
    ends_ms = []
    for block in (0, 4):
        batching = {"max_batch": max_batch, "chunk": chunk, "block": block}
        (result,) = simulate_decoder(scenario(10_000, seed=seed, batching=batching, requests=spec))
        ends_ms.append(result.ends_ms)
    np.testing.assert_array_equal(ends_ms[0], ends_ms[1])


@examples(20)
@given(st.integers(1, 4), st.integers(1, 40), st.sampled_from([0, 7]), st.integers(0, 1000))
def test_all_tokens_but_the_reused_ones_are_processed(prefixes: int, tokens: int, chunk: int, seed: int) -> None:
    """Iterations take 10 ms, and 1 ms for each token: of prompts without kept prefixes, and new ones but the last."""
    lengths = {"prompt_least": 1, "prompt_most": 50, "new_most": 20, "prefixes": prefixes, "prefix_tokens": tokens}
    spec = {"requests": 60, "rate_per_s": 30.0, **lengths}
    (result,) = simulate_decoder(scenario(9000, seed=seed, batching={"chunk": chunk}, requests=spec))
    assert result.preempted.sum() == 0
    processed = result.workload.prompts.sum() + (result.workload.new - 1).sum() - result.reused
    assert result.utilisation * result.took_ms == pytest.approx(10.0 * result.iterations + processed)
