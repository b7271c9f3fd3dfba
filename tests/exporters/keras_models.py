"""Models of TensorFlow and Keras, exported by tf2onnx and by Keras itself."""

from __future__ import annotations

import os

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf2onnx
from cases import Feed, case, main
from keras import layers

REQUIREMENTS = [
    "keras==3.15.1",
    "numpy==2.4.6",
    "onnx==1.23.2",
    "tensorflow-cpu==2.21.0",
    "tf2onnx==1.17.0",
]

#: Names and shapes of inputs; None is a dynamic axis.
Signature = Mapping[str, tuple[int | None, ...]]


def draw(signature: Signature, sizes: int, *, high: int = 0, seed: int = 0) -> Feed:
    """Draw a request whose dynamic axes all have one size: whole numbers below ``high``, else normal ones."""
    rng = np.random.default_rng(seed)
    feed: dict[str, Any] = {}
    for name, shape in signature.items():
        concrete = [sizes if size is None else size for size in shape]
        drawn = rng.integers(0, high, concrete) if high else rng.standard_normal(concrete)
        feed[name] = drawn.astype(np.int32 if high else np.float32)
    return feed


def to_channels_first(feed: Feed) -> Feed:
    """Move the last axis of every input after the first."""
    return {name: np.moveaxis(np.asarray(value), -1, 1) for name, value in feed.items()}


def function(
    name: str, signature: Signature, *, opset: int = 18, sizes: Sequence[int] = (1, 3, 6)
) -> Callable[..., Any]:
    """Declare a case that exports the decorated function of tensors."""

    def register(body: Callable[..., Any]) -> Callable[..., Any]:
        @case(name, exporter="tf2onnx", package="tf2onnx")
        def make(path: Path) -> Sequence[Feed]:
            keras.utils.set_random_seed(0)
            specs = [tf.TensorSpec(shape, tf.float32, name=key) for key, shape in signature.items()]
            tf2onnx.convert.from_function(tf.function(body), specs, opset=opset, output_path=str(path))
            return [draw(signature, size, seed=size) for size in sizes]

        return body

    return register


def network(
    name: str, signature: Signature, *, opset: int = 17, high: int = 0, own: bool = False, **arguments: Any
) -> Callable[..., Any]:
    """Declare a case that exports the Keras model that the decorated function builds from its inputs.

    Args:
        name: Of the case.
        signature: Inputs, whose first axis is the batch.
        opset: Of the exported model.
        high: Whole numbers below this are drawn as inputs, if not 0.
        own: Whether Keras's own exporter is called rather than tf2onnx.
        arguments: Of the exporter.
    """

    def register(build: Callable[..., Any]) -> Callable[..., Any]:
        @case(name, exporter="keras export" if own else "tf2onnx (Keras)", package="keras" if own else "tf2onnx")
        def make(path: Path) -> Sequence[Feed]:
            keras.utils.set_random_seed(0)
            kind = "int32" if high else "float32"
            inputs = [keras.Input(shape[1:], dtype=kind, name=key) for key, shape in signature.items()]
            model = keras.Model(inputs, build(*inputs), name=name.replace("-", "_"))
            specs = [tf.TensorSpec(shape, kind, name=key) for key, shape in signature.items()]
            if own:
                model(draw(signature, 2, high=high))
                model.export(path, format="onnx", verbose=False, **arguments)
            else:
                call = tf.function(lambda *values: model(list(values), training=False))
                tf2onnx.convert.from_function(call, specs, opset=opset, output_path=str(path), **arguments)
            feeds = [draw(signature, size, high=high, seed=size) for size in (1, 2, 5)]
            return [to_channels_first(feed) for feed in feeds] if "inputs_as_nchw" in arguments else feeds

        return build

    return register


def gelu(x: Any) -> Any:
    """Approximate by tanh, since the exact one ends in an operator that the exporter does not know."""
    return keras.activations.gelu(x, approximate=True)


FLAT: Signature = {"x": (None, 16)}
IMAGE: Signature = {"image": (None, 16, 16, 3)}
SERIES: Signature = {"series": (None, 10, 6)}


@network("dense", FLAT)
def dense(x: Any) -> Any:
    """Stack dense layers with normalisation and dropout."""
    h = layers.Dense(32, activation="relu")(x)
    h = layers.Dropout(0.5)(layers.BatchNormalization()(h))
    return layers.Dense(4, activation="softmax")(layers.LayerNormalization()(h))


@network("dense-opset11", FLAT, opset=11)
def dense_old(x: Any) -> Any:
    """Stack dense layers with various activations."""
    for activation in ("elu", "selu", "tanh", "softplus", "swish", "softsign"):
        x = layers.Dense(16, activation=activation)(x)
    return x


