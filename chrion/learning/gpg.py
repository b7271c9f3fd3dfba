"""GPG: the policy gradient over graph embeddings that chooses the stages of a combined block (Algorithm 2 of TOP).

Equation 5 embeds the operators once, top-down; Equation 6 embeds the current leaves at each recursion. The agent then
chooses the last stage of what is left, until nothing is left.

Two forms:

- ``printed``: as in the paper. The policy sees the leaves only and puts out a number from 0 to 1, the index among all
  endings. The reward is ``exp(-l)`` of each stage's latency in ms, the value network is updated by Equation 7 with the
  TD error ``q - (u + gamma q')``, and the policy by Equation 8.
- ``corrected``, the default: the reward is ``-l``, and the policy sees the endings. It gives each of them a score from
  the embedding of its operators and of the leaves, and chooses by the softmax of the scores. The gradient is that of
  the log-probability times the advantage.

Why the printed one cannot work well: a sum of ``exp(-l)`` over stages grows with their number (two of 1 ms are worth
0.74, one of 1.2 ms is worth 0.30), and an index means another ending in each state, so that there is nothing to
generalise.

**The baseline.** A walk's latency from a recursion on is compared with the work that is left there (the latency of its
operators one after another) times the mean ratio of latency to work of the other fifteen walks through the same block.
So it needs no network, is right from the first update on, and does not depend on the walk's own choices. A value
network that begins at zero would first call every choice bad, since all rewards are negative, and would drive the
policy towards the uniform one until it has learned the mean.

Choices where the paper is silent: an index refers to endings in the order of their bit masks, of which at most 1 000
are enumerated. The policy of ``corrected`` sees at most 64; of more, it sees sets that grow from nothing by random
operators. Latencies are divided by that of the block's operators one after another. The printed form explores by
Gaussian noise of 0.1 and learns by plain steps of 0.001; the other one samples from its policy and learns by Adam, from
16 walks at a time, without discount, since the objective is their sum, and with an entropy bonus of 0.01. An index is
below 1: a sigmoid in float32 reaches 1.0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from chrion.learning.libraries import eqx, jax, jnp, optax
from chrion.learning.networks import AGGREGATE, DISCOUNT, POLICY, RATE, VALUE, Layers
from chrion.learning.operators import NUMBERS
from chrion.learning.walks import ENDING_NUMBERS, SEEN, Choice, Ending, TrainingBlock, Walk, rows_of
from chrion.scheduler.policies.stages import Stage
from chrion.scheduler.search.stages import SpentError, generation_stages

Form = Literal["corrected", "printed"]
#: Walks through a block before an update.
WALKS = 16
_NOISE, _ENTROPY, _CLIP = 0.1, 0.01, 1.0
_BELOW_ONE = 1 - 1e-6
#: Added to the spread of walks' latencies, by which advantages are divided, so that equal walks teach nothing.
_EQUAL = 1e-3
#: Batches of walks without a new stage, after which a search ends although evaluations are left.
_IDLE = 4

Array = np.ndarray[Any, Any]


class GpgNetworks(eqx.Module):  # type: ignore[misc] # equinox has no types here
    """The functions of Equations 5 and 6, the policy, and the value network or the functions of endings."""

    g1: Layers
    h1: Layers
    g2: Layers
    h2: Layers
    policy: Layers
    #: The same as g2 and h2 for the operators of an ending.
    g3: Layers | None
    h3: Layers | None
    value: Layers | None

    def __init__(self, form: Form, seed: int, *, hidden: tuple[Sequence[int], Sequence[int]] = (POLICY, VALUE)) -> None:
        keys = iter(jax.random.split(jax.random.key(seed), 8))
        sees = form == "corrected"
        own = [Layers((NUMBERS, *AGGREGATE, NUMBERS), next(keys)) for _ in range(6 if sees else 4)]
        self.g1, self.h1, self.g2, self.h2 = own[:4]
        self.g3, self.h3 = own[4:] or (None, None)
        seen = 2 * NUMBERS + ENDING_NUMBERS if sees else NUMBERS
        self.policy = Layers((seen, *hidden[0], 1), next(keys))
        self.value = None if sees else Layers((NUMBERS + 1, *hidden[1], 1), next(keys))


def embed(networks: GpgNetworks, state: Any, parents: Any) -> Any:
    """Return e_v of all operators by Equation 5, from the first to the last.

    Args:
        networks: The networks.
        state: s_v, a row for each operator.
        parents: 1 for each pair (operator, parent).
    """

    def step(sent: Any, v: Any) -> tuple[Any, Any]:
        embedding = networks.h1(parents[v] @ sent) + state[v]
        return sent.at[v].set(networks.g1(embedding)), embedding

    _, embeddings = jax.lax.scan(step, jnp.zeros_like(state), jnp.arange(len(state)))
    return embeddings


def embed_leaves(networks: GpgNetworks, embeddings: Any, leaves: Any) -> Any:
    """Return z_t by Equation 6; ``leaves`` has 1 for each leaf."""
    return networks.h2(leaves @ jax.vmap(networks.g2)(embeddings))


def log_probabilities(networks: GpgNetworks, embeddings: Any, seen: Any) -> Any:
    """Return the logarithm of the probability of each ending, for each recursion.

    Args:
        networks: The networks.
        embeddings: e_v of all operators.
        seen: Arrays with a row for each recursion: 1 for each leaf; for each ending, 1 for each member, and its further
            numbers; the number of endings.
    """
    assert networks.h3 is not None  # noqa: S101 - as all networks of the corrected form
    of_members = networks.h3
    sent_leaves, sent = jax.vmap(networks.g2)(embeddings), jax.vmap(networks.g3)(embeddings)

    def of_recursion(leaves: Any, members: Any, numbers: Any, count: Any) -> Any:
        z = networks.h2(leaves @ sent_leaves)

        def score(own: Any, further: Any) -> Any:
            return networks.policy(jnp.concatenate([z, of_members(own @ sent), further]))[0]

        scores = jax.vmap(score)(members, numbers)
        return jax.nn.log_softmax(jnp.where(jnp.arange(len(scores)) < count, scores, -1e9))

    return jax.vmap(of_recursion)(*seen)


class Gpg:
    """The agent.

    Args:
        form: ``corrected`` or ``printed``.
        seed: The seed of parameters and exploration.
        hidden: Hidden units of the policy and of the value network.
        rate: The learning rate.
    """

    def __init__(
        self,
        form: Form = "corrected",
        seed: int = 0,
        *,
        hidden: tuple[Sequence[int], Sequence[int]] = (POLICY, VALUE),
        rate: float = RATE,
    ) -> None:
        self.networks = GpgNetworks(form, seed, hidden=hidden)
        self._pick = np.random.default_rng(seed)
        self._sees = form == "corrected"
        self._optimiser: Any = (
            optax.chain(optax.clip_by_global_norm(_CLIP), optax.adam(rate)) if self._sees else optax.sgd(rate)
        )
        self._state = self._optimiser.init(eqx.filter(self.networks, eqx.is_array))
        self._gradient: Any = eqx.filter_grad(walks_loss) if self._sees else step_gradient
        self._update = eqx.filter_jit(self._descend)

    def train(self, blocks: Sequence[TrainingBlock], walks: int) -> list[float]:
        """Learn from combined blocks in random order.

        Args:
            blocks: The combined blocks.
            walks: The number of walks; a multiple of 16 in the corrected form, else it is rounded up.

        Returns:
            The latency of each walk's stages over that of the operators one after another.
        """
        curve: list[float] = []
        while len(curve) < walks:
            task = blocks[int(self._pick.integers(len(blocks)))]
            done = self._walk(task, WALKS if self._sees else 1, self._pick)
            if self._sees:
                curve += self._learn(task, done)
            else:
                curve.append(self._learn_steps(task, done[0]))
        return curve

    def stages(self, task: TrainingBlock) -> list[Stage]:
        """Return the stages that the agent chooses without exploration."""
        return self._walk(task, 1, None)[0].stages

    def search(self, task: TrainingBlock, seed: int = 0) -> list[Stage]:
        """Return the best of those stages and of walks by the policy's probabilities, until the budget is spent.

        Args:
            task: The combined block; its cost has the budget. If it does not suffice for the operators, of which the
                policy sees the latencies, the generations of the graph are returned.
            seed: The seed of the walks.
        """
        pick, idle = np.random.default_rng(seed), 0
        best, least = generation_stages(task.block.dag), math.inf
        try:
            walks = self._walk(task, 1, None)
            best = walks[0].stages
            while walks:
                before = task.cost.evaluations
                for walk in walks:
                    ms = sum(task.cost(stage.groups) for stage in walk.stages)
                    if ms < least:
                        best, least = walk.stages, ms
                idle = idle + 1 if task.cost.evaluations == before else 0
                walks = self._walk(task, WALKS, pick) if idle < _IDLE else []
        except SpentError:
            pass
        return best

    def _walk(self, task: TrainingBlock, count: int, pick: np.random.Generator | None) -> list[Walk]:
        """Walk through a block several times side by side; without a generator, without exploration."""
        embeddings = _EMBED(self.networks, *task.arrays)
        walks = [Walk(task.units.whole) for _ in range(count)]
        choose = self._score if self._sees else self._index
        while open_ := [walk for walk in walks if walk.remaining]:
            for walk, (choice, ending) in zip(open_, choose(task, embeddings, open_, count, pick), strict=True):
                walk.take(task, choice, ending)
        return walks

    def _score(
        self, task: TrainingBlock, embeddings: Any, walks: Sequence[Walk], count: int, pick: np.random.Generator | None
    ) -> list[tuple[Choice, Ending]]:
        """Choose an ending for each walk by its score."""
        some = pick or np.random.default_rng(0)
        found = {left: task.some_endings(left, some) for left in dict.fromkeys(walk.remaining for walk in walks)}
        seen = [found[walk.remaining] for walk in walks]
        choices = []
        for walk, own in zip(walks, seen, strict=True):
            members = rows_of([ending for ending, _ in own], task.size)
            numbers = np.array(task.numbers(walk.remaining, own), np.float32)
            choices.append(Choice(walk.remaining, task.leaves(walk.remaining), members, numbers, len(own), 0))
        scores = np.array(_SCORE(self.networks, embeddings, _stack(task, choices, count)), np.float64)[: len(walks)]
        if pick:
            scores += pick.gumbel(size=scores.shape)  # the greatest sum is a sample of the softmax
        taken = [int(row[: len(own)].argmax()) for row, own in zip(scores, seen, strict=True)]
        return [(replace(c, chosen=at), own[at]) for c, at, own in zip(choices, taken, seen, strict=True)]

    def _index(
        self, task: TrainingBlock, embeddings: Any, walks: Sequence[Walk], count: int, pick: np.random.Generator | None
    ) -> list[tuple[Choice, Ending]]:
        """Choose an ending by its index."""
        del count  # one at a time
        found, empty = [], np.zeros((0, 0), np.float32)
        for walk in walks:
            own, leaves = task.all_endings(walk.remaining), task.leaves(walk.remaining)
            action = float(_ACT(self.networks, embeddings, rows_of([leaves], task.size)[0]))
            if pick:
                action += pick.normal(0, _NOISE)
            action = min(max(action, 0.0), _BELOW_ONE)
            at = int(action * len(own))
            found.append((Choice(walk.remaining, leaves, empty, empty, len(own), at, action), own[at]))
        return found

    def _learn(self, task: TrainingBlock, walks: Sequence[Walk]) -> list[float]:
        """Update the networks after several walks, and return the ratio of latency to work of each."""
        serial_ms = task.work_ms(task.units.whole) or 1.0
        stage_ms = [np.array([task.cost(stage.groups) for stage in walk.backwards]) / serial_ms for walk in walks]
        left = [np.array([task.work_ms(c.remaining) for c in walk.choices]) / serial_ms for walk in walks]
        advantages = advantages_of(stage_ms, left)
        choices = [choice for walk in walks for choice in walk.choices]
        rows = 1 << max(6, (len(choices) - 1).bit_length())
        taken, weights = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
        taken[: len(choices)] = [choice.chosen for choice in choices]
        weights[: len(choices)] = np.concatenate(advantages)
        batch = (_stack(task, choices, rows), taken, weights)
        self.networks, self._state = self._update(self.networks, self._state, *task.arrays, *batch)
        return [float(own.sum()) for own in stage_ms]

    def _learn_steps(self, task: TrainingBlock, walk: Walk) -> float:
        """Update the networks after each recursion of a walk, and return its ratio of latency to work."""
        serial_ms = task.work_ms(task.units.whole) or 1.0
        stage_ms = [task.cost(stage.groups) for stage in walk.backwards]
        leaves = rows_of([choice.leaves for choice in walk.choices] + [0], task.size)
        for at, (choice, ms) in enumerate(zip(walk.choices, stage_ms, strict=True)):
            numbers = (np.float32(value) for value in (choice.action, np.exp(-ms), at + 1 < len(stage_ms)))
            own = (leaves[at], leaves[at + 1], *numbers)
            self.networks, self._state = self._update(self.networks, self._state, *task.arrays, *own)
        return sum(stage_ms) / serial_ms

    def _descend(self, networks: GpgNetworks, optimiser_state: Any, *arrays: Any) -> Any:
        """Return the networks after a step along the gradient."""
        updates, optimiser_state = self._optimiser.update(self._gradient(networks, *arrays), optimiser_state)
        return eqx.apply_updates(networks, updates), optimiser_state


def advantages_of(stage_ms: Sequence[Array], left: Sequence[Array]) -> list[Array]:
    """Return the advantage of each choice of several walks through a block.

    Args:
        stage_ms: The latency of each stage of each walk, in the order of the choices, over that of the operators.
        left: The share of the work that was left before each choice.
    """
    totals = np.array([own.sum() for own in stage_ms])
    others = (totals.sum() - totals) / (len(totals) - 1)
    spread = totals.std() + _EQUAL
    return [
        (other * work - np.cumsum(own[::-1])[::-1]) / spread
        for own, work, other in zip(stage_ms, left, others, strict=True)
    ]


def walks_loss(  # noqa: PLR0913, PLR0917 - arrays of several walks
    networks: GpgNetworks, state: Any, parents: Any, seen: Any, taken: Any, advantages: Any
) -> Any:
    """Return the loss of 16 walks: minus the advantage times the log-probability, and minus the entropy bonus."""
    log = log_probabilities(networks, embed(networks, state, parents), seen)
    chosen = jnp.take_along_axis(log, taken[:, None], axis=1)[:, 0]
    entropy = -jnp.sum(jnp.exp(log) * log)  # rows that fill up have one ending, so none
    return -(jnp.sum(advantages * chosen) + _ENTROPY * entropy) / WALKS


def step_gradient(  # noqa: PLR0913, PLR0917 - arrays of a recursion
    networks: GpgNetworks, state: Any, parents: Any, leaves: Any, after: Any, action: Any, reward: Any, more: Any
) -> Any:
    """Return the gradient of Equation 7 for the value network, and minus that of Equation 8 for all others."""

    def action_of(own: GpgNetworks, mask: Any) -> tuple[Any, Any]:
        z = embed_leaves(own, embed(own, state, parents), mask)
        return z, jax.nn.sigmoid(own.policy(z)[0])

    def value(own: Any, z: Any, m: Any) -> Any:
        return own(jnp.concatenate([z, m[None]]))[0]

    z, _ = action_of(networks, leaves)
    z_after, m_after = action_of(networks, after)
    target = reward + more * DISCOUNT * value(networks.value, z_after, m_after)
    error = value(networks.value, z, action) - target

    def loss(own: GpgNetworks) -> Any:
        z_own, m_own = action_of(own, leaves)
        policy = -value(networks.value, jax.lax.stop_gradient(z_own), m_own)
        critic = jax.lax.stop_gradient(error) * value(own.value, jax.lax.stop_gradient(z), action)
        return policy + critic

    return eqx.filter_grad(loss)(networks)


_EMBED: Any = eqx.filter_jit(embed)
_SCORE: Any = eqx.filter_jit(log_probabilities)
_ACT: Any = eqx.filter_jit(
    lambda networks, embeddings, leaves: jax.nn.sigmoid(networks.policy(embed_leaves(networks, embeddings, leaves))[0])
)


def _stack(task: TrainingBlock, choices: Sequence[Choice], rows: int) -> tuple[Array, Array, Array, Array]:
    """Return what the policy saw of recursions as arrays, filled up to a number of rows with one ending each."""
    leaves = np.zeros((rows, task.size), np.float32)
    members = np.zeros((rows, SEEN, task.size), np.float32)
    numbers = np.zeros((rows, SEEN, ENDING_NUMBERS), np.float32)
    counts = np.ones(rows, np.int32)
    leaves[: len(choices)] = rows_of([choice.leaves for choice in choices], task.size)
    for at, choice in enumerate(choices):
        members[at, : choice.count], numbers[at, : choice.count] = choice.members, choice.numbers
        counts[at] = choice.count
    return leaves, members, numbers, counts
