"""Decoders in the Open Inference Protocol: a text is one response, or with ``stream`` one response for each token."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from chrion.errors import ChrionError
from chrion.generation import Stream
from chrion.serving.server import documents
from chrion.serving.server.failures import invalid
from chrion.serving.server.generation_service import GenerationService, failure_of
from chrion.serving.server.generation_tensors import INPUTS, OUTPUTS, Piece, TextRequest, piece_tensors, read_tensors
from chrion.serving.server.generators import ServedGenerator
from chrion.serving.server.rest_codec import InferenceRequest
from chrion.serving.server.tensors import Array, TensorSpec

#: Outputs of a response, and the pieces of a text.
Outputs = list[tuple[TensorSpec, Array]]
Pieces = AsyncGenerator[Piece, None]


class ProtocolDecoder:
    """A decoder as a model of the protocol.

    Args:
        service: The decoders of the server.
        served: The decoder.
    """

    def __init__(self, service: GenerationService, served: ServedGenerator) -> None:
        self._service, self._served = service, served
        #: Name and version.
        self.model = served.name, served.version

    def metadata(self) -> dict[str, Any]:
        """Return the model's metadata."""
        return documents.model_metadata(self._served.name, [self._served.version], INPUTS, OUTPUTS)

    def configuration(self) -> dict[str, Any]:
        """Return the part of Triton's model configuration that clients read."""
        config = documents.model_config(self._served.name, INPUTS, OUTPUTS)
        inputs = [entry | {"optional": True} for entry in config["input"]]
        return config | {"model_transaction_policy": {"decoupled": True}, "input": inputs}

    async def infer(self, request: InferenceRequest) -> Outputs:
        """Return the outputs of a request with one response.

        Raises:
            RequestFailure: The request is wrong, cannot start in its time, or fails.
        """
        text_request = read_tensors(request)
        if text_request.stream:
            raise invalid("input 'stream': several responses need ModelStreamInfer, or generate_stream in REST")
        return piece_tensors(await self.generate(text_request), text_request.outputs)

    async def stream(self, request: InferenceRequest) -> AsyncGenerator[tuple[Outputs, bool], None]:
        """Yield the outputs of each response to a request, and whether it is the last.

        Raises:
            RequestFailure: The request is wrong, cannot start in its time, or fails.
        """
        text_request = read_tensors(request)
        stream = await self.submit(text_request)
        try:
            async with contextlib.aclosing(self.pieces(text_request, stream)) as pieces:
                async for piece in pieces:
                    yield piece_tensors(piece, text_request.outputs), piece.final
        finally:
            stream.cancel()

    async def generate(self, text_request: TextRequest) -> Piece:
        """Return a whole text.

        Raises:
            RequestFailure: The text cannot start in its time, or fails.
        """
        stream = await self.submit(text_request)
        try:
            return [piece async for piece in self.pieces(text_request, stream)][-1]
        finally:
            stream.cancel()

    async def submit(self, text_request: TextRequest) -> Stream:
        """Queue a text.

        Raises:
            RequestFailure: It may not be queued now, or its prompt or a number is out of range.
        """
        text_fields = {"exclude_input_in_output": text_request.echo, "stop_words": text_request.options.stop}
        try:
            for field in (name for name, given in text_fields.items() if given):
                self._served.tokenizer_for(field)
            (stream,) = await self._service.submit(
                self._served,
                [text_request.prompt],
                [text_request.sampling],
                text_request.options,
                lambda _: text_request.max_tokens,
            )
        except ChrionError as error:
            raise failure_of(error) from error
        return stream

    async def pieces(self, text_request: TextRequest, stream: Stream) -> Pieces:
        """Yield the whole text or, if a stream is wanted, a piece for each token and one for the end.

        The last piece of several has no token, since a text may end because of a token that is not part of it. It has
        the text that was held back until then.

        Raises:
            RequestFailure: The text cannot start in its time, or fails.
        """
        text = self._served.text_of(text_request.prompt) if text_request.echo else ""
        ids: list[int] = []
        tokens = self._service.events(self._served.name, [stream], text_request.arrival_s, text_request.timeout_ms)
        try:
            async with contextlib.aclosing(tokens) as events:
                async for _, token in events:
                    text += token.text if token is not None else ""
                    ids += [token.id] if token is not None and token.id is not None else []
                    if text_request.stream and ids:
                        yield Piece(text, tuple(ids))
                        text, ids = "", []
        except ChrionError as error:
            raise failure_of(error) from error
        yield Piece(text, tuple(ids), stream.finish_reason)


def has_cache(inputs: Iterable[str]) -> bool:
    """Return whether a request has keys and values: it is one for the model itself, which returns logits."""
    return any(name.startswith("past_key_values.") for name in inputs)


def find_decoder(service: GenerationService, name: str, version: str = "") -> ProtocolDecoder | None:
    """Return the decoder that serves a version of a model, or None for another model."""
    served = service.served.get(name)
    if served is None or version not in ("", served.version):
        return None
    return ProtocolDecoder(service, served)
