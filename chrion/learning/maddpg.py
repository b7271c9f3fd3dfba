"""MADDPG: agents that choose launcher settings and combined blocks (Algorithm 1 of TOP).

Agent 0 is the launcher, and each model has an agent. All see the joint state; the critic of an agent also sees the
actions of all (Lowe et al., 2017).

Two forms. ``printed`` is the paper's: the reward is the exponential of a sum of z-scores (Equation 2), Equation 3 lacks
the TD error, and an action with more than H sub-blocks in a combined block has the reward 0 and changes nothing. The
default, ``corrected``, has the objective of :mod:`chrion.serving.multi.top_search` as its reward, which has a fixed
scale; critics descend on the squared TD error; combined blocks that are too large are divided; and an interval of the
launcher is a share of the time between two arrivals instead of a second. (With 32 sub-blocks and H = 2, fewer than one
random action in a hundred has no larger combined block, so that the printed agents see hardly anything but penalties.)

Choices where the paper is silent: Adam; the first action is that of the plan that combines nothing (output layers begin
at zero); Gaussian noise that falls from 0.3 to 0.05 over the steps, also while the buffer fills; one update a step,
once the buffer holds as many transitions as learning begins with; target networks that move by 1 % an update; a buffer
of 10 000 transitions; z-scores of all steps so far; output layers of policies are sigmoids; episodes of 25 steps, after
which queues are again as the problem has them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from chrion.learning.libraries import eqx, jax, jnp, optax
from chrion.learning.networks import DISCOUNT, POLICY, RATE, VALUE, Layers, blend, printed_error, squared_error
from chrion.serving.multi.combined import LONGEST_INTERVAL_MS, TopPlan, decode, limit, separate
from chrion.serving.multi.top_search import LONGEST_SHARE, WEIGHTS, Figures, TopProblem, encode, objective

Form = Literal["corrected", "printed"]
#: replay_size: transitions before learning begins; those of an update; those that are kept.
REPLAY, BATCH, _KEPT = 2000, 100, 10_000
_NOISE = (0.3, 0.05)
_SHARE = 0.01
#: Updates a step of a search whose budget is small.
_UPDATES = 4
#: The first action keeps this distance from 0 and 1, where the slope of a sigmoid would vanish.
_INSIDE = 0.05
#: The most tasks of a model that wait at the beginning of a step.
_MOST_WAITING = 20

Array = np.ndarray[Any, Any]


class TopEnvironment:
    """The virtual clock as an environment; tasks that wait at the end of a step wait at the beginning of the next.

    Args:
        problem: The problem.
        divide: Divide combined blocks that are too large, instead of refusing the action; intervals are shares of the
            time between two arrivals, instead of a second.

    Attributes:
        reference: Figures with which those of actions are compared.
        state_size: The size of the state.
        action_sizes: The size of the action of each agent.
        start: The action that agents begin with.
    """

    def __init__(self, problem: TopProblem, *, divide: bool) -> None:
        self._problem, self._divide = problem, divide
        first = problem.first
        self.reference = first.figures
        self.state_size = len(first.state) * len(first.state[0])
        chains = problem.chains
        self.action_sizes: Sequence[int] = [len(chains), *(len(chain.modules) for chain in chains.values())]
        self.start = np.array(encode(separate(chains), chains), np.float32)
        self._waiting: dict[str, int] | None = None
        self._first = self._state = np.array(first.state, np.float32).ravel()

    def plan(self, action: Array) -> TopPlan:
        """Return the plan of a joint action."""
        plan = decode(action.tolist(), self._problem.chains)
        if not self._divide:
            return plan
        longest_ms = {name: LONGEST_SHARE * period_ms for name, period_ms in self._problem.periods_ms.items()}
        shares = {name: ms / LONGEST_INTERVAL_MS for name, ms in plan.intervals_ms.items()}
        intervals_ms = {name: min(share * longest_ms[name], LONGEST_INTERVAL_MS) for name, share in shares.items()}
        return limit(replace(plan, intervals_ms=intervals_ms), self._problem.most)

    def reset(self) -> Array:
        """Begin with the queues of the problem."""
        self._waiting, self._state = None, self._first
        return self._state

    def step(self, action: Array) -> tuple[Array, Figures | None]:
        """Serve tasks by the plan of an action."""
        plan = self.plan(action)
        if plan.largest > self._problem.most:
            return self._state, None
        trial = self._problem.trial(plan, self._waiting)
        self._waiting = {name: min(count, _MOST_WAITING) for name, count in trial.waiting.items()}
        self._state = np.array(trial.state, np.float32).ravel()
        return self._state, trial.figures


class Networks(eqx.Module):  # type: ignore[misc] # equinox has no types here
    """The policy and the critic of every agent."""

    policies: tuple[Layers, ...]
    critics: tuple[Layers, ...]

    def actions(self, state: Any) -> tuple[Any, ...]:
        """Return the action of each agent in a state."""
        return tuple(jax.nn.sigmoid(policy(state)) for policy in self.policies)

    def values(self, state: Any, action: Any) -> Any:
        """Return what each critic gives a joint action in a state."""
        seen = jnp.concatenate([state, action])
        return jnp.stack([critic(seen)[0] for critic in self.critics])


class Batch(NamedTuple):
    """Transitions; a row for each."""

    states: Any
    actions: Any
    rewards: Any
    following: Any


def critic_loss(  # noqa: PLR0913, PLR0917 - Equation 3
    critics: Any, networks: Networks, targets: Networks, batch: Batch, form: Form, discount: float = DISCOUNT
) -> Any:
    """Return the loss of all critics (Equation 3)."""
    online = eqx.tree_at(lambda n: n.critics, networks, critics)

    def of_row(state: Any, action: Any, reward: Any, after: Any) -> tuple[Any, Any]:
        target = reward + discount * targets.values(after, jnp.concatenate(targets.actions(after)))
        return online.values(state, action), target

    values, wanted = jax.vmap(of_row)(*batch)
    return squared_error(values, wanted) if form == "corrected" else printed_error(values, wanted)


def policy_loss(policies: Any, networks: Networks, batch: Batch) -> Any:
    """Return minus the mean value of each agent's own action among the actions that were taken (Equation 4)."""
    own = eqx.tree_at(lambda n: n.policies, networks, policies)
    sizes = [policy.layers[-1].out_features for policy in networks.policies]
    ends = np.cumsum(sizes)

    def of_row(state: Any, action: Any) -> Any:
        total = 0.0
        for i, mine in enumerate(own.actions(state)):
            joint = jnp.concatenate([action[: ends[i] - sizes[i]], mine, action[ends[i] :]])
            total += networks.critics[i](jnp.concatenate([state, joint]))[0]
        return -total / len(sizes)

    return jnp.mean(jax.vmap(of_row)(batch.states, batch.actions))


