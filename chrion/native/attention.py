"""The operator ``PooledAttention`` for onnxruntime, of ``attention.c``."""

from __future__ import annotations

import functools

import onnxruntime as ort

from chrion.native.library import load_library, path_of

_NAME = "attention"


@functools.cache
def attention_available() -> bool:
    """Return whether the operator was compiled when Chrion was installed."""
    return load_library(_NAME, "attention to pooled caches") is not None


def register_attention(options: ort.SessionOptions) -> None:
    """Let a session have the operator, which must be available."""
    options.register_custom_ops_library(str(path_of(_NAME)))
