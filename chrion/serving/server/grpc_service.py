"""The gRPC service ``inference.GRPCInferenceService``."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError

from chrion.errors import OptionError
from chrion.serving.server import documents, grpc_codec
from chrion.serving.server.connections import HEADER_S, READ_BYTES_PER_S, READ_S
from chrion.serving.server.failures import RequestFailure, Status, invalid, require_token
from chrion.serving.server.generation_service import GenerationService
from chrion.serving.server.grpc_codec import SERVICE, message, methods
from chrion.serving.server.grpc_health import HealthService
from chrion.serving.server.grpc_stream import StreamedRequests
from chrion.serving.server.logs import FailureSampler, log_request
from chrion.serving.server.options import ServerOptions
from chrion.serving.server.protocol_decoder import ProtocolDecoder, find_decoder, has_cache
from chrion.serving.server.request_memory import RequestMemory
from chrion.serving.server.statistics import SERVER_TIMING, RequestTiming
from chrion.serving.server.target import Answer, Target
from chrion.serving.server.tracing import RequestTracer

#: The parameter of responses that says whether it is the last of its request; Triton's name.
_FINAL = "triton_final_response"
#: Speed by which the largest message has longer than ``HEADER_S`` to arrive, in bytes per second.
_MESSAGE_BYTES_PER_S = 1_000_000
#: Bytes of a request that is not one for inference: it has a few names, and its parser holds the event loop.
_MAX_OPTIONS = 1 << 18
_CHANNEL_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 60_000),  # finds peers that are gone
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.max_connection_idle_ms", 30_000),  # it may take twice as long; clients connect again by themselves
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)

_STREAM = "ModelStreamInfer"
#: Methods that need no token.
_OPEN = ("ServerLive", "ServerReady")


class GrpcService:
    """The methods of the service.

    Args:
        target: The models.
        generation: The decoders.
        token: Bearer token that every request but those for health must have; empty for none.
        tracer: Receives the spans of requests outside streams; None for no traces.
    """

    def __init__(
        self, target: Target, generation: GenerationService, token: str = "", tracer: RequestTracer | None = None
    ) -> None:
        self._target = target
        self._generation = generation
        self._token = token
        self._tracer = tracer
        self._failures = FailureSampler()

    def handlers(self, message_s: float) -> Any:
        """Return the handlers of all methods.

        Args:
            message_s: Time within which the message of a call must have arrived, in seconds.
        """
        handlers, receiver = {}, MessageReceiver(message_s)
        for name, method in methods().items():
            request, response = message(method.input_type.name), message(method.output_type.name)
            if name == _STREAM:
                make = grpc.stream_stream_rpc_method_handler
                call: Callable[..., Any] = self._stream
            else:
                # As calls of one message they would not reach a handler, which can end them, before their message.
                make = grpc.stream_unary_rpc_method_handler
                answer = functools.partial(self._answer, name, request, response)
                call = functools.partial(_receive, receiver, self._infer if name == "ModelInfer" else answer)
            # Messages are parsed by the handlers, which answer damaged ones with INVALID_ARGUMENT.
            handlers[name] = make(call, request_deserializer=None, response_serializer=_serialise)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _log_failure(self, context: Any, method: str, failure: RequestFailure, began_s: float) -> None:
        """Log a call, or a request of a stream, that failed."""
        status = failure.status
        level, more = self._failures.choose_level(status.http)
        fields = {"method": method, "client": context.peer(), "status": status.grpc}
        log_request(level, fields | more, began_s, failure.message)

    async def _answer(self, name: str, request: Any, response: Any, content: bytes, context: Any) -> Any:
        began_s = time.monotonic()
        try:
            if name not in _OPEN:
                self._authorise(context)
            document = await self._document(name, _parse(request, content))
            return ParseDict(document, response(), ignore_unknown_fields=True)
        except RequestFailure as failure:
            self._log_failure(context, name, failure, began_s)
            await _abort(context, failure)

    async def _infer(self, content: bytes, context: Any) -> Any:
        began_ns, began_s = time.time_ns(), time.monotonic()
        try:
            self._authorise(context)
            memory = RequestMemory(self._target.account)
            context.add_done_callback(lambda _: memory.release())  # after the answer has been sent
            remaining = context.time_remaining()
            answer = await self._run(content, remaining * 1000 if remaining is not None else float("inf"), memory)
        except RequestFailure as failure:
            self._trace(context, content, began_ns, failure=failure.message)
            self._log_failure(context, "ModelInfer", failure, began_s)
            return await _abort(context, failure)
        self._trace(context, content, began_ns, answer)
        context.set_trailing_metadata(tuple((name.lower(), value) for name, value in answer.headers.items()))
        return answer.content

    def _trace(
        self, context: Any, content: bytes, began_ns: int, answer: Answer | None = None, failure: str = ""
    ) -> None:
        if self._tracer is None:
            return
        attributes = {}
        with contextlib.suppress(RequestFailure):
            request = grpc_codec.parse_request(content).head
            attributes = {"model": request.model_name[:200], "version": request.model_version, "request_id": request.id}
        carrier = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        timing = RequestTiming.of_header(answer.headers.get(SERVER_TIMING, "")) if answer else None
        self._tracer.add(carrier, attributes, began_ns, timing, failure)

    async def _run(self, content: bytes, remaining_ms: float, memory: RequestMemory) -> Answer:
        """Serve an inference request, given as bytes."""
        memory.take(len(content))
        answer = await self._target.infer_grpc(content, remaining_ms)
        memory.take(len(answer.content))
        return answer

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Serve the requests of a stream; it ends if its client does not read a response in time."""
        began_s = time.monotonic()
        try:
            self._authorise(context)
        except RequestFailure as failure:
            self._log_failure(context, _STREAM, failure, began_s)
            await _abort(context, failure)
        held: dict[int, RequestMemory] = {}

        async def answer(content: bytes) -> Any:
            memory = RequestMemory(self._target.account)
            try:
                response = await self._run_in_stream(content, memory, context)
            except BaseException:
                memory.release()
                raise
            held[id(response)] = memory  # until it has been sent
            return response

        silent = False
        texts = functools.partial(self._texts, context)
        try:
            async with contextlib.aclosing(StreamedRequests(answer, texts).responses(requests)) as responses:
                async for response in responses:
                    async with asyncio.timeout(READ_S + response.ByteSize() / READ_BYTES_PER_S):
                        await context.write(response)
                    if memory := held.pop(id(response), None):
                        memory.release()
        except TimeoutError:
            silent = True
        except grpc.aio.InternalError as error:  # the client has left while an answer was sent
            raise asyncio.CancelledError from error
        finally:
            for memory in held.values():
                memory.release()
        if silent:  # the status waits until the client reads or leaves
            await _abort(context, RequestFailure(Status.TIMED_OUT, "the client does not read the answers"))

    async def _run_in_stream(self, content: bytes, memory: RequestMemory, context: Any) -> Any:
        """Return the only response to a request of a stream."""
        began_s = time.monotonic()
        response = message("ModelStreamInferResponse")()
        try:
            answer = await self._run(content, float("inf"), memory)
            response.infer_response.MergeFromString(answer.content)
        except RequestFailure as failure:
            self._log_failure(context, _STREAM, failure, began_s)
            response.error_message = failure.message
            with contextlib.suppress(RequestFailure):
                response.infer_response.id = grpc_codec.parse_request(content).head.id
        return response

    def _texts(self, context: Any, content: bytes) -> AsyncGenerator[Any, None] | None:
        """Return the responses to a request of a stream, if it may have several."""
        if not self._generation.served:
            return None
        with contextlib.suppress(RequestFailure):
            given = grpc_codec.parse_request(content)
            decoder = find_decoder(self._generation, given.head.model_name, given.head.model_version)
            if decoder is not None and not has_cache(entry.name for entry in given.head.inputs):
                return self._generate(context, decoder, given, len(content))
        return None

    async def _generate(
        self, context: Any, decoder: ProtocolDecoder, given: grpc_codec.WireRequest, size: int
    ) -> AsyncGenerator[Any, None]:
        """Yield the responses of a decoder; a failure is the last of them."""
        kind = message("ModelStreamInferResponse")
        began_s = time.monotonic()
        try:
            with RequestMemory(self._target.account) as memory:
                memory.take(size + given.parsed_bytes)
                request = grpc_codec.read_request(given, memory.take)
                async with contextlib.aclosing(decoder.stream(request)) as responses:
                    async for outputs, final in responses:
                        response = kind()
                        content = grpc_codec.encode_response(request, decoder.model, outputs)
                        response.infer_response.MergeFromString(content)
                        response.infer_response.parameters[_FINAL].bool_param = final
                        yield response
        except RequestFailure as failure:
            self._log_failure(context, _STREAM, failure, began_s)
            response = kind(error_message=failure.message, infer_response={"id": given.head.id})
            response.infer_response.parameters[_FINAL].bool_param = True
            yield response

    def _authorise(self, context: Any) -> None:
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        require_token(self._token, str(given).encode())

    async def _document(self, method: str, request: Any) -> dict[str, Any]:
        """Return the answer to a method of one message, as a document with its fields and perhaps others."""
        target = self._target
        document: dict[str, Any] = {}
        match method:
            case "ServerLive" | "ServerReady":
                document = await target.health()
            case "ServerMetadata":
                document = documents.server_metadata(model_control=target.control)
            case "ModelReady":
                document = {"ready": not await target.model_obstacle(request.name, request.version)}
            case "ModelMetadata":
                document = await target.model_metadata(request.name, request.version)
            case "ModelConfig":
                document = {"config": await target.model_config(request.name, request.version)}
            case "ModelStatistics":
                document = {"model_stats": await target.statistics(request.name, request.version)}
            case "RepositoryIndex":
                document = {"models": await target.index(documents.READY if request.ready else "")}
            case "RepositoryModelLoad":
                await target.load(request.model_name, request.parameters)
            case "RepositoryModelUnload":
                await target.unload(request.model_name)
        return document


