"""Models of JAX, Flax and Equinox, exported by jax2onnx."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from cases import Feed, case, main
from flax import linen, nnx
from jax import lax
from jax2onnx import onnx_function, to_onnx
from onnx import helper

REQUIREMENTS = [
    "equinox==0.13.8",
    "flax==0.12.8",
    "jax==0.10.2",
    "jax2onnx==0.17.1",
    "numpy==2.4.6",
    "onnx==1.23.2",
    "onnx-ir==1.1.0",
]

#: Shapes of positional inputs; a name is a dynamic axis.
Shapes = Sequence[tuple[int | str, ...]]
ROWS: Shapes = [("B", 16)]
TOKENS: Shapes = [("B", 6, 16)]
IMAGES: Shapes = [("B", 12, 12, 3)]


def weights(*shape: int, seed: int = 0) -> jax.Array:
    """Draw weights whose scale keeps activations near one."""
    return jax.random.normal(jax.random.key(seed), shape) / np.sqrt(shape[0])


def draw(model: Any, size: int) -> Feed:
    """Draw a request for an exported model, whose dynamic axes all have one size."""
    rng = np.random.default_rng(size)
    feed: dict[str, Any] = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        shape = [dim.dim_value if dim.HasField("dim_value") else size for dim in dims]
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        drawn = rng.integers(0, 20, shape) if kind.kind == "i" else rng.standard_normal(shape)
        feed[value.name] = drawn.astype(kind)
    return feed


def exported(name: str, shapes: Shapes, *, integers: bool = False, **arguments: Any) -> Callable[..., Any]:
    """Declare a case that exports what the decorated function returns: a callable of arrays.

    Args:
        name: Of the case.
        shapes: Of its inputs.
        integers: Whether inputs are token ids.
        arguments: Of the exporter.
    """

    def register(build: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        @case(name, exporter="jax2onnx", package="jax2onnx")
        def make(path: Path) -> Sequence[Feed]:
            inputs = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes] if integers else list(shapes)
            model = to_onnx(build(), inputs, model_name=name, **arguments)
            path.write_bytes(model.SerializeToString())
            return [draw(model, size) for size in (1, 2, 5)]

        return build

    return register


@exported("perceptron", ROWS)
def perceptron() -> Callable[..., Any]:
    """Build two dense layers of plain arrays."""
    w, v = weights(16, 32), weights(32, 4, seed=1)
    return lambda x: jax.nn.softmax(jnp.maximum(x @ w + 0.1, 0) @ v)


@exported("activations", ROWS, opset=21)
def activations() -> Callable[..., Any]:
    """Chain activations and reductions."""

    def call(x: Any) -> Any:
        for activate in (jax.nn.gelu, jax.nn.silu, jax.nn.elu, jax.nn.softplus, jnp.tanh, jax.nn.leaky_relu):
            x = activate(x)
        return x, jnp.mean(x, axis=-1), jnp.max(x, axis=-1, keepdims=True), jnp.cumsum(x, axis=1)

    return call


@exported("nnx-perceptron", ROWS)
def nnx_perceptron() -> Callable[..., Any]:
    """Build layers of Flax's nnx."""
    rngs = nnx.Rngs(0)
    return nnx.Sequential(
        nnx.Linear(16, 32, rngs=rngs), jax.nn.relu, nnx.LayerNorm(32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)
    )


@exported("nnx-convolution", IMAGES)
def nnx_convolution() -> Callable[..., Any]:
    """Build convolutions and pooling of Flax's nnx."""
    rngs = nnx.Rngs(0)
    first, second = nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.Conv(8, 8, (3, 3), strides=2, rngs=rngs)
    norm = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)

    def call(x: Any) -> Any:
        x = nnx.avg_pool(jax.nn.relu(norm(first(x))), window_shape=(2, 2), strides=(2, 2))
        return jnp.mean(second(x), axis=(1, 2))

    return call


@exported("convolution-channels-first", IMAGES, inputs_as_nchw=[0])
def convolution_nchw() -> Callable[..., Any]:
    """Build a convolution whose input the exporter rearranges."""
    kernel = weights(3, 3, 3, 4)
    dims = ("NHWC", "HWIO", "NHWC")
    return lambda x: lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)


@exported("attention", TOKENS)
def attention() -> Callable[..., Any]:
    """Build self-attention of plain arrays."""
    project, out = weights(16, 48), weights(16, 16, seed=1)

    def call(x: Any) -> Any:
        query, key, value = (part.reshape(-1, 6, 4, 4) for part in jnp.split(x @ project, 3, axis=-1))
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key) / 2.0)
        return jnp.einsum("bhqk,bkhd->bqhd", scores, value).reshape(-1, 6, 16) @ out + x

    return call


