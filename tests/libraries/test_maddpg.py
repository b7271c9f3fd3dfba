"""MADDPG: its equations by hand, its gradients, what it learns, and checkpoints."""

from __future__ import annotations

import importlib
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chrion.errors import OptionError
from chrion.graph.blocks import ModuleChain
from chrion.serving.multi.combined import StageTable, TopPlan, separate
from chrion.serving.multi.dispatcher import ModelRules
from chrion.serving.multi.top_search import Figures, TopProblem

eqx = pytest.importorskip("equinox", reason="the extra learn: no equinox in this environment")
jax = pytest.importorskip("jax", reason="the extra learn: no JAX in this environment")
pytest.importorskip("optax", reason="the extra learn: no optax in this environment")
pytest.importorskip("safetensors", reason="the extra learn: no safetensors in this environment")
jnp = jax.numpy
check_grads = importlib.import_module("jax.test_util").check_grads
maddpg, networks_of = (importlib.import_module(f"chrion.learning.{name}") for name in ("maddpg", "networks"))

SMALL = ((32,), (32,))


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """Compile without optimisation: the tests compute little, and compile much."""
    jax.config.update("jax_disable_most_optimizations", True)  # noqa: FBT003 - JAX's interface
    yield
    jax.config.update("jax_disable_most_optimizations", False)  # noqa: FBT003


def test_the_td_error_is_in_the_critic_s_gradient() -> None:
    """The corrected loss has the gradient (Q - y) dQ of one sample; the printed one has y dQ (Equation 3)."""
    layers = networks_of.Layers((2, 3, 1), jax.random.key(0))
    x, y = jnp.array([0.3, -0.7]), 1.5
    slope = eqx.filter_grad(lambda own: own(x)[0])(layers)
    value = float(layers(x)[0])
    for loss, factor in ((networks_of.squared_error, value - y), (networks_of.printed_error, y)):
        gradient = eqx.filter_grad(lambda own, loss=loss: loss(own(x), jnp.array([y])))(layers)
        for own, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(slope), strict=True):
            np.testing.assert_allclose(own, factor * other, atol=1e-5)


class Target:
    """An environment whose utilisation is highest at one joint action, whatever the state."""

    state_size = 4
    action_sizes = (2, 2)
    reference = Figures(1.0, {"m": 1.0}, 0.0)
    start = np.full(4, 0.5)
    goal = np.array([0.8, 0.2, 0.6, 0.9])

    def reset(self) -> np.ndarray[Any, Any]:
        return np.zeros(4, np.float32)

    def step(self, action: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], Figures | None]:
        distance = float(np.abs(action - self.goal).mean())
        return self.reset(), Figures(math.exp(-5 * distance), {"m": 1.0}, 0.0)


def miss(settings: Any) -> float:
    """Return the mean distance of the final policies from the goal."""
    agents = maddpg.Maddpg(Target(), settings)
    agents.train(900)
    return float(np.abs(agents.act(Target().reset()) - Target.goal).mean())


LEARNING = maddpg.Settings(replay=100, batch=64, hidden=SMALL, rate=0.003)


@pytest.mark.parametrize("seed", [0, 1])
def test_maddpg_finds_a_joint_action(seed: int) -> None:
    """After 900 steps the policies are within 0.1 of the goal; they begin at 0.275."""
    assert miss(replace(LEARNING, seed=seed)) < 0.1


def test_a_gradient_of_zero_learns_nothing() -> None:
    """Without steps, the policies stay where they began."""
    assert miss(replace(LEARNING, rate=0.0)) == pytest.approx(0.275, abs=1e-3)