@dataclass(frozen=True, slots=True)
class Settings:
    """How agents learn; the paper's figures by default."""

    form: Form = "corrected"
    seed: int = 0
    replay: int = REPLAY
    batch: int = BATCH
    rate: float = RATE
    #: Updates a step; the discount; steps of an episode.
    updates: int = 1
    discount: float = DISCOUNT
    episode: int = 25
    #: Hidden units of policies and critics.
    hidden: tuple[Sequence[int], Sequence[int]] = (POLICY, VALUE)


class Maddpg:
    """The agents.

    Args:
        environment: What they act on.
        settings: How they learn.
    """

    def __init__(self, environment: TopEnvironment, settings: Settings | None = None) -> None:
        settings = settings or Settings()
        self._environment, self._settings = environment, settings
        sizes = environment.action_sizes
        self._action_size = sum(sizes)
        keys = iter(jax.random.split(jax.random.key(settings.seed), 2 * len(sizes)))
        policy, value = settings.hidden
        starts = np.split(np.clip(environment.start, _INSIDE, 1 - _INSIDE), np.cumsum(sizes)[:-1])
        self.networks = Networks(
            tuple(
                _begin_at(Layers((environment.state_size, *policy, size), next(keys)), start)
                for size, start in zip(sizes, starts, strict=True)
            ),
            tuple(Layers((environment.state_size + self._action_size, *value, 1), next(keys)) for _ in sizes),
        )
        self._targets = self.networks
        self._pick = np.random.default_rng(settings.seed)
        self._optimiser: Any = optax.adam(settings.rate)
        self._states = tuple(
            self._optimiser.init(eqx.filter(part, eqx.is_array))
            for part in (self.networks.critics, self.networks.policies)
        )
        self._buffer: deque[tuple[Array, Array, Figures | None, Array]] = deque(maxlen=_KEPT)
        #: The number of steps that were served, and the mean and summed squared deviations of their figures.
        self._served, self._mean, self._squares = 0, np.zeros(()), np.zeros(())
        self._update = eqx.filter_jit(self._descend)
        self._act = eqx.filter_jit(lambda networks, state: jnp.concatenate(networks.actions(state)))
        #: The best action so far and what it is worth by the corrected reward of agent 0.
        self.best: tuple[float, Array] | None = None

    def act(self, state: Array) -> Array:
        """Return the joint action of the policies."""
        return np.array(self._act(self.networks, jnp.asarray(state)))

    def train(self, steps: int) -> list[float]:
        """Act and learn.

        Returns:
            For each step, what the objective gives the action; NaN if it was refused.
        """
        curve: list[float] = []
        state = self._environment.reset()
        for step in range(steps):
            if step % self._settings.episode == 0:
                state = self._environment.reset()
            action = self._explore(state, step / max(1, steps - 1))
            following, figures = self._environment.step(action)
            self._note(action, figures, curve)
            self._buffer.append((state, action, figures, following))
            if len(self._buffer) >= self._settings.replay:
                for _ in range(self._settings.updates):
                    self._learn()
            state = following
        return curve

    def _explore(self, state: Array, progress: float) -> Array:
        noise = _NOISE[0] * (_NOISE[1] / _NOISE[0]) ** progress
        noisy: Array = np.clip(self.act(state) + self._pick.normal(0, noise, self._action_size), 0, 1)
        return noisy.astype(np.float32)

    def _note(self, action: Array, figures: Figures | None, curve: list[float]) -> None:
        worth = objective(figures, self._environment.reference) if figures else float("nan")
        curve.append(worth)
        if figures:
            if self._settings.form == "printed":
                change = _figures(figures) - self._mean
                self._served += 1
                self._mean = self._mean + change / self._served
                self._squares = self._squares + change * (_figures(figures) - self._mean)
            if self.best is None or worth > self.best[0]:
                self.best = worth, action

    def _learn(self) -> None:
        chosen = self._pick.choice(len(self._buffer), self._settings.batch)
        states, actions, figures, following = zip(*(self._buffer[i] for i in chosen), strict=True)
        batch = Batch(np.stack(states), np.stack(actions), self._rewards(figures), np.stack(following))
        self.networks, self._targets, self._states = self._update(self.networks, self._targets, self._states, batch)

    def _rewards(self, figures: Sequence[Figures | None]) -> Array:
        """Return the reward of each agent (columns) for each transition; statistics are those of now."""
        agents = len(self._environment.action_sizes)
        if self._settings.form == "corrected":
            refused = [-2.0] * agents
            reference = self._environment.reference
            rows = [
                [objective(own, reference), *(objective(own, reference, name) for name in own.latency_ms)]
                if own
                else refused
                for own in figures
            ]
        else:
            spread = np.sqrt(self._squares / max(1, self._served)) + 1e-8
            rows = [printed_rewards(own, self._mean, spread) if own else [0.0] * agents for own in figures]
        return np.array(rows, np.float32)

    def _descend(self, networks: Networks, targets: Networks, states: Any, batch: Batch) -> Any:
        """Return networks, targets and states of the optimiser after one update."""
        form = self._settings.form
        gradient = eqx.filter_grad(critic_loss)(
            networks.critics, networks, targets, batch, form, self._settings.discount
        )
        updates, critic_state = self._optimiser.update(gradient, states[0])
        critics = eqx.apply_updates(networks.critics, updates)
        gradient = eqx.filter_grad(policy_loss)(networks.policies, networks, batch)
        updates, policy_state = self._optimiser.update(gradient, states[1])
        networks = eqx.tree_at(
            lambda n: (n.critics, n.policies), networks, (critics, eqx.apply_updates(networks.policies, updates))
        )
        return networks, blend(targets, networks, _SHARE), (critic_state, policy_state)


