"""Chat templates: the text of a conversation, as the model was trained on it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from chrion.errors import ModelError, OptionError
from chrion.graph.context_length import read_configuration


class ChatTemplate:
    """The template of a model, in the files that transformers writes beside it.

    Args:
        source: The template.
        tokens: Special tokens that it may use, ``bos_token`` for example.

    Raises:
        ModelError: The template is not valid.
        OptionError: The library Jinja is not installed.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        try:
            from jinja2 import TemplateError  # noqa: PLC0415 - an optional dependency
            from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415 - an optional dependency
        except ImportError as error:
            raise OptionError("chats need the library jinja2", hint="pip install 'chrion[text]'") from error
        # As in transformers, whose templates these are.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        self._tokens = dict(tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"chat template: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of a conversation, up to the beginning of the answer.

        Raises:
            OptionError: The template refuses the messages.
        """
        try:
            text: str = self._template.render(messages=messages, add_generation_prompt=True, tools=None, **self._tokens)
        except Exception as error:  # a template may raise what it likes
            raise OptionError(f"messages: the chat template refuses them: {error}") from error
        return text


def find_chat_template(model: Path) -> ChatTemplate | None:
    """Return the chat template beside a model, if there is one.

    Raises:
        ModelError: A file is damaged.
    """
    content = read_configuration(model.parent / "tokenizer_config.json")
    file = model.parent / "chat_template.jinja"
    try:
        source = file.read_text(encoding="utf-8") if file.is_file() else content.get("chat_template")
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not text: {error}") from error
    if isinstance(source, list):  # several by name
        named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = named[0].get("template") if named else None
    if not isinstance(source, str):
        return None
    given = {name: content.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    tokens = {name: value.get("content") if isinstance(value, dict) else value for name, value in given.items()}
    return ChatTemplate(source, {name: value for name, value in tokens.items() if isinstance(value, str)})


def _raise(message: str) -> None:
    raise ValueError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
