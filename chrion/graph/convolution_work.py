"""The work of convolutions beside their products, by the kernels of onnxruntime's CPU provider.

A convolution whose channels are multiples of 16 is computed in blocks of channels (onnxruntime's NCHWc optimisation,
``nchwc_transformer.cc``): its values are brought into that layout and back. Otherwise its input is expanded: for each
position of the output, the elements under the window are copied to a column of a matrix, which is then multiplied by
the filters (MLAS, ``convolve.cpp``). With one filter in a group, as in depthwise convolutions, copies take most of the
time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: The channels of a block in onnxruntime's NCHWc layout. A convolution reads fewer input channels as they are.
CHANNEL_BLOCK = 16
#: The rank of an image: batch, channels, height, width.
IMAGE_RANK = 4
#: Steps for each element of the matrix: without a stride, a load and a store of a vector of 4 elements; with one, a
#: load and a store of each element, which overlap. Reading a vector of 4 elements for the product is included.
_ROWS, _SINGLES = 0.5, 1.25


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
    if len(convolution.input) != IMAGE_RANK:
        return False
    if convolution.groups == 1:
        return inner < CHANNEL_BLOCK or inner % CHANNEL_BLOCK == 0
    depthwise = inner == 1 and filters == convolution.groups
    return filters % CHANNEL_BLOCK == 0 and (
        depthwise or (inner % CHANNEL_BLOCK == 0 and filters // convolution.groups % CHANNEL_BLOCK == 0)
    )


def expansion_steps(convolution: Convolution) -> float:
    """Return the steps on short vectors or single elements that expand the input; zero for windows of one element."""
    window, strided = math.prod(convolution.filters[2:]), max(convolution.stride, default=1) > 1
    if window <= 1 and not strided:
        return 0.0
    positions = math.prod(convolution.output[:1]) * math.prod(convolution.output[2:])
    elements = positions * window * convolution.filters[1] * convolution.groups
    return elements * (_SINGLES if strided else _ROWS)