@network("convolution", IMAGE)
def convolution(image: Any) -> Any:
    """Build a small classifier of images, channels last."""
    h = layers.Conv2D(8, 3, padding="same", activation="relu")(image)
    h = layers.MaxPooling2D(2)(h)
    h = layers.Conv2D(16, 3, strides=2, padding="same")(h)
    h = layers.ReLU(max_value=6)(layers.BatchNormalization()(h))
    return layers.Dense(5)(layers.Flatten()(h))


@network("convolution-channels-first", IMAGE, inputs_as_nchw=["image"])
def convolution_nchw(image: Any) -> Any:
    """Build the layers of an image whose axes the exporter rearranges."""
    return layers.GlobalAveragePooling2D()(layers.Conv2D(8, 3, activation="relu")(image))


@network("separable", IMAGE)
def separable(image: Any) -> Any:
    """Build separable and depthwise convolutions with a residual sum."""
    h = layers.SeparableConv2D(8, 3, padding="same", activation="relu")(image)
    g = layers.DepthwiseConv2D(3, padding="same")(h)
    h = layers.Add()([h, layers.Activation("hard_sigmoid")(g)])
    return layers.GlobalMaxPooling2D()(h)


@network("unet", IMAGE)
def unet(image: Any) -> Any:
    """Build an encoder and decoder of images with a skip connection."""
    skip = layers.Conv2D(4, 3, padding="same", activation="relu")(image)
    low = layers.Conv2D(8, 3, padding="same", activation="relu")(layers.AveragePooling2D(2)(skip))
    high = layers.Conv2DTranspose(4, 2, strides=2)(low)
    resized = layers.UpSampling2D(interpolation="bilinear")(low)
    return layers.Conv2D(1, 1, activation="sigmoid")(layers.Concatenate()([skip, high, resized]))


@network("convolution-of-series", SERIES)
def convolution_1d(series: Any) -> Any:
    """Build dilated causal convolutions."""
    for dilation in (1, 2, 4):
        series = layers.Conv1D(8, 3, padding="causal", dilation_rate=dilation, activation="relu")(series)
    return layers.GlobalAveragePooling1D()(series)


@network("lstm", SERIES)
def lstm(series: Any) -> Any:
    """Build two recurrent layers, of which the first returns all steps."""
    return layers.Dense(3)(layers.LSTM(8)(layers.LSTM(8, return_sequences=True)(series)))


@network("gru", SERIES)
def gru(series: Any) -> Any:
    """Build a gated recurrent layer that returns all steps and its state."""
    return layers.GRU(8, return_sequences=True, return_state=True)(series)


@network("bidirectional", SERIES)
def bidirectional(series: Any) -> Any:
    """Build a recurrent layer of both directions."""
    return layers.Bidirectional(layers.LSTM(6, return_sequences=True))(series)


@network("simple-rnn", {"series": (None, None, 6)})
def simple_rnn(series: Any) -> Any:
    """Build a plain recurrent layer over a dynamic number of steps."""
    return layers.SimpleRNN(8, go_backwards=True)(series)


@network("embedding", {"ids": (None, 7)}, high=40)
def embedding(ids: Any) -> Any:
    """Build a classifier of token ids."""
    h = layers.Embedding(40, 12)(ids)
    return layers.Dense(2, activation="sigmoid")(layers.GlobalAveragePooling1D()(h))


@network("embedding-masked-lstm", {"ids": (None, 7)}, high=10)
def masked(ids: Any) -> Any:
    """Build a recurrent layer that passes over padding."""
    return layers.LSTM(6)(layers.Embedding(10, 8, mask_zero=True)(ids))


@network("attention", SERIES)
def attention(series: Any) -> Any:
    """Build an encoder layer of self-attention."""
    mixed = layers.MultiHeadAttention(2, 4)(series, series)
    h = layers.LayerNormalization()(layers.Add()([series, mixed]))
    return layers.Dense(6)(layers.Dense(24, activation=gelu)(h))


@network("several-inputs-and-outputs", {"x": (None, 16), "series": (None, 10, 6)})
def several(x: Any, series: Any) -> Any:
    """Build a model of two inputs and two outputs."""
    h = layers.Concatenate()([layers.Dense(8)(x), layers.GRU(8)(series)])
    return {"score": layers.Dense(1)(h), "classes": layers.Dense(3, activation="softmax")(h)}


@network("keras-export-dense", FLAT, own=True)
def export_dense(x: Any) -> Any:
    """Build dense layers for Keras's own exporter."""
    return layers.Dense(3)(layers.Dense(8, activation="silu")(x))


