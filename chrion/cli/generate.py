"""``chrion generate``."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from chrion.cli.console import note, show_json, step
from chrion.cli.options import CoresOption, ModelArgument
from chrion.common.units import format_count, format_ms
from chrion.errors import OptionError
from chrion.generation import Generator, Sampling, Stream
from chrion.generation.generator import TOKENIZER_HINT
from chrion.graph import load
from chrion.zoo.network import PRODUCER


def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Option("--prompt", "-p", metavar="TEXT", help="Prompt.")] = "",
    tokens: Annotated[str, typer.Option(metavar="N,N", help="Token ids of the prompt, instead of text.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum new tokens.")] = 64,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Sampling temperature; 0 for the most probable token.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(metavar="K", help="Sample from the K most probable tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(metavar="P", help="Nucleus (top-p) sampling; 1 for all tokens.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(metavar="R", help="Repetition penalty; 1 for none.")] = 1.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Stop sequence. Repeatable.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A tokenizer.json.", show_default="tokenizer.json beside the model"),
    ] = None,
    cores: CoresOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: the text, token ids and times.")
    ] = False,
) -> None:
    """Continue a text with a decoder that has a cache of keys and values.

    The text appears as it is generated. Without a tokenizer, give token ids; token ids are printed then. --top-k,
    --top-p and --seed have an effect with a --temperature above 0.
    """
    if bool(prompt) == bool(tokens):
        raise OptionError("expected either --prompt or --tokens", hint="for example --prompt TEXT or --tokens 1,2,3")
    given = prompt or _token_ids(tokens)
    with _naming_options("--prompt" if prompt else "--tokens"), contextlib.ExitStack() as opened:
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)
        with step(f"loading {model.name}"):
            graph = load(model)
            generator = Generator(graph, max_batch=1, threads=cores, tokenizer=tokenizer)
        opened.enter_context(generator)
        if generator.refused:
            note(f"warning: {generator.refused}")
        started = time.perf_counter()
        stream = generator.submit(given, max_new_tokens, sampling=sampling, stop=stop or ())
        if graph.metadata.producer_name == PRODUCER:
            note("warning: the weights are random (chrion model): tokens have no meaning")
        first_s = _print(stream, text=generator.tokenizer is not None, silent=as_json, started=started)
        ids, seconds = stream.result(), time.perf_counter() - started
        if as_json:
            times = {"time_to_first_token_ms": first_s and first_s * 1e3, "tokens_per_s": len(ids) / seconds}
            show_json({"text": stream.text, "tokens": ids, "finish_reason": stream.finish_reason, **times})
        elif first_s is not None:
            rate = f"{len(ids) / seconds:.1f} tokens/s, time to first token {format_ms(first_s * 1e3)}"
            note(f"{format_count(len(ids), 'token')}, {rate}")


@contextlib.contextmanager
def _naming_options(prompt: str) -> Iterator[None]:
    """Raise errors of arguments whose options have other names, or hints of their own, as errors of these options.

    Args:
        prompt: The option with the prompt.
    """
    try:
        yield
    except OptionError as error:
        name, colon, problem = error.message.partition(":")
        option = {"prompt": prompt, "threads": "--cores"}.get(name, name)
        hint = error.hint
        if hint == TOKENIZER_HINT:
            hint = f"give {'--tokens 1,2,3 or ' if name == 'prompt' else ''}--tokenizer FILE"
        raise OptionError(f"{option}{colon}{problem}", hint=hint) from error


def _token_ids(text: str) -> list[int]:
    try:
        return [int(token) for token in text.split(",")]
    except ValueError:
        raise OptionError(f"--tokens: expected numbers with commas between them, found {text!r}") from None


def _print(stream: Stream, *, text: bool, silent: bool, started: float) -> float | None:
    """Print a stream as it comes; return the seconds to its first token, or None without tokens."""
    first: float | None = None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters that the encoding of the terminal lacks
    try:
        for event in stream.events():
            first = first or time.perf_counter() - started
            if not silent:
                piece = event.text if text else f"{event.id} "
                print(piece, end="", flush=True)  # noqa: T201 - this is what stdout is for
    except BaseException:  # an error or an interruption is reported, and not that stdout fails then
        with contextlib.suppress(OSError):
            _end_line(silent=silent)
        raise
    _end_line(silent=silent)
    return first


def _end_line(*, silent: bool) -> None:
    if not silent:
        print(flush=True)  # noqa: T201 - this is what stdout is for
