"""GPG: its equations by hand, its gradient, and what it learns."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import chrion
from chrion.errors import OptionError
from chrion.graph.blocks import cut_modules
from chrion.graph.dag import Dag
from chrion.scheduler.policies.endings import endings
from chrion.scheduler.policies.ios_search import search_stages
from chrion.scheduler.search.stages import CountedCost, generation_stages
from chrion.zoo import build
from property_tests import examples
from strategies import dags

eqx = pytest.importorskip("equinox", reason="the extra learn: no equinox in this environment")
jax = pytest.importorskip("jax", reason="the extra learn: no JAX in this environment")
pytest.importorskip("optax", reason="the extra learn: no optax in this environment")
pytest.importorskip("safetensors", reason="the extra learn: no safetensors in this environment")
jnp = jax.numpy
check_grads = importlib.import_module("jax.test_util").check_grads
gpg, networks_of, operators, walks = (
    importlib.import_module(f"chrion.learning.{name}") for name in ("gpg", "networks", "operators", "walks")
)
NUMBERS = operators.NUMBERS

SMALL = ((32,), (32,))
#: Walks of a training; after half of them the agent has learnt.
WALKS = 256


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """Compile without optimisation: the tests compute little, and compile much."""
    jax.config.update("jax_disable_most_optimizations", True)  # noqa: FBT003 - JAX's interface
    yield
    jax.config.update("jax_disable_most_optimizations", False)  # noqa: FBT003


def apply(layers: Any, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the output of layers, computed by numpy."""
    for layer in layers.layers[:-1]:
        x = np.maximum(np.asarray(layer.weight) @ x + np.asarray(layer.bias), 0)
    last = layers.layers[-1]
    return np.asarray(last.weight) @ x + np.asarray(last.bias)


def test_the_embeddings_are_those_of_equations_5_and_6() -> None:
    """Each operator adds its state to h1 of the sum of g1 over its parents; leaves by g2 and h2."""
    networks = gpg.GpgNetworks("corrected", 0, hidden=SMALL)
    dag = Dag.from_edges(4, [(0, 2), (1, 2), (2, 3), (0, 3)])
    state = np.random.default_rng(0).random((4, NUMBERS)).astype(np.float32)
    parents = np.zeros((4, 4), np.float32)
    expected: list[np.ndarray[Any, Any]] = []
    for v, before in enumerate(dag.predecessors):
        parents[v, list(before)] = 1
        messages = sum((apply(networks.g1, expected[u]) for u in before), np.zeros(NUMBERS))
        expected.append(apply(networks.h1, messages) + state[v])
    found = eqx.filter_jit(gpg.embed)(networks, jnp.asarray(state), jnp.asarray(parents))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    z = apply(networks.h2, apply(networks.g2, expected[1]) + apply(networks.g2, expected[3]))
    np.testing.assert_allclose(gpg.embed_leaves(networks, found, jnp.array([0.0, 1, 0, 1])), z, atol=1e-5)


def test_an_ending_is_scored_with_its_operators_and_the_leaves() -> None:
    """The softmax of the policy of z, h3 of the sum of g3 over members, and further numbers; none beyond the count."""
    networks = gpg.GpgNetworks("corrected", 0, hidden=SMALL)
    random_ = np.random.default_rng(0)
    embeddings = random_.random((2, NUMBERS)).astype(np.float32)
    leaves, members = np.array([[1.0, 1]]), np.array([[[1.0, 0], [1, 1], [0, 0]]])
    numbers, counts = random_.random((1, 3, walks.ENDING_NUMBERS)).astype(np.float32), np.array([2])
    found = gpg.log_probabilities(networks, embeddings, (leaves, members, numbers, counts))
    z = apply(networks.h2, sum(apply(networks.g2, own) for own in embeddings))
    first, second = (apply(networks.g3, own) for own in embeddings)
    scores = [
        apply(networks.policy, np.concatenate([z, apply(networks.h3, sent), own]))[0]
        for sent, own in zip((first, first + second), numbers[0], strict=False)
    ]
    expected = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose(np.exp(found[0]), [*expected, 0.0], atol=1e-5)