@network("keras-export-convolution", IMAGE, own=True, opset_version=18)
def export_convolution(image: Any) -> Any:
    """Build layers of an image for Keras's own exporter."""
    return layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3, activation="relu")(layers.ZeroPadding2D(2)(image)))


@network("mobilenet", {"image": (None, 32, 32, 3)})
def mobilenet(image: Any) -> Any:
    """Build a narrow network for small devices."""
    return keras.applications.MobileNetV2(
        alpha=0.35, include_top=False, weights=None, input_tensor=image, pooling="avg"
    ).output


@network("half-precision", FLAT)
def half(x: Any) -> Any:
    """Compute in half precision between single precision weights."""
    h = layers.Dense(16, activation="relu", dtype="mixed_float16")(x)
    return layers.Dense(4, dtype="float32")(layers.Dense(16, dtype="mixed_float16")(h))


def tflite(name: str, *, quantised: bool) -> None:
    """Declare a case that exports a small network from the format of TensorFlow Lite."""

    @case(name, exporter="tf2onnx (TFLite)", package="tf2onnx", rtol=5e-2 if quantised else 1e-3, atol=5e-2)
    def make(path: Path) -> Sequence[Feed]:
        keras.utils.set_random_seed(0)
        image = keras.Input((16, 16, 3), batch_size=2, name="image")
        converter = tf.lite.TFLiteConverter.from_keras_model(keras.Model(image, convolution(image)))
        if quantised:
            samples = [draw({"image": (2, 16, 16, 3)}, 2, seed=seed)["image"] for seed in range(4)]
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
            converter.representative_dataset = lambda: ([sample] for sample in samples)
        file = path.with_suffix(".tflite")
        file.write_bytes(converter.convert())
        model, _ = tf2onnx.convert.from_tflite(str(file), opset=13, output_path=str(path))
        file.unlink()
        return [draw({model.graph.input[0].name: (2, 16, 16, 3)}, 2, seed=seed) for seed in range(2)]


tflite("lite", quantised=False)
tflite("lite-quantised", quantised=True)


@function("while-loop", {"x": (None, 4)})
def while_loop(x: Any) -> Any:
    """Double until the sum is large, with a bound."""

    def more(i: Any, value: Any) -> Any:
        return tf.logical_and(i < 8, tf.reduce_sum(tf.abs(value)) < 100.0)

    return tf.while_loop(more, lambda i, value: (i + 1, value * 2.0 + x), [tf.constant(0), x])


@function("cond", {"x": (None, 4)})
def cond(x: Any) -> Any:
    """Choose a branch by the sign of the sum."""
    weight = tf.constant(np.eye(4, dtype=np.float32) * 3)
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.nn.relu(x) @ weight, lambda: tf.exp(x) - 1.0)


@function("nested-control", {"x": (None, 4)}, opset=15)
def nested(x: Any) -> Any:
    """Branch inside a loop that Python's own statements describe."""
    total = tf.zeros_like(x)
    for i in tf.range(5):
        if tf.reduce_mean(total) > 0.5:
            total -= x
        else:
            total = total + tf.abs(x) * tf.cast(i, tf.float32)
    return total


@function("tensor-array", {"series": (None, 6)})
def tensor_array(series: Any) -> Any:
    """Gather the steps of a loop in an array."""
    steps = tf.shape(series)[0]
    out = tf.TensorArray(tf.float32, size=steps)
    state = tf.zeros([6])
    for i in tf.range(steps):
        state = tf.tanh(state + series[i])
        out = out.write(i, state)
    return out.stack()


@function("indices", {"x": (None, 8), "y": (None, 8)})
def indices(x: Any, y: Any) -> Any:
    """Take, sort, compare and scatter."""
    values, places = tf.math.top_k(x, k=3)
    taken = tf.gather(y, places, batch_dims=1)
    hot = tf.one_hot(tf.argmax(x, axis=1), 8)
    kept = tf.boolean_mask(x, tf.reduce_sum(y, axis=1) > -1e9)
    return values + taken, tf.where(hot > 0, x, y), kept[:, ::2], tf.einsum("ni,mi->nm", x, y)


@function("dynamic-shapes", {"x": (None, None, 4)}, sizes=(2, 3, 5))
def dynamic(x: Any) -> Any:
    """Reshape, tile and pad by sizes that are known at run time only."""
    shape = tf.shape(x)
    flat = tf.reshape(x, [shape[0] * shape[1], 4])
    tiled = tf.tile(flat[:1], [shape[0], 2])
    return flat, tf.pad(tiled, [[0, 0], [1, shape[1]]]), tf.broadcast_to(tf.reduce_mean(x), shape[:2])


if __name__ == "__main__":
    sys.exit(main("keras", sys.argv[1:]))
