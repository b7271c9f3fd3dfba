"""Chat templates, with what transformers offers to them, in the files in which it stores them.

The expected texts are those that transformers 5.24 renders (``tests/libraries/test_chat_templates.py`` compares them).
"""

from __future__ import annotations

import datetime as dt
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from chrion.errors import ModelError, OptionError
from chrion.serving.server.chat_template import ChatTemplate, find_chat_template
from chrion.serving.server.generators import find_template
from template_cases import CHAT, RENDERED, TOKENS

MESSAGES = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
#: A template that prints the contents, and files that have it.
SOURCE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"
BOS = {"bos_token": "<s>", "eos_token": "</s>"}


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
        ("chat_template.json", b"{"),
        ("additional_chat_templates/tool_use.jinja", b"\xff"),
        pytest.param("tokenizer_config.json", b"[" * 100_000, id="nested too deeply"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    """The message is that of a model that cannot be read."""
    model = put(tmp_path, {name: content})
    with pytest.raises(ModelError):
        find_chat_template(model)


@pytest.mark.parametrize(("source", "expected"), RENDERED.items())
def test_templates_render_what_transformers_renders(source: str, expected: str) -> None:
    """Blocks, filters, special tokens and variables without a value are those of transformers."""
    assert ChatTemplate(source, TOKENS).render(CHAT) == expected


def test_variables_of_a_request() -> None:
    """A request may set variables, also those of special tokens, and leave out the beginning of the answer."""
    source = (
        "{{ bos_token }}{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render(MESSAGES) == "<s>>"
    assert template.render(MESSAGES, {"enable_thinking": False}) == "<s><think></think>>"
    assert template.render(MESSAGES, {"bos_token": "<b>"}, add_generation_prompt=False) == "<b>"


def test_contents_without_a_value() -> None:
    """A content of null is none at all, as in transformers 5; a template that asks for null gets it."""
    messages = [{"role": "assistant", "content": None, "tool_calls": []}]
    assert ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", {}).render(messages) == "[]"
    asking = "{% set content = messages[0]['content'] %}{{ 'null' if content is none else 'a' + content }}"
    assert ChatTemplate(asking, {}).render(messages) == "null"


def test_templates_of_parts_get_parts() -> None:
    """A template that renders nothing of a text, as those of models for images may, gets lists of parts."""
    source = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    template = ChatTemplate(source, {})
    assert (template.render(MESSAGES), template.obstacle) == ("onetwo", "")
    either = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}list{% endif %}{% endfor %}"
    assert ChatTemplate(either, {}).render(MESSAGES) == "onetwo"


def put(folder: Path, files: dict[str, Any]) -> Path:
    """Write files as text or JSON beside a model; return the model's path."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        data = content if isinstance(content, str | bytes) else json.dumps(content)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder / "model.onnx"


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"chat_template": SOURCE, **BOS}},
        {"tokenizer_config.json": {"chat_template": {"default": SOURCE, "tool_use": "x"}, **BOS}},
        {"tokenizer_config.json": {"chat_template": {"tool_use": SOURCE}, **BOS}},
        {
            "tokenizer_config.json": {
                "chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": SOURCE}],
                **BOS,
            }
        },
        {"tokenizer_config.json": {"chat_template": ["x", {"name": "tool_use", "template": SOURCE}], **BOS}},
        {"tokenizer_config.json": BOS, "chat_template.json": {"chat_template": SOURCE}},
        {"tokenizer_config.json": {"chat_template": "old", **BOS}, "chat_template.jinja": SOURCE},
        {"tokenizer_config.json": BOS, "chat_template.jinja": b"\xef\xbb\xbf" + SOURCE.encode()},
        {"tokenizer_config.json": BOS, "additional_chat_templates/tool_use.jinja": SOURCE},
        {
            "tokenizer_config.json": BOS,
            "additional_chat_templates/tool_use.jinja": "x",
            "chat_template.jinja": SOURCE,
        },
        {"tokenizer_config.json": {"chat_template": SOURCE}, "special_tokens_map.json": BOS},
        {
            "tokenizer_config.json": {"chat_template": SOURCE, "bos_token": "<s>"},
            "special_tokens_map.json": {"bos_token": "<t>", "eos_token": {"content": "</s>"}},
        },
    ],
)
def test_the_files_of_transformers(tmp_path: Path, files: dict[str, Any]) -> None:
    """The template is the default one, or the only one, of any of the files; so are the special tokens."""
    found = find_chat_template(put(tmp_path, files))
    assert found is not None
    assert found.render(MESSAGES) == "<s>onetwo</s>"


@pytest.mark.parametrize("files", [{}, {"tokenizer_config.json": {"chat_template": ["text", {"name": 3}], **BOS}}])
def test_models_without_a_template(tmp_path: Path, files: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """The log of the server says so at the start; a list in another form has no template."""
    with caplog.at_level(logging.INFO, "chrion.server"):
        assert find_template("llama", put(tmp_path, files)) is None
    (record,) = caplog.records
    assert (record.message, record.__dict__["fields"]["model"]) == ("no chat template", "llama")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for %}", "chat template: "),
        ("{{ raise_exception('no') }}", "messages: the chat template refuses them: no"),
        ("constant", "the template renders no content of a user"),
        ({"one": SOURCE, "two": SOURCE}, "expected a chat template named default, found one, two"),
    ],
)
def test_templates_that_cannot_be_used_are_logged(
    tmp_path: Path, source: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log of the server has the reason at the start."""
    find_template("llama", put(tmp_path, {"tokenizer_config.json": {"chat_template": source}}))
    (record,) = caplog.records
    assert record.message == "cannot chat"
    assert reason in record.__dict__["fields"]["reason"]
