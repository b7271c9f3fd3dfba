"""Chat templates render what transformers renders; skipped in environments without it."""

from __future__ import annotations

from typing import Any

import pytest

from chrion.serving.server.chat_template import ChatTemplate
from template_cases import CHAT, RENDERED, TOKENS

templates = pytest.importorskip("transformers.utils.chat_template_utils", reason="no transformers in this environment")
pytestmark = pytest.mark.filterwarnings("ignore")  # the library itself warns


@pytest.mark.parametrize("source", RENDERED)
@pytest.mark.parametrize("variables", [{}, {"bos_token": "<b>", "enable_thinking": False}])
def test_templates_render_the_same(source: str, variables: dict[str, Any]) -> None:
    """With the same messages, special tokens and variables, the text is the same."""
    given = {**TOKENS, **variables}
    (expected,), _ = templates.render_jinja_template([CHAT], chat_template=source, add_generation_prompt=True, **given)
    assert ChatTemplate(source, TOKENS).render(CHAT, variables) == expected
    if not variables:
        assert RENDERED[source] == expected
