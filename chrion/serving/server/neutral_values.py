"""Options of requests for text that are not implemented, with the values that change nothing.

Clients send many of them with the defaults of vLLM, SGLang, llama.cpp or TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

#: The values that change nothing by name.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bad_words": ([], ""),
    "beam_width": (1,),
    "best_of": (1,),
    "detokenize": (True,),
    "documents": ([],),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mirostat": (0,),
    "n_probs": (0,),
    "no_repeat_ngram_size": (0,),
    "no_stop_trim": (False,),
    "num_return_sequences": (1,),
    "options": ({},),
    "priority": (0,),
    "repeat_penalty": (1,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "return_log_probs": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "tfs_z": (1,),
    "top_a": (0,),
    "typical_p": (1,),
    "use_beam_search": (False,),
}


def is_neutral(name: str, value: Any, more: Mapping[str, tuple[Any, ...]] = MappingProxyType({})) -> bool:
    """Return whether an option has a value that changes nothing.

    Args:
        name: The option.
        value: Its value.
        more: Further options, and those that have other values in a protocol.
    """
    return any(_same(value, neutral) for neutral in more.get(name, NEUTRAL.get(name, ())))


def _same(value: Any, neutral: Any) -> bool:
    """Return whether two values of JSON are equal; true is no number."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
