"""The work of convolutions beside their products, and of pools, by the kernels of onnxruntime's CPU provider.

A convolution whose channels are multiples of 16 is computed in blocks of channels (onnxruntime's NCHWc optimisation,
``nchwc_transformer.cc``): its values are brought into that layout and back. Otherwise its input is expanded: for each
position of the output, the elements under the window are copied to a column of a matrix, which is then multiplied by
the filters (MLAS, ``convolve.cpp``). With one filter in a group, as in depthwise convolutions, copies take most of the
time.

There are three kinds of kernels of pools (MLAS, ``pooling.cpp`` and ``snchwc.cpp``, and the NCHWc optimisation):

- *blocked*: if the channels of an image are a multiple of 16, its values are brought into blocks of 16 channels, pooled
  with whole vectors, and brought back;
- *rows*: otherwise, if the last stride is 1 or 2, a row of the output is computed with vectors of 16 bytes: first the
  rows of the window are reduced to one row, then its columns;
- *single*: all other outputs are computed one after another, element by element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: The channels of a block in onnxruntime's NCHWc layout. A convolution reads fewer input channels as they are.
_CHANNEL_BLOCK = 16
#: The rank of an image: batch, channels, height, width.
_IMAGE_RANK = 4
#: Steps for each element of the matrix: without a stride, a load and a store of a vector of 4 elements; with one, a
#: load and a store of each element, which overlap. Reading a vector of 4 elements for the product is included.
_ROWS, _SINGLES = 0.5, 1.25
#: The elements of a vector of 16 bytes.
_SHORT = 4
#: The largest last stride of the kernel by rows.
_LARGEST_STRIDE = 2
#: Cycles of an element that is reduced alone, since each addition or comparison waits for the one before.
_CHAINED = 2.0
#: Steps of a division of a vector, which only averages have.
_DIVISION = 2.0
#: Operations for each element under a window in the blocked kernel: one to load it and one to compare or add it.
_BLOCKED_OPERATIONS = 2.0


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution of float32."""

    #: The shapes of the input, the filters [channels, input channels of a group, window...] and the output.
    input: Sequence[int]
    filters: Sequence[int]
    output: Sequence[int]
    groups: int
    stride: Sequence[int]


def is_blocked(convolution: Convolution) -> bool:
    """Return whether a convolution is computed in blocks of channels."""
    filters, inner = convolution.filters[:2]
    if len(convolution.input) != _IMAGE_RANK:
        return False
    if convolution.groups == 1:
        return inner < _CHANNEL_BLOCK or inner % _CHANNEL_BLOCK == 0
    depthwise = inner == 1 and filters == convolution.groups
    return filters % _CHANNEL_BLOCK == 0 and (
        depthwise or (inner % _CHANNEL_BLOCK == 0 and filters // convolution.groups % _CHANNEL_BLOCK == 0)
    )


def expansion_steps(convolution: Convolution) -> float:
    """Return the steps on short vectors or single elements that expand the input; zero for windows of one element."""
    window, strided = math.prod(convolution.filters[2:]), max(convolution.stride, default=1) > 1
    if window <= 1 and not strided:
        return 0.0
    positions = math.prod(convolution.output[:1]) * math.prod(convolution.output[2:])
    elements = positions * window * convolution.filters[1] * convolution.groups
    return elements * (_SINGLES if strided else _ROWS)


@dataclass(frozen=True, slots=True)
class Pool:
    """A pooling operator."""

    #: The shapes of the input and the output: batch, channels, and spatial dimensions.
    input: Sequence[int]
    output: Sequence[int]
    window: Sequence[int]
    stride: Sequence[int]
    average: bool
    float32: bool = True
    #: The number of outputs; a second one holds positions of maxima.
    outputs: int = 1


def pool_work(pool: Pool) -> tuple[float, float, float, bool]:
    """Return the work of a pooling operator.

    Returns:
        Elements that are loaded and reduced; steps on vectors of 16 bytes or on single elements; rows or single
        outputs, each with the overhead of a loop; and whether the kernel is the blocked one, which has neither.
    """
    elements, reduced = math.prod(pool.output), math.prod(pool.window)
    operations = _BLOCKED_OPERATIONS * elements * reduced
    image = len(pool.input) == _IMAGE_RANK and pool.float32
    if image and pool.input[1] % _CHANNEL_BLOCK == 0 and pool.outputs == 1:
        return operations, 0.0, 0.0, True
    if pool.float32 and elements == math.prod(pool.input[:2]):  # one output for each channel
        steps = reduced // _SHORT + reduced % _SHORT
        return operations, elements * steps, elements, False
    if pool.float32 and len(pool.input) >= _IMAGE_RANK and pool.stride[-1] <= _LARGEST_STRIDE:
        rows = math.prod(pool.output[:-1])
        return operations, rows * _row_steps(pool, reduced / max(1, pool.window[-1])), rows, False
    return operations, _CHAINED * elements * reduced, elements, False


def _row_steps(pool: Pool, height: float) -> float:
    """Return the steps for one row of the output, from windows of so many rows."""
    width = pool.input[-1]
    vectors = math.ceil(pool.output[-1] * pool.stride[-1] / _SHORT)
    divisions = _DIVISION * vectors if pool.average else 0.0
    return height * (width // _SHORT + width % _SHORT) + pool.window[-1] * vectors + divisions