def test_an_advantage_is_the_difference_to_the_other_walks() -> None:
    """Two walks of 0.6 and 0.8 of the operators' work: each is compared with the other, for the work that is left."""
    first, second = gpg.advantages_of(
        [np.array([0.3, 0.3]), np.array([0.2, 0.6])], [np.array([1.0, 0.5]), np.array([1.0, 0.9])]
    )
    spread = 0.1 + 1e-3
    np.testing.assert_allclose(first, [(0.8 - 0.6) / spread, (0.8 * 0.5 - 0.3) / spread])
    np.testing.assert_allclose(second, [(0.6 - 0.8) / spread, (0.6 * 0.9 - 0.6) / spread])


def test_equal_walks_teach_nothing() -> None:
    """If all walks are alike and in proportion to the work, no advantage is left."""
    found = gpg.advantages_of([np.array([0.4, 0.2])] * 3, [np.array([1.0, 1 / 3])] * 3)
    np.testing.assert_allclose(found, 0, atol=1e-9)


def in_double(networks: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float64) if eqx.is_array(leaf) else leaf, networks)


def random_state(n: int) -> Any:
    return jnp.asarray(np.random.default_rng(1).random((n, NUMBERS)))


def test_the_gradient_is_that_of_finite_differences() -> None:
    """The gradient of walks through a block is the slope of their loss, for all networks, in double precision."""
    with jax.enable_x64(new_val=True):
        random_ = np.random.default_rng(0)
        networks = in_double(gpg.GpgNetworks("corrected", 0, hidden=((8,), (8,))))
        parameters, rest = eqx.partition(networks, eqx.is_array)
        state, parents = random_state(4), jnp.tril(jnp.ones((4, 4)), -1)
        seen = (
            random_.integers(0, 2, (3, 4)).astype(float),
            random_.integers(0, 2, (3, 5, 4)).astype(float),
            random_.random((3, 5, walks.ENDING_NUMBERS)),
            np.array([5, 3, 1]),
        )
        taken, advantages = np.array([4, 0, 0]), np.array([1.5, -0.5, 0.0])

        def loss(own: Any) -> Any:
            return gpg.walks_loss(eqx.combine(own, rest), state, parents, seen, taken, advantages)

        check_grads(jax.jit(loss), (parameters,), order=1, modes=["rev"], eps=1e-6)


def test_gpg_s_step_is_that_of_equations_7_and_8() -> None:
    """The value network moves by the TD error times its slope, the policy by its slope times that of the value."""
    networks = gpg.GpgNetworks("printed", 0, hidden=SMALL)
    state = random_state(2)
    parents = jnp.array([[0.0, 0], [1, 0]])
    leaves, after, action, reward = jnp.array([0.0, 1]), jnp.array([1.0, 0]), jnp.array(0.4), 0.7
    gradient = eqx.filter_jit(gpg.step_gradient)(networks, state, parents, leaves, after, action, reward, 1.0)

    def act(own: Any, mask: Any) -> tuple[Any, Any]:
        z = gpg.embed_leaves(own, gpg.embed(own, state, parents), mask)
        return z, jax.nn.sigmoid(own.policy(z)[0])

    def value(own: Any, z: Any, m: Any) -> Any:
        return own(jnp.concatenate([z, m[None]]))[0]

    z, m = act(networks, leaves)
    error = value(networks.value, z, action) - (reward + 0.95 * value(networks.value, *act(networks, after)))
    slope = eqx.filter_grad(lambda own: value(own, z, action))(networks.value)
    np.testing.assert_allclose(gradient.value.layers[0].weight, error * slope.layers[0].weight, atol=1e-5)
    steepness = jax.grad(lambda own: value(networks.value, z, own))(m)
    policy = eqx.filter_grad(lambda own: act(own, leaves)[1])(networks)
    for name in ("policy", "h2", "g2", "h1", "g1"):
        own, expected = getattr(gradient, name).layers[0].weight, getattr(policy, name).layers[0].weight
        np.testing.assert_allclose(own, -steepness * expected, atol=1e-6)


