"""Simulated fixed batches against a transcription of FasterTransformer's policy in SimPy.

It is written from ``docs/simulate-decoders.md`` ("The model") alone and shares nothing with the scheduler.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import simpy
from hypothesis import given
from hypothesis import strategies as st

from chrion.serving.simulator.decoder_scenario import DecoderScenario, build_decoder_scenario
from chrion.serving.simulator.iterations import draw_requests, simulate_decoder
from chrion.serving.simulator.scenario import ScenarioSource
from property_tests import examples


@dataclass
class Row:
    """A request of a fixed batch."""

    number: int
    prompt: int
    new: int
    #: Tokens in the cache, and generated tokens.
    past: int = 0
    made: int = 0

    @property
    def slots(self) -> int:
        """The tokens that it may have in the cache."""
        return self.prompt + self.new - 1

    @property
    def ended(self) -> bool:
        """Whether it has all its tokens."""
        return self.made == self.new


class FixedBatches:
    """The policy of FasterTransformer.

    Attributes:
        first_ms: When requests got their first token; NaN if they were refused.
        ends_ms: When they were returned.
    """

    def __init__(self, checked: DecoderScenario) -> None:
        self._checked, self._workload = checked, draw_requests(checked)
        count = len(self._workload.arrivals_ms)
        self.first_ms, self.ends_ms = [float("nan")] * count, [float("nan")] * count
        self._waiting: list[Row] = []
        self._running: list[list[Row]] = []
        self._environment = simpy.Environment()
        self._workers = [simpy.Resource(self._environment, 1) for _ in range(checked.batching.n_workers)]
        self._environment.process(self._clients())
        self._environment.run()

    def _clients(self) -> Generator[simpy.Event, None, None]:
        for number, arrival_ms in enumerate(self._workload.arrivals_ms):
            yield self._environment.timeout(float(arrival_ms) - self._environment.now)
            row = Row(number, int(self._workload.prompts[number]), int(self._workload.new[number]))
            if row.slots <= self._checked.slots:
                self._waiting.append(row)
                self._begin()

    def _begin(self) -> None:
        """Fix new batches while there are workers for them."""
        while len(self._running) < len(self._workers):
            free = self._checked.slots - sum(row.slots for rows in self._running for row in rows)
            batch: list[Row] = []
            while self._waiting and len(batch) < self._checked.batching.max_batch and self._waiting[0].slots <= free:
                free -= self._waiting[0].slots
                batch.append(self._waiting.pop(0))
            if not batch:
                return
            self._running.append(batch)
            self._environment.process(self._serve(batch))

    def _serve(self, batch: list[Row]) -> Generator[simpy.Event, None, None]:
        common = min(row.prompt for row in batch)  # what is left of it for the first iterations
        while not all(row.ended for row in batch):
            most = max(1, min(common, self._checked.batching.chunk or common))
            common -= min(common, most)
            tokens = [min(most, row.prompt - row.past) if row.past < row.prompt else 1 for row in batch]
            choosing = [
                row
                for row, count in zip(batch, tokens, strict=True)
                if not row.ended and row.past + count >= row.prompt
            ]
            took_ms = self._checked.iteration_ms(tokens, [row.past for row in batch], len(choosing))
            for worker in self._workers:
                with worker.request() as turn:
                    yield turn
                    yield self._environment.timeout(took_ms / len(self._workers))
            for row, count in zip(batch, tokens, strict=True):
                row.past += 0 if row.ended else count
            for row in choosing:
                row.made += 1
                if row.made == 1:
                    self.first_ms[row.number] = self._environment.now
        for row in batch:
            self.ends_ms[row.number] = self._environment.now
        self._running.remove(batch)
        self._begin()


@examples(60)
@given(
    st.fixed_dictionaries(
        {"max_batch": st.integers(1, 6), "n_workers": st.integers(1, 3), "chunk": st.sampled_from([0, 0, 1, 7, 30])}
    ),
    st.integers(20, 200),
    st.floats(5.0, 400.0),
    st.integers(0, 1000),
)
def test_request_level_scheduling_is_fastertransformers(
    batching: dict[str, int], slots: int, rate: float, seed: int
) -> None:
    """Requests get their first tokens and end at the times of the transcription."""
    costs = {"fixed_ms": 3.0, "token_ms": 0.7, "request_ms": 0.2, "pair_ms": 0.01, "batch_ms": 0.4}
    content = {
        "seed": seed,
        "policies": ["request"],
        "decoder": {"slots": slots, "costs": costs, "prompt_costs": {"fixed_ms": 5.0}},
        "batching": batching,
        "requests": {"requests": 60, "rate_per_s": rate, "prompt_most": 40, "new_most": 20},
    }
    checked = build_decoder_scenario(ScenarioSource("test", content, Path()))
    (result,) = simulate_decoder(checked)
    expected = FixedBatches(checked)
    np.testing.assert_allclose(result.first_ms, expected.first_ms)
    np.testing.assert_allclose(result.ends_ms, expected.ends_ms)
