"""Sessions that several threads run."""

from __future__ import annotations

import onnxruntime as ort
import pytest

from chrion.devices import CPU_PROVIDER
from chrion.errors import ModelError
from chrion.generation.session_threads import open_for_threads


def test_what_onnxruntime_raises_is_an_error_of_the_model() -> None:
    """The message has the model's name and the reason."""
    with pytest.raises(ModelError, match=r"^decoder: onnxruntime refuses the model: .*protobuf"):
        open_for_threads("decoder", b"not a model", ort.SessionOptions(), [CPU_PROVIDER])