@exported("nnx-attention", TOKENS)
def nnx_attention() -> Callable[..., Any]:
    """Build multi-head attention of Flax's nnx."""
    layer = nnx.MultiHeadAttention(num_heads=4, in_features=16, decode=False, rngs=nnx.Rngs(0))
    return lambda x: layer(x, deterministic=True)


@exported("functions", TOKENS)
def functions() -> Callable[..., Any]:
    """Build layers that become functions of the model."""

    @onnx_function
    class Layer(nnx.Module):
        """A dense layer with a residual sum."""

        def __init__(self, rngs: nnx.Rngs) -> None:
            self.dense = nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return x + jax.nn.gelu(self.dense(x))

    rngs = nnx.Rngs(0)
    layers = [Layer(rngs), Layer(rngs)]
    return lambda x: layers[1](layers[0](x))


@exported("embedding", [("B", 6)], integers=True)
def embedding() -> Callable[..., Any]:
    """Build a classifier of token ids."""
    table, head = weights(20, 8), weights(8, 2, seed=1)
    return lambda ids: jnp.mean(jnp.take(table, ids, axis=0), axis=1) @ head


@exported("scan", [(7, 16), (16,)])
def scan() -> Callable[..., Any]:
    """Build a recurrence over the first axis."""
    w = weights(16, 16)

    def call(x: Any, state: Any) -> Any:
        return lax.scan(lambda h, e: (jnp.tanh(h @ w + e), h.sum()), state, x)

    return call


@exported("scan-batched", [("B", 7, 8)])
def scan_batched() -> Callable[..., Any]:
    """Build a recurrence over the second axis of a dynamic batch."""
    w = weights(8, 8)

    def call(x: Any) -> Any:
        def step(h: Any, e: Any) -> Any:
            h = jnp.tanh(h @ w + e)
            return h, h

        last, states = lax.scan(step, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))
        return last, jnp.swapaxes(states, 0, 1)

    return call


@exported("while-loop", [(4, 8)])
def while_loop() -> Callable[..., Any]:
    """Build a loop whose number of iterations depends on values."""

    def call(x: Any) -> Any:
        def more(state: Any) -> Any:
            return jnp.logical_and(jnp.sum(jnp.abs(state[1])) < 500.0, state[0] < 20)

        return lax.while_loop(more, lambda state: (state[0] + 1, state[1] * 1.7), (jnp.int32(0), x))

    return call


@exported("fori-loop", [(4, 8)])
def fori_loop() -> Callable[..., Any]:
    """Build a loop of a fixed number of iterations."""
    w = weights(8, 8)
    return lambda x: lax.fori_loop(0, 6, lambda i, h: jnp.tanh(h @ w) + i, x)


@exported("cond", [(4, 8)])
def cond() -> Callable[..., Any]:
    """Build a choice between two branches."""
    w = weights(8, 8)
    return lambda x: lax.cond(jnp.sum(x) > 0, lambda v: v @ w, lambda v: jnp.exp(-v), x)


@exported("vmap", [("B", 5, 8)])
def vmap() -> Callable[..., Any]:
    """Map a function of rows over a batch."""
    w = weights(8, 8)

    def row(x: Any) -> Any:
        return jnp.sort(jnp.tanh(x @ w)), jnp.sum(x * x)

    return jax.vmap(jax.vmap(row))


@exported("gradient", ROWS)
def gradient() -> Callable[..., Any]:
    """Differentiate a loss by its input."""
    w, v = weights(16, 16), weights(16, 1, seed=1)
    return jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w) @ v))


@exported("indices", [(6, 8), (6, 8)])
def indices() -> Callable[..., Any]:
    """Take, compare, sort and scatter."""

    def call(x: Any, y: Any) -> Any:
        values, places = lax.top_k(x, 3)
        best = jnp.argmax(y, axis=1)
        return values, places, jnp.where(x > y, x, y), y.at[2].set(x[0]), x[:, ::2], jax.nn.one_hot(best, 8)

    return call


@exported("linen-perceptron", ROWS)
def linen_perceptron() -> Callable[..., Any]:
    """Build layers of Flax's linen."""
    layer = linen.Sequential([linen.Dense(32), linen.gelu, linen.Dense(4)])
    parameters = layer.init(jax.random.key(0), jnp.zeros((1, 16)))
    return lambda x: layer.apply(parameters, x)


@exported("equinox-perceptron", ROWS)
def equinox_perceptron() -> Callable[..., Any]:
    """Map a perceptron of Equinox over a batch."""
    layer = eqx.nn.MLP(16, 4, 24, 2, key=jax.random.key(0))
    return jax.vmap(layer)


@exported("double", [(4, 8)], enable_double_precision=True)
def double() -> Callable[..., Any]:
    """Compute in double precision."""
    w = np.random.default_rng(0).standard_normal((8, 8))
    return lambda x: jnp.tanh(x @ w)


if __name__ == "__main__":
    sys.exit(main("jax", sys.argv[1:]))