def bind_grpc(
    options: ServerOptions, target: Target, generation: GenerationService, tracer: RequestTracer | None = None
) -> tuple[Any, int]:
    """Bind the service to its address.

    Returns:
        The server, which has to be started, and its port.

    Raises:
        OptionError: The address cannot be bound.
    """
    assert options.grpc is not None  # noqa: S101 # the caller has checked it
    host, port = options.grpc
    limits = (
        ("grpc.max_receive_message_length", options.body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", options.max_connections),
        ("grpc.max_allowed_incoming_connections", options.max_connections),
    )
    # Kept until the process ends: gRPC closes its queue when a server is collected, which another thread can do
    # (replicas on Ray have some) while the event loop reads from it.
    grpc.aio.init_grpc_aio()
    server = grpc.aio.server(options=(*_CHANNEL_OPTIONS, *limits), maximum_concurrent_rpcs=options.max_connections)
    limit_s = HEADER_S + options.body_bytes / _MESSAGE_BYTES_PER_S
    handlers = GrpcService(target, generation, options.token, tracer).handlers(limit_s)
    server.add_generic_rpc_handlers((handlers, HealthService(target).handlers()))
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if options.tls:
            certificate, key = (path.read_bytes() for path in options.tls)
            bound = server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
        else:
            bound = server.add_insecure_port(address)
    except (RuntimeError, OSError) as error:
        raise OptionError(f"--grpc {address}: cannot be bound") from error
    return server, int(bound)


async def _receive(receiver: MessageReceiver, answer: Callable[..., Awaitable[Any]], _: Any, context: Any) -> Any:
    """Receive the message of a call with one message, and return the answer to it."""
    try:
        content = await receiver.receive(context)
    except TimeoutError:
        await _abort(context, RequestFailure(Status.TIMED_OUT, "the message of the call is incomplete"))
    if content is grpc.aio.EOF:
        await _abort(context, invalid("the call has no message"))
    return await answer(content, context)


def _serialise(response: Any) -> bytes:
    return response if isinstance(response, bytes) else bytes(response.SerializeToString())


def _parse(kind: Any, content: bytes) -> Any:
    if len(content) > _MAX_OPTIONS:  # its parser would hold the event loop
        raise RequestFailure(Status.TOO_LARGE, f"the request has more than {_MAX_OPTIONS} bytes")
    try:
        return kind.FromString(content)
    except DecodeError as error:
        raise invalid(f"the request is not a {kind.DESCRIPTOR.name}") from error


async def _abort(context: Any, failure: RequestFailure) -> None:
    metadata: tuple[tuple[str, str], ...] = ()
    if failure.retry_s is not None:
        metadata = (("retry-after", f"{failure.retry_s:.3f}"),)
    await context.abort(getattr(grpc.StatusCode, failure.status.grpc), failure.message, metadata)


class MessageReceiver:
    """Receives the messages of calls; those that are late end with an error.

    One timer serves all calls: one for each would take 4 % of the time of a small call.

    Args:
        limit_s: The time for a message, in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        #: When the messages of calls are late, by the tasks that wait for them, in this order.
        self._due_s: dict[asyncio.Task[Any], float] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def receive(self, context: Any) -> Any:
        """Return the next message of a call; ``grpc.aio.EOF`` if there is none.

        Raises:
            TimeoutError: It is late.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None  # noqa: S101 # grpc.aio answers each call in one
        self._due_s[task] = loop.time() + self._limit_s
        if self._timer is None:
            self._timer = loop.call_at(self._due_s[task], self._end_late)
        try:
            return await context.read()
        except asyncio.CancelledError:
            if task in self._due_s:  # the client has left
                raise
            task.uncancel()
            raise TimeoutError from None
        finally:
            self._due_s.pop(task, None)

    def _end_late(self) -> None:
        loop = asyncio.get_running_loop()
        late = [task for task, due_s in self._due_s.items() if due_s <= loop.time()]
        for task in late:
            del self._due_s[task]
            task.cancel()
        following = next(iter(self._due_s.values()), None)
        self._timer = None if following is None else loop.call_at(following, self._end_late)
