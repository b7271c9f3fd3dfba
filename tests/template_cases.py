"""Chat templates, and what transformers renders with them."""

from __future__ import annotations

from typing import Any

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You are é."},
    {"role": "user", "content": "hi <a>"},
    {"role": "assistant", "content": "yo"},
]
TOKENS: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "cls_token": "[CLS]",
    "additional_special_tokens": ["<a>", "<b>"],
}
_EACH = "{% for m in messages %}"
#: Templates with the texts of CHAT and TOKENS, with the beginning of the answer.
RENDERED = {
    _EACH + "{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}": "You are é.;hi <a>;yo;",
    # A block has a scope of its own.
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}": "21",
    _EACH + "{%- generation -%}\n  {{ m.role }}\n{%- endgeneration -%}{% endfor %}": "systemuserassistant",
    "{{ messages[1]|tojson }}": '{"role": "user", "content": "hi <a>"}',
    "{{ messages[0]|tojson(ensure_ascii=True) }}": '{"role": "system", "content": "You are \\u00e9."}',
    "{{ messages[0]|tojson(ensure_ascii=False) }}": '{"role": "system", "content": "You are é."}',
    "{{ messages[1]|tojson(separators=(',', ':')) }}": '{"role":"user","content":"hi <a>"}',
    "{{ messages[1]|tojson(sort_keys=True) }}": '{"content": "hi <a>", "role": "user"}',
    "{{ {'a': 1}|tojson(indent=2) }}": '{\n  "a": 1\n}',
    "{{ {'b': 1, 'a': 2}|tojson(false, none, (',', ':'), true) }}": '{"a":2,"b":1}',
    "{% if tools is none %}no tools{% endif %} {% if documents is none %}no documents{% endif %}": (
        "no tools no documents"
    ),
    "{{ cls_token }}{{ bos_token }}{{ sep_token }}{{ additional_special_tokens }}": "[CLS]<s>['<a>', '<b>']",
    "{% if add_generation_prompt %}>{% endif %}": ">",
    _EACH + "{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}": "systemuser",
}