def test_the_slope_of_the_policy_is_that_of_finite_differences() -> None:
    """Equation 8: the policy's bias moves the action by its measured slope times the measured slope of the value."""
    with jax.enable_x64(new_val=True):
        networks = in_double(gpg.GpgNetworks("printed", 0, hidden=SMALL))
        state, parents, leaves = random_state(2), jnp.zeros((2, 2)), jnp.ones(2)
        gradient = eqx.filter_jit(gpg.step_gradient)(networks, state, parents, leaves, leaves, jnp.array(0.5), 0.3, 0.0)
        bias = networks.policy.layers[-1].bias

        def action(shift: float) -> Any:
            own = eqx.tree_at(lambda n: n.policy.layers[-1].bias, networks, bias + shift)
            z = gpg.embed_leaves(own, gpg.embed(own, state, parents), leaves)
            return z, jax.nn.sigmoid(own.policy(z)[0])

        def slope(function: Any) -> float:
            return float(function(1e-5) - function(-1e-5)) / 2e-5

        z, m = action(0.0)
        of_value = slope(lambda shift: networks.value(jnp.concatenate([z, m[None] + shift]))[0])
        expected = -slope(lambda shift: action(shift)[1]) * of_value
        assert float(gradient.policy.layers[-1].bias[0]) == pytest.approx(expected, rel=1e-5)


def test_the_raw_state_of_a_convolution() -> None:
    """The type, both shapes, stride, kernel, padding and groups of GoogLeNet's first operator are in its state."""
    graph = chrion.load(build("googlenet", {"resolution": 64, "width": 0.25}))
    state = operators.operator_state(graph, graph.dag.topological_order[0])
    assert len(state) == NUMBERS
    assert state[:7] == [1, 0, 0, 0, 0, 0, 0]
    assert state[7:11] == pytest.approx([math.log2(1 + size) / 12 for size in (1, 3, 64, 64)])
    assert state[15:17] == [0.5, 0.5]
    assert state[17:19] == [7 / 8, 7 / 8]
    assert state[19:23] == [0.75] * 4
    assert state[24:] == [0, 0, 0, 1, 0, 0, 0, 0]


def test_the_printed_reward_prefers_more_stages() -> None:
    """Two stages of 1 ms have a greater sum of exp(-l) than one of 1.2 ms, and the greater latency."""
    assert 2 * math.exp(-1) == pytest.approx(0.736, abs=1e-3)
    assert math.exp(-1.2) == pytest.approx(0.301, abs=1e-3)


@examples(100)
@given(dags(8), st.integers(0, 99))
def test_grown_endings_are_endings(given_dag: Dag, seed: int) -> None:
    """Sets that grow at random are among all endings, with the same groups."""
    position = {i: at for at, i in enumerate(given_dag.topological_order)}
    edges = [(position[m], position[i]) for i, before in enumerate(given_dag.predecessors) for m in before]
    dag = Dag.from_edges(len(position), edges)
    state = np.zeros((len(dag), NUMBERS), np.float32)
    task = walks.TrainingBlock(operators.BlockGraph(dag, state), CountedCost(len))
    every = {(ending, *sorted(groups)) for ending, groups in endings(task.units, task.units.whole, 3, 8)}
    grown = task._grow(task.units.whole, np.random.default_rng(seed))  # noqa: SLF001 - otherwise of large blocks only
    few = task.some_endings(task.units.whole, np.random.default_rng(seed))
    assert {(ending, *sorted(groups)) for ending, groups in [*grown, *few]} <= every


def branches(count: int) -> Any:
    """Return chains of two operators on two lanes: a stage takes the longer lane, and 0.5 ms."""
    dag = Dag.from_edges(2 * count, [(2 * at, 2 * at + 1) for at in range(count)])

    def stage_ms(groups: Sequence[Sequence[int]]) -> float:
        lanes = [0.0, 0.0]
        for length in sorted(map(len, groups), reverse=True):
            lanes[lanes.index(min(lanes))] += length
        return 0.5 + max(lanes)

    state = np.zeros((2 * count, NUMBERS), np.float32)
    state[:, 0] = 1
    return walks.TrainingBlock(operators.BlockGraph(dag, state), CountedCost(stage_ms))


def trained(rate: float, seed: int) -> tuple[float, float]:
    """Return the mean latency of the last walks and that of the final plan, over the optimum."""
    task = branches(4)
    best = sum(task.cost(stage.groups) for stage in search_stages(task.block.dag, task.cost))
    agent = gpg.Gpg(seed=seed, hidden=SMALL, rate=rate)
    curve = agent.train([task], WALKS)
    chosen = sum(task.cost(stage.groups) for stage in agent.stages(task))
    return float(np.mean(curve[-64:])) * task.work_ms(task.units.whole) / best, chosen / best


