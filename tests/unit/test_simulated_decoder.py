"""Simulated decoders against queueing theory, arithmetic, and a transcription of Orca's Algorithm 2 in SimPy."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from chrion.errors import ChrionError
from chrion.serving.simulator.decoder_costs import IterationCosts
from chrion.serving.simulator.decoder_requests import DecoderWorkload
from chrion.serving.simulator.decoder_results import summarise
from chrion.serving.simulator.decoder_scenario import DecoderScenario, build_decoder_scenario
from chrion.serving.simulator.iterations import DecoderResult, draw_requests, simulate_decoder
from chrion.serving.simulator.scenario import ScenarioSource
from property_tests import examples


def scenario(**sections: Any) -> DecoderScenario:
    """Return a scenario; sections are tables of its file."""
    return build_decoder_scenario(ScenarioSource("test", {"decoder": {}, **sections}, Path()))


def fixed_lengths(prompt: int, new: int, **others: float) -> dict[str, float]:
    """Return a table of requests of equal lengths."""
    return {"prompt_least": prompt, "prompt_most": prompt, "new_least": new, "new_most": new, **others}


def only_fixed(fixed_ms: float, **decoder: float) -> dict[str, Any]:
    """Return the table of a decoder whose iterations all take the same time."""
    return {"costs": {"fixed_ms": fixed_ms, "token_ms": 0, "request_ms": 0, "pair_ms": 0}, **decoder}


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_one_token_and_no_batches_are_a_queue_of_constant_service(load: float) -> None:
    """A request waits as long as the one before it waits and is served, less the time between them (Lindley)."""
    service_ms = 10.0
    for result in simulate_decoder(
        scenario(
            decoder=only_fixed(service_ms),
            batching={"max_batch": 1},
            requests=fixed_lengths(1, 1, rate_per_s=100 * load, requests=2000),
        )
    ):
        waits_ms = [0.0]
        for gap_ms in np.diff(result.workload.arrivals_ms):
            waits_ms.append(max(0.0, waits_ms[-1] + service_ms - gap_ms))
        assert result.normalised_ms == pytest.approx(np.array(waits_ms) + service_ms)
        assert result.first_token_ms == pytest.approx(result.normalised_ms)


def test_the_cost_of_an_iteration() -> None:
    """Two requests of 3 and 1 new tokens after 0 and 4: 4 tokens, and 1 + 2 + 3 + 5 pairs."""
    costs = IterationCosts(fixed_ms=100.0, token_ms=10.0, request_ms=1.0, pair_ms=0.01)
    assert costs.iteration_ms([3, 1], [0, 4]) == pytest.approx(100 + 40 + 2 + 0.11)
    assert costs.iteration_ms([3, 1], [0, 4], chosen=1) == pytest.approx(100 + 40 + 1 + 0.11)
    batched = IterationCosts(0.0, 0.0, 0.0, 0.0, batch_ms=5.0)
    assert (batched.iteration_ms([1], [0]), batched.iteration_ms([1, 1], [0, 0])) == (0.0, 5.0)


def test_one_request_alone() -> None:
    """A prompt of 5 tokens and 3 new ones take one iteration of 5 tokens and two of one."""
    decoder = {"costs": {"fixed_ms": 2.0, "token_ms": 1.0, "request_ms": 0.5, "pair_ms": 0.25}}
    (result,) = simulate_decoder(
        scenario(decoder=decoder, policies=["iteration"], requests=fixed_lengths(5, 3, requests=1))
    )
    first_ms = 2 + 5 + 0.5 + 0.25 * 15
    assert result.first_token_ms == pytest.approx([first_ms])
    assert result.between_tokens_ms == pytest.approx([(2 * (2 + 1 + 0.5) + 0.25 * (6 + 7)) / 2])
    assert (result.iterations, result.mean_batch, result.most_reserved) == (3, 1.0, 7)


def test_iterations_with_prompts_have_costs_of_their_own() -> None:
    """Terms that they do not have are those of the other iterations; an iteration of single tokens has no prompt."""
    costs = {"fixed_ms": 2.0, "token_ms": 1.0, "request_ms": 0.5, "pair_ms": 0.0}
    checked = scenario(decoder={"costs": costs, "prompt_costs": {"fixed_ms": 7.0, "token_ms": 0.25}})
    assert checked.iteration_ms([1, 1], [0, 9]) == pytest.approx(2 + 2 + 1)
    assert checked.iteration_ms([4, 1], [0, 9]) == pytest.approx(7 + 5 * 0.25 + 1)
    source = ScenarioSource("test", checked.content, Path())
    changed = build_decoder_scenario(source.changed({"fixed_ms": 3.0, "decoder.prompt_costs.token_ms": 0.5}))
    assert (changed.costs.fixed_ms, changed.prompt_costs.fixed_ms, changed.prompt_costs.token_ms) == (3.0, 7.0, 0.5)


def test_a_prompt_in_chunks() -> None:
    """A prompt of 5 tokens in chunks of 2 takes three iterations, the last of which gives the first token."""
    (result,) = simulate_decoder(
        scenario(
            decoder=only_fixed(10.0),
            policies=["iteration"],
            batching={"chunk": 2},
            requests=fixed_lengths(5, 1, requests=1),
        )
    )
    assert (result.iterations, result.first_token_ms[0]) == (3, pytest.approx(30.0))


def test_fixed_batches_are_fastertransformers() -> None:
    """Prompts of 2 and 4 tokens with 2 and 1 new ones take iterations of 4, 2 and 2 tokens, and end together."""
    workload = DecoderWorkload(np.array([0.0, 1.0, 1.0]), np.array([10, 2, 4]), np.array([1, 2, 1]))
    costs = {"fixed_ms": 1.0, "token_ms": 10.0, "request_ms": 0.0, "pair_ms": 0.0}
    (result,) = simulate_decoder(scenario(decoder={"costs": costs}, policies=["request"]), workload=workload)
    assert result.first_ms == pytest.approx([101.0, 101 + 41, 101 + 41 + 21 + 21])
    assert result.ends_ms == pytest.approx([101.0, 184.0, 184.0])
    assert result.iterations == 4


def test_measured_times_by_batch() -> None:
    """Times between measured batches are interpolated; beyond the last one they grow as between the last two."""
    costs = {"tokens": [1, 4, 8], "ms": [10.0, 16.0, 20.0], "request_ms": 0.5, "pair_ms": 0.25}
    checked = scenario(decoder={"costs": costs, "prompt_costs": {"tokens": [16], "ms": [30.0]}})
    for batch, time_ms in ((1, 10.0), (2, 12.0), (4, 16.0), (6, 18.0), (8, 20.0), (12, 24.0)):
        assert checked.iteration_ms([1] * batch, [3] * batch) == pytest.approx(time_ms + 0.5 * batch + 0.25 * 4 * batch)
    assert checked.iteration_ms([5, 1], [0, 2]) == 30.0
    assert checked.iteration_ms([64], [0]) == 30.0
    same = scenario(decoder={"costs": costs, "prompt_costs": {"pair_ms": 0.0}})
    assert same.iteration_ms([5, 1], [0, 2]) == pytest.approx(18.0 + 2 * 0.5)


def test_objectives_decide_goodput() -> None:
    """Both have to be met; one token has no times between tokens, and a refused request meets none."""
    workload = DecoderWorkload(np.array([0.0, 100.0, 102.0, 300.0]), np.array([1, 1, 1, 99]), np.array([1, 3, 1, 9]))
    found = []
    first, between = {"first_token_ms": 10.0}, {"between_tokens_ms": 9.0}
    for slo in ({}, first, between, {**first, **between}):
        sections = {"policies": ["iteration"], "batching": {"max_batch": 1}, "slo": slo}
        (result,) = simulate_decoder(scenario(decoder=only_fixed(10.0, slots=50), **sections), workload=workload)
        assert result.ends_ms[:3] == pytest.approx([10.0, 130.0, 140.0])
        summary = summarise(result)
        found.append(result.met)
        assert summary.violations == pytest.approx(1 - result.met / 4)
        expected = 1e3 * result.met / 140.0 if slo else float("nan")
        assert summary.goodput_per_s == pytest.approx(expected, nan_ok=True)
    assert found == [3, 2, 2, 1]


@pytest.mark.parametrize(("chunk", "gaps_ms"), [(0, [10.0, 18.0, 10.0, 10.0]), (2, [10.0, 12.0, 12.0, 12.0])])
def test_times_between_tokens_are_those_of_iterations(chunk: int, gaps_ms: list[float]) -> None:
    """A prompt of 8 tokens makes the third iteration of another request longer; in chunks of 2, the last three."""
    workload = DecoderWorkload(np.array([0.0, 11.0]), np.array([1, 8]), np.array([5, 1]))
    costs = {"fixed_ms": 9.0, "token_ms": 1.0, "request_ms": 0.0, "pair_ms": 0.0}
    sections = {"policies": ["iteration"], "batching": {"chunk": chunk}, "decoder": {"costs": costs}}
    (result,) = simulate_decoder(scenario(**sections), workload=workload)
    assert result.first_ms[0] == pytest.approx(10.0)
    assert result.ends_ms[0] == pytest.approx(10.0 + sum(gaps_ms))
    assert result.gaps.sum() == len(gaps_ms)
    assert summarise(result).gap_p99_ms == pytest.approx(max(gaps_ms), rel=0.006)


def test_throughput_at_saturation() -> None:
    """Iteration-level: every iteration is full. Request-level: a batch takes as long as its longest request.

    With B = 4 and n tokens uniform from 1 to 16 the means are B / (E[n] t) and B / (E[max of B] t).
    """
    batch, most, iteration_ms = 4, 16, 10.0
    results = simulate_decoder(
        scenario(
            decoder=only_fixed(iteration_ms),
            policies=["iteration", "request"],
            batching={"max_batch": batch},
            requests=fixed_lengths(1, 1, rate_per_s=1e4, requests=2000, new_most=most),
        )
    )
    at_most = np.arange(1, most + 1) / most
    longest = float((np.arange(1, most + 1) * np.diff(at_most**batch, prepend=0.0)).sum())
    for result, tokens in zip(results, ((1 + most) / 2, longest), strict=True):
        assert result.requests_per_s == pytest.approx(1e3 * batch / (tokens * iteration_ms), rel=0.03)
        assert result.served == 2000


def test_workers_overlap() -> None:
    """With two workers and enough requests, two batches are in flight, and throughput doubles."""
    found = [
        simulate_decoder(
            scenario(
                decoder=only_fixed(10.0),
                policies=["iteration"],
                batching={"max_batch": 4, "n_workers": workers},
                requests=fixed_lengths(1, 8, rate_per_s=1e4, requests=800),
            )
        )[0].requests_per_s
        for workers in (1, 2)
    ]
    assert found[1] / found[0] == pytest.approx(2.0, rel=0.02)


def test_slots_are_never_exceeded_and_requests_without_room_are_refused() -> None:
    """A request of prompt p and n new tokens needs p + n - 1 slots."""
    spec = {"prompt_least": 1, "prompt_most": 40, "new_least": 1, "new_most": 40, "requests": 500, "rate_per_s": 50.0}
    checked = scenario(decoder=only_fixed(5.0, slots=60), requests=spec)
    workload = draw_requests(checked)
    too_long = int((workload.prompts + workload.new - 1 > 60).sum())
    assert too_long > 0
    for result in simulate_decoder(checked):
        assert result.refused == too_long
        assert result.most_reserved <= 60
        assert 0 < result.mean_reserved <= result.most_reserved
        assert np.isnan(result.ends_ms).sum() == too_long


@pytest.mark.parametrize("policy", ["iteration", "request"])
def test_a_refused_last_request_does_not_count(policy: str) -> None:
    """Figures over time are over that until the last end, however late a request without room arrives."""
    arrivals_ms, lengths = np.array([2.0, 2.0, 500.0]), np.array([3, 3, 90])
    workload = DecoderWorkload(arrivals_ms, lengths, np.array([2, 2, 2]))
    checked = scenario(decoder=only_fixed(10.0, slots=50), policies=[policy], batching={"max_batch": 2})
    (result,) = simulate_decoder(checked, workload=workload)
    assert (result.served, result.refused) == (2, 1)
    ends_ms = {"iteration": [22.0, 32.0], "request": [22.0, 42.0]}[policy]  # the first request begins alone
    assert result.ends_ms[:2] == pytest.approx(ends_ms)
    took_ms = ends_ms[1] - 2.0
    assert result.took_ms == pytest.approx(took_ms)
    assert result.requests_per_s == pytest.approx(2e3 / took_ms)
    reserved_ms = 4 * (22.0 - 2.0) + 4 * ({"iteration": 32.0 - 12.0, "request": 42.0 - 22.0}[policy])
    assert result.mean_reserved == pytest.approx(reserved_ms / took_ms)


def literal_orca(checked: DecoderScenario) -> tuple[list[float], list[float]]:  # noqa: PLR0915 - one algorithm
    """Return when requests get their first token and end, by Algorithm 2 as published, on SimPy's clock."""
    workload, batching = draw_requests(checked), checked.batching
    environment = simpy.Environment()
    workers = [simpy.Resource(environment, 1) for _ in range(batching.n_workers)]
    pool: list[dict[str, Any]] = []
    state = {"reserved": 0, "scheduled": 0}
    news = [environment.event()]

    def tell() -> None:
        news[0].succeed()
        news[0] = environment.event()

    def client() -> Generator[simpy.Event, Any, None]:
        for number, at in enumerate(workload.arrivals_ms):
            yield environment.timeout(float(at) - environment.now)
            prompt, new = int(workload.prompts[number]), int(workload.new[number])
            if prompt + new - 1 <= checked.slots:
                entry = {"number": number, "state": "INITIATION", "prompt": prompt, "new": new, "past": 0, "made": 0}
                pool.append(entry)
                tell()

    def select() -> list[dict[str, Any]]:
        batch: list[dict[str, Any]] = []
        for request in [r for r in pool if r["state"] != "RUNNING"]:
            if len(batch) == batching.max_batch:
                break
            if request["state"] == "INITIATION":
                needed = request["prompt"] + request["new"] - 1
                if state["reserved"] + needed > checked.slots:
                    break
                state["reserved"] += needed
            batch.append(request)
        return batch

    def engine(batch: list[dict[str, Any]]) -> Generator[simpy.Event, Any, None]:
        tokens = [1 if r["past"] else r["prompt"] for r in batch]
        span = checked.iteration_ms(tokens, [r["past"] for r in batch])
        for worker in workers:
            with worker.request() as turn:
                yield turn
                yield environment.timeout(span / len(workers))
        for request, count in zip(batch, tokens, strict=True):
            request["past"] += count
            request["made"] += 1
            request["state"] = "INCREMENT"
            if request["made"] == 1:
                first[request["number"]] = environment.now
            if request["made"] == request["new"]:
                ends[request["number"]] = environment.now
                state["reserved"] -= request["prompt"] + request["new"] - 1
                pool.remove(request)
        state["scheduled"] -= 1
        tell()

    def scheduler() -> Generator[simpy.Event, Any, None]:
        while True:
            batch = select() if state["scheduled"] < batching.n_workers else []
            if not batch:
                yield news[0]
                continue
            for request in batch:
                request["state"] = "RUNNING"
            state["scheduled"] += 1
            environment.process(engine(batch))

    count = len(workload.arrivals_ms)
    first, ends = [float("nan")] * count, [float("nan")] * count
    environment.process(client())
    environment.process(scheduler())
    environment.run()
    return first, ends


