"""The work of pooling operators, by the kernels of onnxruntime's CPU provider.

There are three kinds of kernel (MLAS, ``pooling.cpp`` and ``snchwc.cpp``, and onnxruntime's NCHWc optimisation):

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

from chrion.graph.convolution_work import CHANNEL_BLOCK, IMAGE_RANK

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


@dataclass(frozen=True, slots=True)
class PoolWork:
    """The work of a pooling operator on a CPU."""

    #: Elements that are loaded and reduced, on whole vectors.
    operations: float
    #: Steps on vectors of 16 bytes or on single elements; zero in the blocked kernel.
    short_vectors: float = 0.0
    #: Rows or single outputs, each with the overhead of a loop.
    pieces: float = 0.0
    blocked: bool = False


def pool_work(pool: Pool) -> PoolWork:
    """Return the work of a pooling operator."""
    elements, reduced = math.prod(pool.output), math.prod(pool.window)
    operations = _BLOCKED_OPERATIONS * elements * reduced
    image = len(pool.input) == IMAGE_RANK and pool.float32
    if image and pool.input[1] % CHANNEL_BLOCK == 0 and pool.outputs == 1:
        return PoolWork(operations, blocked=True)
    if pool.float32 and elements == math.prod(pool.input[:2]):  # one output for each channel
        steps = reduced // _SHORT + reduced % _SHORT
        return PoolWork(operations, elements * steps, elements)
    if pool.float32 and len(pool.input) >= IMAGE_RANK and pool.stride[-1] <= _LARGEST_STRIDE:
        rows = math.prod(pool.output[:-1])
        return PoolWork(operations, rows * _row_steps(pool, reduced / max(1, pool.window[-1])), rows)
    return PoolWork(operations, _CHAINED * elements * reduced, elements)


def _row_steps(pool: Pool, height: float) -> float:
    """Return the steps for one row of the output, from windows of so many rows."""
    width = pool.input[-1]
    vectors = math.ceil(pool.output[-1] * pool.stride[-1] / _SHORT)
    divisions = _DIVISION * vectors if pool.average else 0.0
    return height * (width // _SHORT + width % _SHORT) + pool.window[-1] * vectors + divisions
