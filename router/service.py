"""The gRPC face: the Inference service.

Owns: the translation between gRPC calls and the gateway, and who may call. Refuses to know: what becomes of a request
(`gateway`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from baton.proto import inference_pb2 as inference
from baton.proto import inference_pb2_grpc
from baton.proto.context import Context
from baton.router.gateway import Gateway, Refused
from baton.router.keys import Keyring
from baton.router.observe import Call, Face
from baton.router.status import OUR_METHODS, refuse, refuse_call


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Serves `Inference` for one gateway. `keys` give clients their names; `KeyGuard` keeps the others out."""

    def __init__(self, gateway: Gateway, keys: Keyring | None = None) -> None:
        self._gateway = gateway
        self._keys = keys

    async def Generate(self, request: inference.GenerateRequest, context: Context) -> None:
        """Writes to the context: an iterator would add a frame to each message, and its wrapper another."""
        generation = await self._gateway.open(request, self._call(context))
        if isinstance(generation, Refused):
            await refuse_call(context, generation, request.request_id)
        async with aclosing(generation.messages()) as messages:
            async for message in messages:
                if isinstance(message, Refused):
                    await refuse_call(context, message, generation.admitted.request_id)
                await context.write(message)

    async def Abort(self, request: inference.AbortRequest, context: Context) -> inference.AbortResponse:
        found = self._gateway.abort(request.request_id)
        return inference.AbortResponse(found=found or await self._gateway.router.replicas.abort(request.request_id))

    async def GetModel(self, request: inference.GetModelRequest, context: Context) -> inference.ModelInfo:
        router = self._gateway.router
        limits = router.limits()
        return inference.ModelInfo(
            name=router.config.model,
            max_model_len=limits.max_tokens,
            vocab_size=limits.vocab_size,
            eos_token_ids=limits.eos_token_ids,
            block_size=router.config.pools[0].engine.block_size,
            dtype=router.config.pools[0].engine.dtype,
            pools=[
                inference.PoolInfo(name=pool.name, role=pool.role.value, size=pool.size) for pool in router.config.pools
            ],
        )

    def _call(self, context: Context) -> Call:
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        client = self._keys.name_of(metadata.get("authorization", "")) if self._keys is not None else ""
        return Call(
            Face.GRPC,
            left_s=context.time_remaining(),
            traceparent=metadata.get("traceparent", ""),
            tracestate=metadata.get("tracestate", ""),
            client=client or "",
        )


class KeyGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Answers calls of our services with UNAUTHENTICATED unless their metadata have `authorization: Bearer KEY`.

    Health and reflection are open: they tell nothing of requests, and those who watch a server have no key.
    """

    def __init__(self, keys: Keyring) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        metadata = dict(details.invocation_metadata or ())
        shown = metadata.get("authorization", "")
        if handler is None or not details.method.startswith(OUR_METHODS):
            return handler
        if isinstance(shown, str) and self._keys.name_of(shown) is not None:
            return handler
        fault = "is not one of this server's" if shown else "is missing"
        message = f"the API key {fault}: send the metadata authorization: Bearer KEY"

        async def one(request: bytes, context: Context) -> None:
            await refuse(context, grpc.StatusCode.UNAUTHENTICATED, message)

        async def many(request: bytes, context: Context) -> AsyncIterator[bytes]:
            await refuse(context, grpc.StatusCode.UNAUTHENTICATED, message)
            yield b""

        # Without functions to read and write messages: nothing of the request is looked at.
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(many)
        return grpc.unary_unary_rpc_method_handler(one)
