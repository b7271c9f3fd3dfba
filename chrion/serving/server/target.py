"""The models that the REST and gRPC services answer for: those of this process, or of the replicas of a cluster."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from chrion.serving.server import documents, grpc_codec, rest_codec
from chrion.serving.server.catalogue import Catalogue
from chrion.serving.server.core import ServingCore
from chrion.serving.server.core_records import Served
from chrion.serving.server.failures import RequestFailure, Status, without_folders
from chrion.serving.server.generation_service import GenerationService
from chrion.serving.server.metrics import render_metrics
from chrion.serving.server.protocol_decoder import ProtocolDecoder, find_decoder, has_cache
from chrion.serving.server.request_memory import ByteAccount, RequestMemory
from chrion.serving.server.statistics import SERVER_TIMING
from chrion.serving.server.tensors import DTYPES, Array, TensorSpec

#: Bodies above this size are parsed in a thread, so that they do not block the event loop (a choice, not measured).
_LARGE_BODY = 1 << 16
#: Maximum characters of a number and its comma in JSON: those of float64 with its sign, 17 digits and an exponent.
_JSON_NUMBER = 26

Converted = TypeVar("Converted")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to an inference request: the body of the response, and its headers or trailing metadata."""

    content: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class Target(Protocol):
    """Models that answer requests. All methods but the properties raise RequestFailure; a version "" is the highest."""

    account: ByteAccount

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""

    @property
    def control(self) -> bool:
        """Whether clients load and unload models."""

    async def health(self) -> dict[str, Any]:
        """Return the state of the server, with ``live`` and ``ready``."""

    async def snapshot(self) -> dict[str, Any]:
        """Return the state for the web page."""

    async def metrics(self) -> bytes:
        """Return the metrics in Prometheus's text format."""

    async def model_metadata(self, name: str, version: str) -> dict[str, Any]:
        """Return a model's metadata."""

    async def model_config(self, name: str, version: str) -> dict[str, Any]:
        """Return a model's configuration."""

    async def model_obstacle(self, name: str, version: str) -> str:
        """Return why requests for a model cannot be served; empty if they can."""

    async def statistics(self, name: str, version: str) -> list[dict[str, Any]]:
        """Return the statistics of a model's versions, or with an empty name of all models."""

    async def index(self, state: str) -> list[dict[str, str]]:
        """Return the versions of the repository with a state, ``READY`` for example, or all of them."""

    async def load(self, name: str, parameters: Iterable[str] = ()) -> None:
        """Serve all versions of a model; ``parameters`` are the names of those in the request."""

    async def unload(self, name: str) -> None:
        """Stop serving all versions of a model."""

    async def infer_rest(self, name: str, version: str, body: bytes | bytearray, header_length: str | None) -> Answer:
        """Answer an inference request of the REST protocol; cancelled if the client leaves."""

    async def infer_grpc(self, content: bytes, remaining_ms: float) -> Answer:
        """Answer a ``ModelInferRequest`` within the given time; cancelled if the client leaves."""


