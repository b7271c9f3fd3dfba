"""The file beside a model that receives its large weights while the model is built.

A weight is generated and written in blocks, so a model of any size is built in little memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx

#: Weights of at least so many bytes are written to the file; all others stay in the model, far below its limit of 2
#: GB.
LARGE_BYTES = 1 << 20
#: Offsets are multiples of the page size, so that readers can map the weights into memory.
_ALIGNMENT = 4096


class WeightsFile:
    """A writer of external weights.

    Args:
        file: The file, opened for writing.
        location: The file's name as the model states it, relative to the model's folder.

    Attributes:
        size: Bytes written so far, gaps included.
    """

    def __init__(self, file: BinaryIO, location: str) -> None:
        self._file = file
        self._location = location
        self.size = 0

    def add(
        self, name: str, shape: Sequence[int], element: np.dtype[Any], blocks: Iterable[npt.NDArray[Any]]
    ) -> onnx.TensorProto:
        """Write a weight and return the tensor that refers to it.

        Args:
            name: Its name.
            shape: Its shape.
            element: The type of its elements.
            blocks: Its values in order, in arrays of any sizes that together have ``shape``.
        """
        self.size += -self.size % _ALIGNMENT
        self._file.seek(self.size)
        tensor = onnx.TensorProto(
            name=name,
            data_type=onnx.helper.np_dtype_to_tensor_dtype(element),
            dims=shape,
            data_location=onnx.TensorProto.EXTERNAL,
        )
        length = math.prod(shape) * element.itemsize
        for key, value in (("location", self._location), ("offset", str(self.size)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
        for block in blocks:
            self._file.write(np.ascontiguousarray(block).data)
        self.size += length
        return tensor