def test_a_policy_that_descends_moves_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the gradient of Equation 4 in the wrong direction, the policies end further from the goal."""
    upward = maddpg.policy_loss
    monkeypatch.setattr(maddpg, "policy_loss", lambda *own: -upward(*own))
    assert miss(LEARNING) > 0.3


def test_the_printed_critic_falls_without_bound() -> None:
    """Rewards of Equation 2 are positive, so values are; steps of Equation 3 as printed lower them far below zero."""
    values = {}
    for form in ("printed", "corrected"):
        agents = maddpg.Maddpg(Target(), maddpg.Settings(form, replay=50, batch=32, hidden=SMALL, rate=0.003))  # type: ignore[arg-type]
        agents.train(600)
        state = jnp.zeros(4)
        values[form] = float(agents.networks.values(state, jnp.asarray(Target.goal, jnp.float32)).mean())
    assert values["printed"] < -50
    assert -20 < values["corrected"] < 5


def random_networks(seed: int = 0) -> Any:
    """Return networks of two agents with actions of two numbers each, in states of four."""
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    return maddpg.Networks(
        tuple(networks_of.Layers((4, 8, 2), next(keys)) for _ in range(2)),
        tuple(networks_of.Layers((8, 8, 1), next(keys)) for _ in range(2)),
    )


def test_each_agent_climbs_its_own_critic() -> None:
    """Equation 4: an agent's gradient is that of its critic in its own action, with the actions taken of the others."""
    networks = random_networks()
    states, actions = np.ones((1, 4), np.float32), np.full((1, 4), 0.5, np.float32)
    batch = maddpg.Batch(states, actions, None, None)
    gradient = eqx.filter_grad(maddpg.policy_loss)(networks.policies, networks, batch)

    def value(policy: Any) -> Any:
        mine = jax.nn.sigmoid(policy(jnp.ones(4)))
        joint = jnp.concatenate([jnp.ones(4), mine, jnp.array([0.5, 0.5])])
        return networks.critics[0](joint)[0]

    slope = eqx.filter_grad(value)(networks.policies[0])
    assert np.abs(slope.layers[0].weight).max() > 0
    np.testing.assert_allclose(gradient[0].layers[0].weight, -slope.layers[0].weight / 2, atol=1e-6)


def test_the_gradients_are_those_of_finite_differences() -> None:
    """Equations 3 and 4: the slopes of both losses in double precision; targets of critics are constant."""
    with jax.enable_x64(new_val=True):
        networks, targets = (
            jax.tree.map(lambda leaf: leaf.astype(jnp.float64) if eqx.is_array(leaf) else leaf, random_networks(seed))
            for seed in (0, 1)
        )
        random_ = np.random.default_rng(0)
        batch = maddpg.Batch(*(random_.random((3, size)) for size in (4, 4, 2, 4)))
        for part, loss in (
            (networks.critics, lambda own: maddpg.critic_loss(own, networks, targets, batch, "corrected")),
            (networks.policies, lambda own: maddpg.policy_loss(own, networks, batch)),
        ):
            parameters, rest = eqx.partition(part, eqx.is_array)
            joined = jax.jit(lambda own, loss=loss, rest=rest: loss(eqx.combine(own, rest)))
            check_grads(joined, (parameters,), 1, ["rev"], eps=1e-6)


def test_the_target_of_a_critic_has_the_target_policies() -> None:
    """Equation 3: y = r + gamma Q'(s', rho'(s')); the loss of critics that give y is zero."""
    networks, state = random_networks(), jnp.ones(4)
    joint = jnp.concatenate(networks.actions(state))
    values = networks.values(state, joint)
    batch = maddpg.Batch(state[None], joint[None], 0.05 * values[None], state[None])
    assert float(maddpg.critic_loss(networks.critics, networks, networks, batch, "corrected")) == pytest.approx(
        0, abs=1e-9
    )


def test_the_printed_reward_by_hand() -> None:
    """Equation 2 with z-scores of 1 for utilisation, 2 for the variance, and 0 and 4 for two latencies."""
    found = maddpg.printed_rewards(
        Figures(0.6, {"a": 5.0, "b": 9.0}, 3.0), np.array([0.5, 1.0, 5.0, 5.0]), np.array([0.1, 1, 1, 1])
    )
    expected = [math.exp(0.4 - 0.4 * 2 - 0.4), math.exp(0.4 - 0.4), math.exp(0.4 - 1.6 - 0.4)]
    assert found == pytest.approx(expected, rel=1e-6)


def problem() -> TopProblem:
    chains = {"a": ModuleChain.straight(3), "b": ModuleChain.straight(2)}
    times = {"a": ((2.0, 3.0, 1.0),) * 2, "b": ((3.0, 1.0),) * 2}
    rules = {name: ModelRules(own[0]) for name, own in times.items()}
    return TopProblem(rules, 2, chains, times, {"a": 60.0, "b": 120.0}, StageTable(chains, times, 2))


