"""Training of networks: mini-batches, Adam, dropout, and row-wise updates of tables (WindTunnel, section 5.2.4).

Parameters are trained by Adam with the paper's weight decay and dropout. Since parameters are deviations, the
decay is towards the original pipeline. Tables of encoded categories stay in NumPy's memory: a step reads and writes
the rows of its batch only, by Adagrad with one number of state a row, so that its cost does not depend on their size.
Tables that integers look up are parameters as all others.

An epoch visits all rows in an order that depends on the seed and its number alone. So a run that continues from a saved
state has the results of one that was never interrupted.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from chrion.common.files import open_atomically
from chrion.errors import OptionError
from chrion.pipelines.soft.features import Features
from chrion.pipelines.soft.network import ScoreNetwork, libraries

Array = np.ndarray[Any, Any]
#: What keeps Adagrad from dividing by zero.
_LEAST = 1e-10


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How soft trees are trained; the batch, the dropout and the decay are those of the paper."""

    rate: float = 1e-2
    table_rate: float = 1e-2
    #: The rows of a step, at most; an epoch has at least :attr:`least_steps` of them.
    batch: int = 4096
    least_steps: int = 16
    dropout: float = 0.1
    decay: float = 1e-6
    epochs: int = 100
    #: Epochs without a lower loss after which the training ends.
    patience: int = 8


@dataclass(frozen=True, eq=False)
class Trained:
    """The best parameters and tables of a training."""

    parameters: Mapping[str, Array]
    tables: Sequence[Array]
    #: The epoch that they are from; 0 for the beginning.
    epoch: int
    #: The loss after each epoch: of the batches while training, and of the rows to choose with.
    curve: tuple[tuple[float, float], ...] = ()
    interrupted: bool = False


@dataclass(eq=False)
class _State:
    """The state of a training after an epoch."""

    parameters: dict[str, Any]
    moments: Any
    tables: list[Array]
    #: The sums of squares of Adagrad, a number for each row of a table.
    sums: list[Array]
    best: Trained
    curve: list[tuple[float, float]] = field(default_factory=list)

    @property
    def epoch(self) -> int:
        return len(self.curve)


class Checkpoint:
    """A file with the states of trainings, from which an interrupted one continues.

    Args:
        path: The file; None to keep no state.
        identity: What the trainings depend on.

    Raises:
        OptionError: The file is damaged, or it is of other trainings.
    """

    def __init__(self, path: Path | None, identity: str) -> None:
        self._path, self._identity = path, identity
        self._arrays: dict[str, Array] = {}
        if not path or not path.exists():
            return
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file)
            found = str(arrays.pop("identity"))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise OptionError(f"{path}: no state of a training", hint="name another file") from error
        if found != identity:
            raise OptionError(
                f"{path}: the state of a training with another model, other data or other options",
                hint="remove it, or name another file",
            )
        self._arrays = arrays

    def write(self, training: str, arrays: Mapping[str, Array]) -> None:
        """Replace the state of a training, and write the file."""
        if self._path:
            self._arrays |= {f"{training}/{name}": values for name, values in arrays.items()}
            with open_atomically(self._path) as file:
                np.savez(file, identity=np.array(self._identity), **self._arrays)  # type: ignore[arg-type] # no option

    def read(self, training: str) -> dict[str, Array]:
        """Return the state of a training; nothing if there is none."""
        prefix = f"{training}/"
        return {name.removeprefix(prefix): own for name, own in self._arrays.items() if name.startswith(prefix)}


