"""Chat templates: the text of a conversation, as the model was trained on it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from chrion.common.installation import install_hint
from chrion.errors import ModelError, OptionError
from chrion.generation.rewrites.context_length import read_configuration
from chrion.generation.rewrites.model_folder import model_folders
from chrion.generation.special_tokens import named_tokens

#: Variables of a template that have a meaning of their own, and no other source.
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_DEFAULT = "default"
#: The text of a message that a template has to render.
_PROBE = "2718281828"
Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """The template of a model, in the files that transformers writes beside it.

    Args:
        source: The template.
        tokens: Special tokens that it may use, ``bos_token`` for example.

    Raises:
        ModelError: The template is not valid.
        OptionError: The library Jinja is not installed.
    """

    def __init__(self, source: str, tokens: Mapping[str, Any]) -> None:
        try:
            from jinja2 import TemplateError  # noqa: PLC0415 - an optional dependency

            from chrion.serving.server.template_environment import make_environment  # noqa: PLC0415 - needs Jinja
        except ImportError as error:
            raise OptionError("chats need the library jinja2", hint=install_hint("text")) from error
        self._tokens = dict(tokens)
        try:
            self._template = make_environment().from_string(source)
        except TemplateError as error:
            raise ModelError(f"chat template: {error}") from error
        self._parts = False
        #: Why the template renders no message of a user; empty if it does.
        self.obstacle = self._find_obstacle()

    def render(
        self, messages: Messages, variables: Mapping[str, Any] = _NOTHING, *, add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: The messages, with texts as contents.
            variables: Further variables of the template, by name.
            add_generation_prompt: End the text with the beginning of the answer.

        Raises:
            OptionError: The template refuses the messages.
        """
        given = {**self._tokens, **variables, "add_generation_prompt": add_generation_prompt}
        # As in transformers 5, whose templates print the content null as a word otherwise. Older ones ask for null.
        without = [{name: value for name, value in message.items() if value is not None} for message in messages]
        if without != [*messages]:
            with contextlib.suppress(OptionError):
                return self._render(without, given)
        return self._render(messages, given)

    def _render(self, messages: Messages, variables: Mapping[str, Any]) -> str:
        if self._parts:
            messages = [_with_parts(message) for message in messages]
        try:
            text: str = self._template.render(messages=messages, tools=None, documents=None, **variables)
        except Exception as error:  # a template may raise what it likes
            raise OptionError(f"messages: the chat template refuses them: {error}") from error
        return text

    def _find_obstacle(self) -> str:
        """Return why the template renders no message of a user; empty if it does.

        Templates of models for text and images may render lists of parts only; then texts are given to them as parts.
        """
        reasons = []
        for self._parts in (False, True):
            reasons.append("the template renders no content of a user")
            try:
                if _PROBE in self.render([{"role": "user", "content": _PROBE}]):
                    return ""
            except OptionError as error:
                reasons[-1] = str(error)
        self._parts = False
        return reasons[0]


def find_chat_template(model: Path) -> ChatTemplate | None:
    """Return the chat template beside a model, if there is one: the one named ``default``, or the only one.

    Raises:
        ModelError: A file is damaged, the template is not valid, or several have other names.
    """
    for folder in model_folders(model):
        if sources := _find_sources(folder):
            break
    else:
        return None
    source = sources.get(_DEFAULT) or (next(iter(sources.values())) if len(sources) == 1 else None)
    if source is None:
        raise ModelError(f"{folder}: expected a chat template named default, found {', '.join(sorted(sources))}")
    return ChatTemplate(source, named_tokens(folder))


def _find_sources(folder: Path) -> dict[str, str]:
    """Return the templates in a folder by name. As in transformers, those in files of their own replace all others."""
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (file := folder / "chat_template.jinja").is_file():
        files[_DEFAULT] = file
    if files:
        return {name: _read(path) for name, path in files.items()}
    for name in ("tokenizer_config.json", "chat_template.json"):
        if sources := _by_name(read_configuration(folder / name).get("chat_template")):
            return sources
    return {}


def _by_name(value: Any) -> dict[str, str]:
    """Return the templates of a key ``chat_template``: a text, an object by name, or a list of named ones."""
    if isinstance(value, str):
        return {_DEFAULT: value}
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    pairs = value.items() if isinstance(value, dict) else ()
    return {name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)}


def _read(path: Path) -> str:
    """Return the text of a file, without a byte-order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not text: {error}") from error


def _with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