def _begin_at(layers: Layers, action: Array) -> Layers:
    """Return layers whose sigmoid is an action in every state."""
    last = layers.layers[-1]
    biases = jnp.asarray(np.log(action / (1 - action)), last.bias.dtype)
    begun: Layers = eqx.tree_at(
        lambda own: (own.layers[-1].weight, own.layers[-1].bias), layers, (jnp.zeros_like(last.weight), biases)
    )
    return begun


def search(problem: TopProblem, evaluations: int, seed: int = 0, form: Form = "corrected") -> TopPlan:
    """Return the best plan that agents find for a problem, under a budget as for the plain searches.

    Plans are compared with the queues that the problem begins with, so each step is an episode, and the discount is 0.
    Learning begins after a quarter of the evaluations, with several updates a step. The last evaluation is that of the
    policies without noise.
    """
    environment = TopEnvironment(problem, divide=form == "corrected")
    replay = max(2, evaluations // 4)
    settings = Settings(form, seed, replay, min(replay, BATCH), updates=_UPDATES, discount=0.0, episode=1)
    agents = Maddpg(environment, settings)
    agents.train(evaluations - 1)
    plans = [separate(problem.chains), environment.plan(agents.act(environment.reset()))]
    worths = [0.0, problem.score(plans[1])]
    if agents.best is not None:
        worths.append(agents.best[0])
        plans.append(environment.plan(agents.best[1]))
    return plans[worths.index(max(worths))]


def printed_rewards(figures: Figures, mean: Array, spread: Array) -> list[float]:
    """Return the rewards of all agents by Equation 2, with the mean and spread of utilisation, variance, latencies."""
    a, b, c = WEIGHTS
    scores = (_figures(figures) - mean) / spread
    shared = a * scores[0] - c * scores[1]
    return [float(np.exp(shared - b * own)) for own in (scores[2:].mean(), *scores[2:])]


def _figures(figures: Figures) -> Array:
    return np.array([figures.utilisation, figures.variance, *figures.latency_ms.values()])
