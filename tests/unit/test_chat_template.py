"""Chat templates, with what transformers offers to them."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from chrion.errors import ModelError, OptionError
from chrion.server.chat_template import ChatTemplate, find_chat_template

MESSAGES = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]


def test_templates_of_transformers() -> None:
    """Loops may be left, the date may be asked for, and lines of blocks leave no white space."""
    source = "{% for m in messages %}\n  {% if m.content == 'two' %}{% break %}{% endif %}\n{{ m.content }}{% endfor %}"
    assert ChatTemplate(source, {}).render(MESSAGES) == "one"
    before = dt.datetime.now().astimezone().year
    assert int(ChatTemplate("{{ strftime_now('%Y') }}", {}).render(MESSAGES)) - before in {0, 1}


@pytest.mark.parametrize("source", ["{{ raise_exception('no') }}", "{{ messages[0]['none'].x }}", "{{ {}.pop('x') }}"])
def test_messages_that_a_template_cannot_render_are_refused(source: str) -> None:
    """Whatever a template raises, the messages do not suit it."""
    with pytest.raises(OptionError, match="messages: the chat template refuses them"):
        ChatTemplate(source, {}).render(MESSAGES)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", b"{% for %}"),
        ("chat_template.jinja", b"\xff"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"\xff"),
        pytest.param("tokenizer_config.json", b"[" * 100_000, id="nested too deeply"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    """The message is that of a model that cannot be read."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError):
        find_chat_template(tmp_path / "model.onnx")


def test_templates_without_the_default_one_are_none(tmp_path: Path) -> None:
    """A list of templates in another form than that of transformers has no template."""
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": ["text", {"name": "tools", "template": "x"}]}')
    assert find_chat_template(tmp_path / "model.onnx") is None