@examples(60)
@given(
    st.fixed_dictionaries({"max_batch": st.integers(1, 6), "n_workers": st.integers(1, 3)}),
    st.integers(20, 200),
    st.floats(5.0, 400.0),
    st.integers(0, 1000),
)
def test_iteration_level_scheduling_is_orcas(batching: dict[str, int], slots: int, rate: float, seed: int) -> None:
    """Requests get their first tokens and end at the times of the literal transcription."""
    checked = scenario(
        seed=seed,
        policies=["iteration"],
        decoder={
            "slots": slots,
            "costs": {"fixed_ms": 3.0, "token_ms": 0.7, "request_ms": 0.2, "pair_ms": 0.01},
            "prompt_costs": {"fixed_ms": 5.0},
        },
        batching=batching,
        requests={"requests": 60, "rate_per_s": rate, "prompt_most": 40, "new_most": 20},
    )
    (result,) = simulate_decoder(checked)
    first, ends = literal_orca(checked)
    np.testing.assert_allclose(result.first_ms, first)
    np.testing.assert_allclose(result.ends_ms, ends)


def test_the_same_requests_for_all_policies() -> None:
    """Policies are compared on equal requests, and a seed gives the same results again."""
    results = simulate_decoder(scenario(requests={"requests": 50}))
    assert [result.policy for result in results] == ["iteration", "request"]
    assert results[0].workload is results[1].workload
    again = simulate_decoder(scenario(requests={"requests": 50}))
    for one, other in zip(results, again, strict=True):
        np.testing.assert_array_equal(one.ends_ms, other.ends_ms)