@pytest.mark.parametrize("seed", [0, 1])
def test_gpg_learns_the_best_stages_of_a_block(seed: int) -> None:
    """Walks take 1.55 times the optimum at first, and the optimum in the end, as the plan does."""
    explored, chosen = trained(0.01, seed)
    assert explored < 1.05
    assert chosen == pytest.approx(1.0)


@pytest.mark.parametrize("rate", [0.0, -0.01])
def test_a_broken_gradient_learns_nothing(rate: float) -> None:
    """With a gradient of zero, or in the wrong direction, walks stay above 1.4 times the optimum."""
    explored, _ = trained(rate, 0)
    assert explored > 1.4


def test_the_printed_form_chooses_valid_stages() -> None:
    """The ablation runs by Algorithm 2, with finite parameters, and its stages hold each operator once."""
    task = branches(2)
    agent = gpg.Gpg("printed", hidden=SMALL)
    assert len(agent.train([task], 5)) == 5
    assert sorted(i for stage in agent.stages(task) for group in stage.groups for i in group) == [0, 1, 2, 3]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(agent.networks) if eqx.is_array(leaf))


def test_a_search_obeys_its_budget() -> None:
    """Walks by an untrained policy are no worse than its own plan, and ask for no more stages than they may."""
    agent, task = gpg.Gpg(hidden=SMALL), branches(6)
    chosen = sum(task.cost(stage.groups) for stage in agent.stages(task))
    limited = walks.TrainingBlock(task.block, CountedCost(task.cost, 60))
    found = agent.search(limited)
    assert limited.cost.evaluations <= 60
    assert sum(task.cost(stage.groups) for stage in found) <= chosen
    assert agent.search(walks.TrainingBlock(task.block, CountedCost(task.cost, 60))) == found


def test_a_budget_below_the_number_of_operators_returns_generations() -> None:
    """The policy does not see the latencies of all operators then, as other searches do not; nothing is raised."""
    task = branches(6)
    limited = walks.TrainingBlock(task.block, CountedCost(task.cost, 3))
    dag = task.block.dag
    assert gpg.Gpg(hidden=SMALL).search(limited) == generation_stages(dag)
    assert limited.cost.evaluations <= 3


def test_operators_without_latency_are_planned() -> None:
    """Shares of no work are 0: stages hold each operator once, and a training has finite parameters."""
    agent, task = gpg.Gpg(hidden=SMALL), walks.TrainingBlock(branches(2).block, CountedCost(lambda _: 0.0))
    assert agent.train([task], gpg.WALKS) == [0.0] * gpg.WALKS
    assert sorted(i for stage in agent.search(task) for group in stage.groups for i in group) == [0, 1, 2, 3]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(agent.networks) if eqx.is_array(leaf))


def test_gpg_plans_real_modules() -> None:
    """Two modules of GoogLeNet are read, and their stages are valid without training."""
    graph = chrion.load(build("googlenet", {"resolution": 64, "width": 0.25}))
    modules = cut_modules(graph.dag)
    block = operators.read_block([(graph, modules[1]), (graph, modules[2])])
    task = walks.TrainingBlock(block, CountedCost(lambda groups: max(map(len, groups))))
    found = [i for stage in gpg.Gpg(hidden=SMALL).stages(task) for group in stage.groups for i in group]
    assert sorted(found) == list(range(len(modules[1]) + len(modules[2])))


def test_equal_seeds_give_equal_plans() -> None:
    """Two runs with one seed have equal curves, parameters and plans."""
    first, second = gpg.Gpg(hidden=SMALL), gpg.Gpg(hidden=SMALL)
    task = branches(3)
    curve = first.train([task], 16)
    assert second.train([branches(3)], 16) == curve
    assert first.stages(task) == second.stages(task)
    for own, other in zip(jax.tree.leaves(first.networks), jax.tree.leaves(second.networks), strict=True):
        np.testing.assert_array_equal(own, other)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, one message says what to install."""
    monkeypatch.delitem(__import__("sys").modules, "chrion.learning.libraries")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "equinox" else object())
    with pytest.raises(OptionError, match=r"TOP's agents: equinox is not installed.*chrion\[learn\]"):
        importlib.import_module("chrion.learning.libraries")
