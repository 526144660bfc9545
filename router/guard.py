"""What every gRPC call passes before its method: the client's key, its share of the router, its request whole.

Owns: who may call, and what becomes of calls that bring nothing, too much, or what is no message. Refuses to know: what
methods do.

    call --no key: UNAUTHENTICATED--> key known --too many of this client: RESOURCE_EXHAUSTED--> counted
         --no request in REQUEST_S: DEADLINE_EXCEEDED--> read --no message: INTERNAL--> the method

Health and reflection are open to all: they tell nothing of requests, and those who watch a server have no key.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2

from baton.proto.context import Context
from baton.router.allowance import Allowance, Excess
from baton.router.keys import Keyring
from baton.router.status import refuse

OUR_METHODS = "/baton."
ASKING = "/baton.v1.Inference/Generate"
"""The method of which a client may be allowed so many a second."""
REQUEST_S = 10.0
"""From a call's headers to its request, which a client sends with them."""
STREAM_S = 60.0
"""For reflection, the only method of ours that takes a stream."""


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """See the module's drawing. Without keys a client is its address.

    A method gets its one request from here: gRPC's own reading would wait without end for a request that never comes,
    and take a client's garbage for a bug of ours.
    """

    def __init__(self, keys: Keyring | None, allowance: Allowance) -> None:
        self._keys = keys
        self._allowance = allowance

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        client = ""
        if self._keys is not None and details.method.startswith(OUR_METHODS):
            shown = dict(details.invocation_metadata or ()).get("authorization", "")
            name = self._keys.name_of(shown) if isinstance(shown, str) else None
            if name is None:
                fault = "is not one of this server's" if shown else "is missing"
                message = f"the API key {fault}: send the metadata authorization: Bearer KEY"
                return grpc.stream_stream_rpc_method_handler(_refusing(message))
            client = name
        asks = details.method == ASKING
        # All take a stream here, so that nothing is read before there is somebody to read it.
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._streamed(handler, client), handler.request_deserializer, handler.response_serializer
            )
        if handler.response_streaming:
            many = self._many(handler, client, asks)
            return grpc.stream_stream_rpc_method_handler(many, None, handler.response_serializer)
        one = self._one(handler, client, asks)
        return grpc.stream_unary_rpc_method_handler(one, None, handler.response_serializer)

    def _one(self, handler: Any, client: str, asks: bool) -> Callable[..., Awaitable[Any]]:
        async def one(requests: Any, context: Context) -> Any:
            with self._counted(client or _address(context), asks) as excess:
                request = await _request(handler, context, excess)
                return await handler.unary_unary(request, context)

        return one

    def _many(self, handler: Any, client: str, asks: bool) -> Callable[..., Awaitable[None]]:
        async def many(requests: Any, context: Context) -> None:
            with self._counted(client or _address(context), asks) as excess:
                request = await _request(handler, context, excess)
                if not inspect.isasyncgenfunction(handler.unary_stream):
                    await handler.unary_stream(request, context)
                    return
                async with aclosing(handler.unary_stream(request, context)) as responses:
                    async for response in responses:
                        await context.write(response)

        return many

    def _streamed(self, handler: Any, client: str) -> Callable[..., Awaitable[None]]:
        async def streamed(requests: Any, context: Context) -> None:
            with self._counted(client or _address(context), False) as excess:
                if excess is not None:
                    await _refuse_excess(context, excess)
                try:
                    async with (
                        asyncio.timeout(STREAM_S),
                        aclosing(handler.stream_stream(requests, context)) as responses,
                    ):
                        async for response in responses:
                            await context.write(response)
                except TimeoutError:
                    await refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, f"a stream ends after {STREAM_S:g} s")

        return streamed

    @contextmanager
    def _counted(self, client: str, asks: bool) -> Iterator[Excess | None]:
        """Counts a call as long as it lasts. What is yielded is a reason to refuse it."""
        excess = self._allowance.enter(client)
        if excess is not None:
            yield excess
            return
        try:
            yield self._allowance.ask(client, time.monotonic()) if asks else None
        finally:
            self._allowance.leave(client)


async def _request(handler: Any, context: Context, excess: Excess | None) -> Any:
    """The call's one request; ends the call if there is none to be had."""
    if excess is not None:
        await _refuse_excess(context, excess)
    try:
        async with asyncio.timeout(REQUEST_S):
            data: Any = await context.read()
    except TimeoutError:
        message = f"no request came within {REQUEST_S:g} s of the call"
        await refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, message)
    if not isinstance(data, bytes):
        await refuse(context, grpc.StatusCode.INTERNAL, "the call ended without a request")
    try:
        return handler.request_deserializer(data)
    except DecodeError as error:
        await refuse(context, grpc.StatusCode.INTERNAL, str(error))


async def _refuse_excess(context: Context, excess: Excess) -> None:
    nanos = int(excess.wait_s * 1e9)
    delay = Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)
    detail = error_details_pb2.RetryInfo(retry_delay=delay)
    await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, excess.message, detail)


def _refusing(message: str) -> Callable[..., Awaitable[None]]:
    async def refusing(requests: Any, context: Context) -> None:
        await refuse(context, grpc.StatusCode.UNAUTHENTICATED, message)

    return refusing


def _address(context: Context) -> str:
    """The client's, without its port: 'ipv4:10.0.0.1:3344' and 'ipv6:%5B::1%5D:3344' are what gRPC says."""
    _, _, rest = unquote(context.peer()).partition(":")
    return rest.rpartition(":")[0].strip("[]")