def test_progress_ends_with_all_requests() -> None:
    """The number never falls, and ends with the requests of all policies."""
    told: list[int] = []
    simulate_decoder(scenario(requests=fixed_lengths(1, 1, requests=600, rate_per_s=3.0)), told.append)
    assert told == sorted(told)
    assert told[-1] == 1200
    assert len(told) > 4


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"batching": {"max_batsh": 3}}, "batching: unknown key 'max_batsh'"),
        ({"batching": {"max_batch": 0}}, "batching.max_batch: expected a whole number of at least 1"),
        ({"decoder": {"costs": {"fixed_ms": "3"}}}, "decoder.costs.fixed_ms: expected a number"),
        ({"decoder": only_fixed(0.0)}, "decoder.costs: expected a term above 0"),
        ({"decoder": {"prompt_costs": {"fixed": 1}}}, "decoder.prompt_costs: unknown key 'fixed'"),
        ({"decoder": {"prompt_costs": only_fixed(0.0)["costs"]}}, "decoder.prompt_costs: expected a term above 0"),
        ({"decoder": {"prompt_costs": 1}}, "decoder.prompt_costs: expected a table, found 1"),
        ({"policies": ["fifo"]}, "policies[0]: expected one of iteration, request"),
        ({"policies": ["request", "request"]}, "policies = ['request', 'request']: a policy occurs twice"),
        ({"seed": -1}, "seed: expected a whole number of at least 0"),
        ({"requests": {"new_least": 9, "new_most": 3}}, "requests.new_least: expected at most new_most = 3"),
        ({"requests": 3}, "requests: expected a table, found 3"),
        ({"models": []}, "models: not in a scenario with [decoder]"),
        ({"requests": {"requests": 10**9}}, "requests.requests: expected a whole number of at most 1e+07"),
        ({"decoder": {"weights_gb": 2.0}}, "decoder.weights_gb: has no effect without hardware"),
        (
            {"decoder": {"costs": {"tokens": [1, 4], "ms": [2.0]}}},
            "decoder.costs.ms: expected as many times as tokens, 2, found 1",
        ),
        (
            {"decoder": {"costs": {"tokens": [4, 1], "ms": [2.0, 3.0]}}},
            "decoder.costs.tokens: expected ascending numbers, found [4, 1]",
        ),
        ({"decoder": {"costs": {"tokens": [1], "ms": [0.0]}}}, "decoder.costs.ms[0]: expected a number above 0"),
        ({"batching": {"block": 16}}, "batching.block: request-level scheduling reserves all slots of a request"),
        (
            {"policies": ["iteration"], "batching": {"block": 16, "n_workers": 2}},
            "batching.n_workers = 2: expected 1 with batching.block",
        ),
        (
            {"policies": ["iteration"], "decoder": {"slots": 15}, "batching": {"block": 16}},
            "batching.block: expected at most the 15 slots of the memory, found 16",
        ),
        (
            {"requests": {"prefixes": 2, "prefix_tokens": 8}},
            "requests.prefixes: keys and values of prefixes are kept in blocks",
        ),
        (
            {"replicas": {"routing": "prefix"}},
            "replicas.routing = 'prefix': keys and values of prefixes are kept in blocks",
        ),
        ({"requests": {"prefixes": 2}}, "requests.prefixes and requests.prefix_tokens: expected both or none"),
        ({"replicas": {"routing": "session"}}, "replicas.routing = 'session': no request has a session"),
        ({"replicas": {"count": 0}}, "replicas.count: expected a whole number of at least 1"),
        ({"slo": {"first_token_ms": -1}}, "slo.first_token_ms: expected a number of at least 0"),
    ],
)
def test_errors_name_the_key(sections: dict[str, Any], message: str) -> None:
    """A scenario that is not valid is refused before the simulation."""
    with pytest.raises(ChrionError) as found:
        scenario(**sections)
    assert str(found.value).startswith(f"test.toml: {message}")


