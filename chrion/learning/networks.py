"""Networks of both agents, and their checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from chrion.common.files import write_atomically
from chrion.errors import OptionError
from chrion.learning.libraries import eqx, jax, jnp

M = TypeVar("M")
#: Hidden units of the paper's networks (section VI-B), the discount, and the learning rate.
VALUE, POLICY, AGGREGATE = (1024, 512, 300), (500, 128), (64,)
DISCOUNT, RATE = 0.95, 0.001


class Layers(eqx.Module):  # type: ignore[misc] # equinox has no types here
    """Linear layers with ReLU between them; the last one is linear, since the paper names no activation for it."""

    layers: tuple[Any, ...]

    def __init__(self, sizes: Sequence[int], key: Any) -> None:
        pairs = list(itertools.pairwise(sizes))
        keys = jax.random.split(key, len(pairs))
        self.layers = tuple(eqx.nn.Linear(a, b, key=k) for (a, b), k in zip(pairs, keys, strict=True))

    def __call__(self, x: Any) -> Any:
        """Return the output for one input."""
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


def squared_error(values: Any, targets: Any) -> Any:
    """Return half the mean squared TD error, whose gradient is ``(Q - y) grad Q``."""
    return 0.5 * jnp.mean((values - jax.lax.stop_gradient(targets)) ** 2)


def printed_error(values: Any, targets: Any) -> Any:
    """Return a loss whose gradient is ``y grad Q``, as Equation 3 is printed: Q falls without bound while y > 0."""
    return jnp.mean(jax.lax.stop_gradient(targets) * values)


def blend(target: M, online: M, share: float) -> M:
    """Return target networks moved by a share towards the online ones."""

    def move(old: Any, new: Any) -> Any:
        return (1 - share) * old + share * new if eqx.is_array(old) else old

    moved: M = jax.tree_util.tree_map(move, target, online)
    return moved


def save_networks(path: str | Path, networks: Any) -> None:
    """Write the parameters of networks to a safetensors file."""
    from safetensors.numpy import save  # noqa: PLC0415 - of the extra

    write_atomically(Path(path), save(_arrays(networks)))


def load_networks(path: str | Path, like: M) -> M:
    """Return networks with the parameters of a file.

    Args:
        path: The file.
        like: Networks of the same sizes.

    Raises:
        OptionError: The file is missing or damaged, or belongs to other networks.
    """
    from safetensors import SafetensorError  # noqa: PLC0415 - of the extra
    from safetensors.numpy import load  # noqa: PLC0415

    try:
        stored = load(Path(path).read_bytes())
    except (OSError, SafetensorError, KeyError) as error:  # a KeyError is a type that NumPy does not have
        raise OptionError(f"checkpoint {str(path)!r}: {error}") from error
    expected = _arrays(like)
    for name in sorted(expected.keys() | stored.keys()):
        own, other = (_layout(arrays.get(name)) for arrays in (expected, stored))
        if own != other:
            raise OptionError(f"checkpoint {str(path)!r}: {name}: expected {own}, found {other}")
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    filled = [jnp.asarray(stored[jax.tree_util.keystr(at)]) if eqx.is_array(leaf) else leaf for at, leaf in leaves]
    networks: M = jax.tree_util.tree_unflatten(structure, filled)
    return networks


def _arrays(networks: Any) -> dict[str, np.ndarray[Any, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(networks)
    return {jax.tree_util.keystr(at): np.asarray(leaf) for at, leaf in leaves if eqx.is_array(leaf)}


def _layout(array: np.ndarray[Any, Any] | None) -> str:
    return "nothing" if array is None else f"{array.dtype} {array.shape}"