class LocalTarget:
    """The models of this process.

    Args:
        core: The server.
        catalogue: Its repository.
        generation: The decoders that generate.

    Attributes:
        account: The memory of requests in flight.
    """

    def __init__(self, core: ServingCore, catalogue: Catalogue, generation: GenerationService) -> None:
        self._core = core
        self._catalogue = catalogue
        self._generation = generation
        self.account = core.account
        self._converter = ThreadPoolExecutor(1, "chrion-converter")

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._core.draining

    @property
    def control(self) -> bool:
        """Whether clients load and unload models."""
        return self._catalogue.mode == "explicit"

    async def health(self) -> dict[str, Any]:
        """Return the state of the server."""
        core = self._core
        return {
            "live": True,
            "ready": not core.draining and self._catalogue.attempted,
            **self._catalogue.counts,
            "pending": core.in_flight + self._generation.pending,
        }

    async def snapshot(self) -> dict[str, Any]:
        """Return the state for the web page."""
        state = documents.snapshot(self._core, self._catalogue.scanned, self._generation.failed)
        return state | {"generators": self._generation.states()}

    async def metrics(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return render_metrics(self._core, self._catalogue.unserved)

    async def model_metadata(self, name: str, version: str) -> dict[str, Any]:
        """Return a model's metadata."""
        served = self._find(name, version)
        if isinstance(served, ProtocolDecoder):
            return served.metadata()
        versions = [number for own, number in self._core.models if own == name]
        return documents.model_metadata(name, versions, served.version.inputs, served.version.outputs)

    async def model_config(self, name: str, version: str) -> dict[str, Any]:
        """Return a model's configuration."""
        served = self._find(name, version)
        if isinstance(served, ProtocolDecoder):
            return served.configuration()
        own, batch = served.version, served.version.managed.max_batch
        return documents.model_config(name, own.inputs, own.outputs, batch if batch > 1 else 0)

    async def model_obstacle(self, name: str, version: str) -> str:
        """Return why requests for a model cannot be served; empty if they can."""
        try:
            served = self._find(name, version)
        except RequestFailure as failure:
            if failure.status is Status.NOT_FOUND:
                raise
            return failure.message
        if isinstance(served, ProtocolDecoder):
            return "the server is shutting down" if self._core.draining else ""
        if self._core.is_ready(served):
            return ""
        return without_folders(served.failure) or f"model {served.version.name!r} is not ready"

    async def statistics(self, name: str, version: str) -> list[dict[str, Any]]:
        """Return the statistics of a model's versions, or with an empty name of all models."""
        if name:
            self._catalogue.find(name, version)
        return [
            documents.model_statistics(self._core, served)
            for (own, number), served in sorted(self._core.models.items())
            if name in ("", own) and version in ("", number)
        ]

    async def index(self, state: str) -> list[dict[str, str]]:
        """Return the versions of the repository with a state, or all of them."""
        index = documents.repository_index(self._core, self._catalogue.scanned, self._generation.failed)
        return [entry for entry in index if state in ("", entry["state"])]

    async def load(self, name: str, parameters: Iterable[str] = ()) -> None:
        """Serve all versions of a model."""
        if any(parameter == "config" or parameter.startswith("file:") for parameter in parameters):
            text = "loading with a configuration or files in the request is not supported"
            raise RequestFailure(Status.UNSUPPORTED, text)
        await self._catalogue.load(name)

    async def unload(self, name: str) -> None:
        """Stop serving all versions of a model."""
        if self.control and name in self._generation.served:
            text = f"model {name!r} generates text: its generator stays open until the server ends"
            raise RequestFailure(Status.UNSUPPORTED, text)
        self._catalogue.unload(name)

    async def infer_rest(self, name: str, version: str, body: bytes | bytearray, header_length: str | None) -> Answer:
        """Answer an inference request of the REST protocol."""
        served = self._find(name, version)
        with RequestMemory(self.account) as memory:
            parse = functools.partial(rest_codec.parse_request, body, header_length, memory.take)
            parsed = await self._convert(parse) if len(body) > _LARGE_BODY else parse()
            reply = await self._reply(served, parsed, parsed.timeout_ms, memory)
            with reply.counted:
                size = reply.size
                memory.take(2 * (size + reply.text_size(parsed)))
                build = functools.partial(rest_codec.build_response, parsed, reply.model, reply.outputs)
                content, json_size = await self._convert(build) if size > _LARGE_BODY else build()
        headers = {"Content-Type": "application/json", **reply.headers}
        if json_size is not None:
            headers |= {"Content-Type": "application/octet-stream", rest_codec.HEADER_LENGTH: str(json_size)}
        return Answer(content, headers)

    async def infer_grpc(self, content: bytes, remaining_ms: float) -> Answer:
        """Answer a ``ModelInferRequest``."""
        with RequestMemory(self.account) as memory:
            given = grpc_codec.parse_request(content)
            memory.take(given.parsed_bytes)
            served = self._find(given.head.model_name, given.head.model_version)
            parse = functools.partial(grpc_codec.read_request, given, memory.take)
            request = await self._convert(parse) if len(content) > _LARGE_BODY else parse()
            reply = await self._reply(served, request, min(request.timeout_ms, remaining_ms), memory)
            with reply.counted:
                memory.take(2 * (size := reply.size))
                build = functools.partial(grpc_codec.encode_response, request, reply.model, reply.outputs)
                answer = await self._convert(build) if size > _LARGE_BODY else build()
        return Answer(answer, reply.headers)

    async def _convert(self, convert: Callable[[], Converted]) -> Converted:
        """Parse or encode much data in a thread; in one, since each that computes in Python delays all others."""
        return await asyncio.get_running_loop().run_in_executor(self._converter, convert)

    def _find(self, name: str, version: str) -> Served | ProtocolDecoder:
        return find_decoder(self._generation, name, version) or self._catalogue.find(name, version)

    async def _reply(
        self,
        served: Served | ProtocolDecoder,
        request: rest_codec.InferenceRequest,
        timeout_ms: float,
        memory: RequestMemory,
    ) -> _Reply:
        if isinstance(served, ProtocolDecoder):
            if not has_cache(request.feeds):
                return _Reply(served.model, await served.infer(request), {})
            served = self._catalogue.find(*served.model)
        elif self._generation.refused and served.version.settings.generation and not has_cache(request.feeds):
            raise RequestFailure(Status.UNSUPPORTED, self._generation.refused)
        memory.take(served.output_sizes.total(request.feeds))
        result = await self._core.infer(served, request.feeds, tuple(request.outputs), timeout_ms, request.priority)
        model, headers = (served.version.name, served.version.version), {SERVER_TIMING: result.timing.header()}
        return _Reply(model, result.outputs, headers, result.counted())


@dataclass(frozen=True, slots=True)
class _Reply:
    """The outputs of a request, with the name and version of the model."""

    model: tuple[str, str]
    outputs: list[tuple[TensorSpec, Array]]
    headers: Mapping[str, str]
    #: Within it the answer is made; it counts the request, unless that was done.
    counted: AbstractContextManager[None] = field(default_factory=nullcontext)

    @property
    def size(self) -> int:
        """The bytes of the outputs."""
        return sum(array.size * DTYPES[spec.datatype].itemsize for spec, array in self.outputs)

    def text_size(self, request: rest_codec.InferenceRequest) -> int:
        """Return a bound on the bytes of the outputs that are returned as JSON."""
        texts = [array.size for spec, array in self.outputs if not request.outputs.get(spec.name, request.binary)]
        return _JSON_NUMBER * sum(texts)