def test_values_are_changed_by_key() -> None:
    """A key is a path or its last part; the source is not changed."""
    source = ScenarioSource("test", {"decoder": {"costs": {"fixed_ms": 4.0}}}, Path())
    changed = build_decoder_scenario(source.changed({"max_batch": 3, "decoder.costs.token_ms": 0.5, "seed": 7}))
    assert (changed.batching.max_batch, changed.costs.token_ms, changed.costs.fixed_ms, changed.seed) == (
        3,
        0.5,
        4.0,
        7,
    )
    assert build_decoder_scenario(source).batching.max_batch == 8
    with pytest.raises(ChrionError, match="unknown key 'batch'"):
        build_decoder_scenario(source.changed({"batch": 3}))


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ({"decoder": 1}, "decoder"),
        ({"decoder": {"costs": 1}}, "costs"),
        ({"decoder": {}, "batching": 1}, "batching"),
    ],
)
def test_values_are_changed_in_tables_only(content: dict[str, Any], where: str) -> None:
    """A value in the place of a table is refused, also if a key of the table is changed."""
    source = ScenarioSource("test", content, Path())
    for changed in (source, source.changed({"fixed_ms": 3.0, "max_batch": 2})):
        with pytest.raises(ChrionError, match=f"{where}: expected a table, found 1"):
            build_decoder_scenario(changed)


def test_figures_of_a_result_without_requests() -> None:
    """If all requests are refused there are no latencies, and no division fails."""
    results: tuple[DecoderResult, ...] = simulate_decoder(
        scenario(decoder=only_fixed(1.0, slots=1), requests=fixed_lengths(5, 5, requests=3))
    )
    for result in results:
        assert (result.served, result.refused, result.requests_per_s) == (0, 3, 0.0)
        assert len(result.normalised_ms) == len(result.first_token_ms) == 0
