"""The generators of a server: one for each model whose ``model.toml`` has a table ``[generation]``.

They are opened at the start and stay in memory. Their sessions, and their keys and values, are deducted from the memory
for other models.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chrion.common.units import parse_size_mb
from chrion.errors import ChrionError, ContextLengthError, OptionError
from chrion.generation import Generator
from chrion.generation.token_bytes import TokenBytes
from chrion.serving.server.chat_template import ChatTemplate, find_chat_template
from chrion.serving.server.grace import Grace
from chrion.serving.server.repository import ServedVersion, scan, session_bytes
from chrion.serving.server.settings import GenerationSettings, read_settings

log = logging.getLogger("chrion.server")

Prompt = str | list[int]

#: Copies of a model without its external weights while it is read and taken apart, beside that of its session.
_COPIES_READ = 3
#: Factor on the characters of the longest token for a prompt of so many tokens: tokenizers may drop white space.
_UNUSED_TEXT = 4
#: Interval of looking for the end of requests, in seconds (a choice, not measured).
_POLL_S = 0.01
_NO_TOKENIZER = "no tokenizer.json beside the model that can be read, which text and the OpenAI API need"
_NO_CONTEXT = "longer requests may fail; config.json beside the model may have max_position_embeddings"


@dataclass(frozen=True)
class ServedGenerator:
    """A decoder that is served."""

    name: str
    version: str
    generator: Generator
    template: ChatTemplate | None
    #: Bytes of its sessions, and those that its keys and values may need.
    reserved_bytes: int
    #: Time within which a text must begin, unless its request has a shorter one.
    timeout_ms: float

    @functools.cached_property
    def pieces(self) -> TokenBytes:
        """The bytes of its tokens."""
        return TokenBytes(self.generator.tokenizer)

    def tokenizer_for(self, field: str) -> Any:
        """Return the tokenizer for a field of a request that needs it.

        Raises:
            OptionError: The model has none.
        """
        if self.generator.tokenizer is None:
            raise OptionError(f"{field}: model {self.name!r} has no tokenizer", hint="give input_ids, read output_ids")
        return self.generator.tokenizer

    def encode(self, prompt: Prompt, *, special: bool = True) -> list[int]:
        """Return the tokens of a prompt.

        A text that is certainly too long is refused before it is tokenised, which takes many times its memory.

        Args:
            prompt: Text or tokens.
            special: As in :meth:`chrion.Generator.encode`.

        Raises:
            ContextLengthError: The text has more tokens than fit.
            OptionError: The prompt is empty, has unknown tokens, or is text without a tokenizer.
        """
        limit = self.generator.most_new_tokens(1)
        if isinstance(prompt, str) and len(prompt) > _UNUSED_TEXT * limit * self._longest_token:
            message = f"the prompt has {len(prompt)} characters, more than {limit} tokens have"
            raise ContextLengthError(message, limit=limit, memory=limit != self.generator.context)
        return self.generator.encode(prompt, special=special)

    def text_of(self, prompt: Prompt) -> str:
        """Return the text of a prompt."""
        return prompt if isinstance(prompt, str) else str(self.tokenizer_for("prompt").decode(prompt))

    @functools.cached_property
    def _longest_token(self) -> int:
        """The characters of the longest token; a character may be a byte of the text."""
        return max((len(token) for token in self.tokenizer_for("text_input").get_vocab()), default=1)


def open_generators(
    repository: Path, budget: int, names: Collection[str] | None = None
) -> tuple[dict[str, ServedGenerator], dict[str, str]]:
    """Open the generators of a repository, of the highest version of each model.

    A model that cannot generate, or has no room beside those before it, is logged. One whose chat template cannot be
    read serves completions, and one without a tokenizer tokens.

    Args:
        repository: The folder.
        budget: Bytes of host memory for all models.
        names: The models to open; None for all of them.

    Returns:
        The generators by model, and for each model that cannot generate the reason.
    """
    latest = {
        entry.name: entry  # the versions of a model are in their order
        for entry in scan(repository, accelerator=False).values()
        if isinstance(entry, ServedVersion) and entry.settings.generation and (names is None or entry.name in names)
    }
    opened: dict[str, ServedGenerator] = {}
    failed: dict[str, str] = {}
    for name, version in sorted(latest.items()):
        settings = version.settings.generation or GenerationSettings()
        try:
            opened[name] = _open(name, version, settings, budget)
        except ChrionError as error:
            failed[name] = str(error)
            log.warning("cannot generate", extra={"fields": {"model": name, "reason": failed[name]}})
        else:
            budget -= opened[name].reserved_bytes
    return opened, failed


def _check_budget(budget: int, needed: int) -> None:
    """Raise an error if a generator needs more bytes of host memory than are left."""
    if needed > budget:
        raise OptionError(
            f"the generator needs at least {needed / 1e6:.0f} MB of {budget / 1e6:.0f} MB that are left for models",
            hint="set a smaller kv_memory in [generation], or a larger --host-budget",
        )


def list_generators(repository: Path) -> list[str]:
    """Return the names of the models whose settings have a table ``[generation]``; wrong settings are left out."""
    names = []
    for path in sorted(repository.glob("*/model.toml")):
        with contextlib.suppress(ChrionError):
            names += [path.parent.name] if read_settings(path).generation is not None else []
    return names


def find_template(name: str, path: Path) -> ChatTemplate | None:
    """Return the chat template of a model; log if there is none, or one that cannot be used.

    Args:
        name: The model's name.
        path: Its file.
    """
    template, obstacle = None, ""
    try:
        template = find_chat_template(path)
        obstacle = template.obstacle if template else ""
    except ChrionError as error:
        obstacle = str(error)
    if obstacle:
        log.warning("cannot chat", extra={"fields": {"model": name, "reason": obstacle}})
    elif template is None:
        log.info("no chat template", extra={"fields": {"model": name, "folder": str(path.parent)}})
    return template


def drain_generators(served: Sequence[ServedGenerator], grace: Grace) -> None:
    """Wait for the requests of generators as long as the grace lasts, and close them."""
    while not grace.is_over and any(one.generator.statistics().requests for one in served):
        time.sleep(_POLL_S)
    close_generators(served)


def close_generators(served: Sequence[ServedGenerator]) -> None:
    """Close generators; their requests end."""
    for one in served:
        one.generator.close()


def _kv_bytes(settings: GenerationSettings) -> int:
    return round(parse_size_mb(settings.kv_memory, "generation.kv_memory") * 1e6)


def _opening_bytes(version: ServedVersion) -> int:
    """Return the bytes of host memory that a generator needs while it is opened, without its keys and values.

    External weights of most decoders are in memory once; whether it is one of the others is known when it is open.
    """
    source = version.sources[0]
    return session_bytes(source.model_bytes) + _COPIES_READ * source.model.stat().st_size


def _open(name: str, version: ServedVersion, settings: GenerationSettings, budget: int) -> ServedGenerator:
    """Open the generator of a version.

    Raises:
        ChrionError: The model cannot generate, or needs more bytes of host memory than the budget.
    """
    path, kv_bytes = version.sources[0].model, _kv_bytes(settings)
    _check_budget(budget, _opening_bytes(version) + kv_bytes)
    template = find_template(name, path)
    generator = Generator(
        path,
        max_batch=settings.max_batch,
        kv_bytes=kv_bytes,
        chunk=settings.chunk,
        threads=version.settings.cores,
    )
    reserved = generator.weight_copies * session_bytes(version.sources[0].model_bytes) + kv_bytes
    try:
        _check_budget(budget, reserved)
    except OptionError:
        generator.close()
        raise
    if generator.tokenizer is None:
        log.warning("tokens only", extra={"fields": {"model": name, "reason": _NO_TOKENIZER}})
    if not generator.context:
        log.warning("the context length is unknown", extra={"fields": {"model": name, "hint": _NO_CONTEXT}})
    if generator.refused:
        log.warning("requests run one by one", extra={"fields": {"model": name, "reason": generator.refused}})
    return ServedGenerator(name, version.version, generator, template, reserved, version.settings.timeout_ms)