class Training:
    """A training of a network.

    Args:
        network: The network.
        shapes: The shapes of the parameters that are trained, by name.
        data: The features of all rows, whose tables of categories are trained, too; and the classes or numbers.
        options: How they are trained.
        seed: The seed of the order of rows and of dropout.
    """

    def __init__(
        self,
        network: ScoreNetwork,
        shapes: Mapping[str, tuple[int, ...]],
        data: tuple[Features, Array],
        options: TrainingOptions,
        seed: int,
    ) -> None:
        self._jax, optax = libraries()
        features, y = data
        self._network, self._shapes, self._features, self._y = network, shapes, features, y.astype(np.float32)
        self._options, self._seed = options, seed
        self._optimiser = optax.adamw(options.rate, weight_decay=options.decay)
        self._optax = optax
        self._step = self._jax.jit(self._make_step())
        self._spread = [own.table.std(axis=0) for own in features.embeddings]
        self._spread = [np.where(spread > 0, spread, 1.0).astype(np.float32) for spread in self._spread]

    def run(  # noqa: PLR0913 - as documented
        self,
        fit: slice,
        choose: slice | None = None,
        *,
        epochs: int | None = None,
        checkpoint: Checkpoint | None = None,
        name: str = "training",
        progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> Trained:
        """Train on some rows.

        Args:
            fit: The rows to train on.
            choose: The rows whose loss decides when to stop, and which parameters are returned; the last ones if None.
            epochs: The number of epochs, at most.
            checkpoint: Where the state is kept.
            name: The name of the training there.
            progress: Is told the number of epochs done, and of all.

        Returns:
            The result; it is that until then after a keyboard interrupt.
        """
        epochs = self._options.epochs if epochs is None else epochs
        checkpoint = checkpoint or Checkpoint(None, "")
        state = self._begin(choose, checkpoint.read(name))
        try:
            while state.epoch < epochs and state.epoch - state.best.epoch < self._options.patience:
                progress(state.epoch, epochs)
                loss = self._epoch(state, fit)
                self._judge(state, loss, choose)
                checkpoint.write(name, self._saved(state))
        except KeyboardInterrupt:
            return replace(state.best, curve=tuple(state.curve), interrupted=True)
        return replace(state.best, curve=tuple(state.curve))

    def loss(self, parameters: Mapping[str, Any], features: Features, rows: slice) -> float:
        """Return the mean loss of some rows."""
        raw = self._network.scores(parameters, features, rows)
        return float(np.asarray(self._network.losses(raw, self._y[rows]), np.float64).mean())

    def _begin(self, choose: slice | None, saved: Mapping[str, Array]) -> _State:
        parameters = {name: np.zeros(shape, np.float32) for name, shape in self._shapes.items()}
        tables = [own.table.copy() for own in self._features.embeddings]
        first = Trained(dict(parameters), [table.copy() for table in tables], 0)
        sums = [np.zeros(len(table), np.float32) for table in tables]
        state = _State(dict(parameters), self._optimiser.init(parameters), tables, sums, first)
        self._best = self.loss(parameters, self._features, choose) if choose else np.inf
        return self._restored(state, saved) if saved else state

    def _epoch(self, state: _State, fit: slice) -> float:
        """Train for an epoch, in place, and return the mean loss of its steps."""
        rng = np.random.default_rng((self._seed, state.epoch))
        rows = fit.start + rng.permutation(fit.stop - fit.start)
        size = max(1, min(self._options.batch, len(rows) // self._options.least_steps))
        key = self._jax.random.fold_in(self._jax.random.key(self._seed), state.epoch)
        losses = []
        for at in range(0, len(rows) - size + 1, size):
            batch = rows[at : at + size]
            taken = [
                self._rows_of(state.tables[i], own.codes[batch]) for i, own in enumerate(self._features.embeddings)
            ]
            state.parameters, state.moments, loss, slopes = self._step(
                state.parameters,
                state.moments,
                np.asarray(self._features.fixed[batch], np.float32),
                self._y[batch],
                self._jax.random.fold_in(key, at),
                [own[1] for own in taken],
                [own[2] for own in taken],
            )
            losses.append(float(loss))
            for i, (own, *_) in enumerate(taken):
                self._update(state, i, own, np.asarray(slopes[i])[: len(own)])
        return float(np.mean(losses))

    @staticmethod
    def _rows_of(table: Array, codes: Array) -> tuple[Array, Array, Array]:
        """Return the categories of a batch, their rows, filled up to the size of the batch, and each row's place."""
        own, places = np.unique(codes, return_inverse=True)
        rows = np.zeros((len(codes), table.shape[1]), np.float32)
        rows[: len(own)] = table[own]
        return own, rows, places

    def _update(self, state: _State, at: int, rows: Array, slopes: Array) -> None:
        """Change rows of a table against their slopes, in units of the deviation of its columns."""
        scaled = slopes * self._spread[at]
        state.sums[at][rows] += (scaled**2).mean(axis=1)
        root = np.sqrt(state.sums[at][rows])[:, None] + _LEAST
        state.tables[at][rows] -= self._options.table_rate * self._spread[at] * scaled / root

    def _make_step(self) -> Callable[..., Any]:
        jax, network, optimiser, optax = self._jax, self._network, self._optimiser, self._optax
        columns = [own.features for own in self._features.embeddings]

        def step(parameters: Any, moments: Any, x: Any, y: Any, key: Any, tables: Any, places: Any) -> Any:  # noqa: PLR0913, PLR0917 - traced arrays
            def objective(parameters: Any, tables: Any) -> Any:
                whole = x
                for own, table, place in zip(columns, tables, places, strict=True):
                    whole = whole.at[:, own].set(table[place])
                return network.losses(network.raw(parameters, whole, key), y).mean()

            loss, (slopes, of_tables) = jax.value_and_grad(objective, argnums=(0, 1))(parameters, tables)
            changes, moments = optimiser.update(slopes, moments, parameters)
            return optax.apply_updates(parameters, changes), moments, loss, of_tables

        return step

    def _judge(self, state: _State, loss: float, choose: slice | None) -> None:
        """Add the epoch to the curve, and keep its parameters if they are the best."""
        features = self._features.with_tables(state.tables)
        chosen = self.loss(state.parameters, features, choose) if choose else loss
        state.curve.append((loss, chosen))
        if choose and not chosen < self._best:
            return
        self._best = chosen
        parameters = {name: np.asarray(values) for name, values in state.parameters.items()}
        state.best = Trained(parameters, [table.copy() for table in state.tables], state.epoch)

    def _saved(self, state: _State) -> dict[str, Array]:
        """Return a state as arrays by name."""
        arrays = {
            "curve": np.array(state.curve),
            "best_epoch": np.array(state.best.epoch),
            "best_loss": np.array(self._best),
        }
        arrays |= {f"parameter:{name}": np.asarray(values) for name, values in state.parameters.items()}
        arrays |= {f"best:{name}": values for name, values in state.best.parameters.items()}
        for name, values in (
            ("moment", self._jax.tree.leaves(state.moments)),
            ("table", state.tables),
            ("sum", state.sums),
            ("best_table", state.best.tables),
        ):
            arrays |= {f"{name}:{at}": np.asarray(value) for at, value in enumerate(values)}
        return arrays

    def _restored(self, state: _State, saved: Mapping[str, Array]) -> _State:
        """Return the state of arrays, which has the structure of another one."""
        structure = self._jax.tree.structure(state.moments)

        def listed(name: str, count: int) -> list[Array]:
            return [saved[f"{name}:{at}"] for at in range(count)]

        self._best = float(saved["best_loss"])
        tables = len(state.tables)
        best = {name: saved[f"best:{name}"] for name in state.parameters}
        return _State(
            parameters={name: saved[f"parameter:{name}"] for name in state.parameters},
            moments=self._jax.tree.unflatten(structure, listed("moment", structure.num_leaves)),
            tables=[table.copy() for table in listed("table", tables)],
            sums=[sums.copy() for sums in listed("sum", tables)],
            best=Trained(best, listed("best_table", tables), int(saved["best_epoch"])),
            curve=[(float(first), float(second)) for first, second in saved["curve"]],
        )
