"""The libraries of the extra ``learn``, or one message that names those that are missing."""

from __future__ import annotations

from chrion.common.installation import require_extras

require_extras("TOP's agents", {"learn": ["equinox", "jax", "optax", "safetensors"]})

import equinox as eqx  # noqa: E402 - of the extra
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

__all__ = ["eqx", "jax", "jnp", "optax"]
