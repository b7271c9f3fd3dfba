"""Small networks of every kind that the zoo builds, except plain recurrent stacks."""

from __future__ import annotations

from typing import Any

#: Parameters that make a network small, and the shape of its output.
SMALL: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "googlenet": ({"resolution": 64, "width": 0.1, "batch": 2, "classes": 7}, (2, 7)),
    "inception-v3": ({"resolution": 75, "width": 0.1, "batch": 2, "classes": 7}, (2, 7)),
    "squeezenet": ({"resolution": 48, "width": 0.1, "batch": 2, "classes": 7}, (2, 7)),
    "resnet-50": ({"resolution": 40, "width": 0.1, "batch": 2, "classes": 7}, (2, 7)),
    "nasnet-a": ({"resolution": 49, "channels": 8, "stem": 4, "cells": 1, "batch": 2, "classes": 7}, (2, 7)),
    "randwire": ({"resolution": 50, "channels": 4, "nodes": 12, "batch": 2, "classes": 7}, (2, 7)),
    "darts": ({"resolution": 50, "channels": 4, "cells": 6, "batch": 2, "classes": 7}, (2, 7)),
    "deepfm": ({"batch": 2, "vocabulary": 20, "hidden": 8}, (2, 1)),
    "dlrm": ({"batch": 2, "rows": 20, "lookups": 3, "embedding": 4, "hidden": 16}, (2, 1)),
    "llama": (
        {"batch": 2, "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "inner": 24, "seq": 6, "vocabulary": 20},
        (2, 6, 20),
    ),
    "moe": (
        {"batch": 2, "seq": 3, "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "inner": 24, "experts": 5},
        (2, 3, 16),
    ),
    "bert": ({"batch": 2, "layers": 2, "hidden": 16, "heads": 2, "inner": 32, "seq": 6, "vocabulary": 20}, (2, 6, 16)),
    "t5": (
        {"batch": 2, "layers": 2, "hidden": 16, "heads": 2, "inner": 32, "seq": 6, "target": 5, "vocabulary": 20},
        (2, 5, 20),
    ),
    "seq2seq": ({"batch": 2, "layers": 2, "hidden": 8, "vocabulary": 20, "seq": 6, "target": 5}, (2, 5, 20)),
}
