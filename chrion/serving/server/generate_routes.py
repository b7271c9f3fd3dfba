"""Triton's generate extension of the REST protocol: text in and out as plain JSON, or as server-sent events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chrion.generation import Stream
from chrion.serving.server.disconnects import EventResponse, Handler, ReadBody, event, until_disconnect
from chrion.serving.server.failures import RequestFailure, invalid
from chrion.serving.server.generation_service import GenerationService
from chrion.serving.server.generation_tensors import Piece, TextRequest, read_document
from chrion.serving.server.json_bodies import typed
from chrion.serving.server.protocol_decoder import ProtocolDecoder, find_decoder


class GenerateRoutes:
    """The handlers of the extension.

    Args:
        service: The models.
        read: Reads bodies.
    """

    def __init__(self, service: GenerationService, read: ReadBody) -> None:
        self._service, self._read_body = service, read

    def routes(self) -> list[tuple[str, Handler, str]]:
        """Return paths with their handlers and methods."""
        bases = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
        handlers = {"generate": self._generate, "generate_stream": self._generate_stream}
        return [(f"{base}/{name}", handler, "POST") for base in bases for name, handler in handlers.items()]

    async def _generate(self, request: Request) -> Response:
        decoder, text_request, common = await self._read(request)
        if text_request.stream:
            raise invalid("input 'stream': several responses need generate_stream")
        return JSONResponse(common | _document(await until_disconnect(request, decoder.generate(text_request))))

    async def _generate_stream(self, request: Request) -> Response:
        decoder, text_request, common = await self._read(request)
        stream = await decoder.submit(text_request)
        return EventResponse(_events(decoder, text_request, stream, common), stream.cancel)

    async def _read(self, request: Request) -> tuple[ProtocolDecoder, TextRequest, dict[str, Any]]:
        """Return the decoder, the text that is wanted, and what all responses have in common."""
        name, version = request.path_params["name"], request.path_params.get("version", "")
        decoder = find_decoder(self._service, name, version)
        if decoder is None:
            raise self._service.unknown(name, " in this version")
        body = await self._read_body(request)
        identity, parameters = body.pop("id", ""), typed(dict, body.pop("parameters", {}), "parameters")
        if not isinstance(identity, str):
            raise invalid(f"id: expected text, found {str(identity)[:100]!r}")
        common = dict(zip(("model_name", "model_version"), decoder.model, strict=True))
        text_request = replace(read_document({**parameters, **body}), arrival_s=request.state.arrival_s)
        return decoder, text_request, common | ({"id": identity} if identity else {})


async def _events(
    decoder: ProtocolDecoder, text_request: TextRequest, stream: Stream, common: dict[str, Any]
) -> AsyncIterator[str]:
    """Yield a server-sent event for each response."""
    try:
        async with contextlib.aclosing(decoder.pieces(text_request, stream)) as pieces:
            async for piece in pieces:
                yield event(common | _document(piece))
    except RequestFailure as failure:
        yield event({"error": failure.message})


def _document(piece: Piece) -> dict[str, Any]:
    return {"text_output": piece.text, "output_ids": list(piece.ids), "finish_reason": piece.reason}