def environment(*, divide: bool) -> Any:
    return maddpg.TopEnvironment(problem(), divide=divide)


def test_superblocks_are_refused_or_divided() -> None:
    """All sub-blocks in one combined block: the printed form refuses the action, the corrected one divides it."""
    action = np.zeros(7)
    printed, corrected = environment(divide=False), environment(divide=True)
    before = printed.reset()
    after, figures = printed.step(action)
    assert figures is None
    np.testing.assert_array_equal(before, after)
    assert corrected.step(action)[1] is not None
    plan = corrected.plan(action)
    assert isinstance(plan, TopPlan)
    assert plan.largest == 2


def test_intervals_are_seconds_or_shares_of_a_period() -> None:
    """The action 0.5 of the launcher is half a second as printed, and 0.55 of the time between two arrivals else."""
    action = np.full(7, 0.5)
    assert environment(divide=False).plan(action).intervals_ms == {"a": 500.0, "b": 500.0}
    found = environment(divide=True).plan(action).intervals_ms
    assert found == {"a": pytest.approx(550 / 60), "b": pytest.approx(550 / 120)}


def test_the_first_action_combines_nothing() -> None:
    """Without noise and updates, the agents' plan has no combinations, and intervals of a twentieth of the longest."""
    own = environment(divide=True)
    plan = own.plan(maddpg.Maddpg(own, maddpg.Settings(hidden=SMALL)).act(own.reset()))
    assert plan.combined == separate({"a": ModuleChain.straight(3), "b": ModuleChain.straight(2)}).combined
    assert plan.intervals_ms["a"] == pytest.approx(0.05 * 1100 / 60, rel=1e-3)


@pytest.mark.parametrize("form", ["corrected", "printed"])
def test_a_search_stays_within_its_budget(form: Any) -> None:
    """It serves no more plans than it may, its plan is valid and worth no less than combining nothing; seeds decide."""
    own = problem()
    plan = maddpg.search(own, 8, form=form)
    assert own.evaluations <= 8
    assert own.score(plan) >= 0
    assert plan.largest <= own.most
    if form == "corrected":
        assert maddpg.search(problem(), 8) == plan


def test_equal_seeds_give_equal_agents(tmp_path: Path) -> None:
    """Two runs with one seed have equal curves and parameters, which a checkpoint restores."""
    settings = maddpg.Settings(replay=10, batch=8, hidden=SMALL)
    first, second = maddpg.Maddpg(environment(divide=True), settings), maddpg.Maddpg(environment(divide=True), settings)
    assert first.train(30) == second.train(30)
    networks_of.save_networks(tmp_path / "agents.safetensors", first.networks)
    restored = networks_of.load_networks(
        tmp_path / "agents.safetensors", maddpg.Maddpg(environment(divide=True), settings).networks
    )
    for own, other in zip(*map(jax.tree.leaves, (restored, second.networks)), strict=True):
        np.testing.assert_array_equal(own, other)


def test_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    """A missing or damaged file, and one of other sizes, give one line that says what was expected."""
    layers = networks_of.Layers((2, 3, 1), jax.random.key(0))
    path = tmp_path / "n.safetensors"
    with pytest.raises(OptionError, match="No such file"):
        networks_of.load_networks(path, layers)
    header = json.dumps({"x": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}).encode()
    for content in (b"nothing", struct.pack("<Q", len(header)) + header + bytes(2)):
        path.write_bytes(content)
        with pytest.raises(OptionError, match="checkpoint"):
            networks_of.load_networks(path, layers)
    networks_of.save_networks(path, networks_of.Layers((2, 4, 1), jax.random.key(0)))
    with pytest.raises(OptionError, match=r"expected float32 \(3,\), found float32 \(4,\)"):
        networks_of.load_networks(path, layers)


def test_targets_move_by_their_share() -> None:
    """A quarter of the way from the old parameters to the new ones."""
    old, new = (networks_of.Layers((1, 1), jax.random.key(seed)) for seed in (0, 1))
    moved = networks_of.blend(old, new, 0.25)
    expected = 0.75 * old.layers[0].weight + 0.25 * new.layers[0].weight
    np.testing.assert_allclose(moved.layers[0].weight, expected, rtol=1e-6)
