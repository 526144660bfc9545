"""The gRPC face: the Inference service.

Owns: the translation between gRPC calls and the gateway. Refuses to know: who may call (`guard`), and what becomes of a
request (`gateway`).
"""

from __future__ import annotations

from contextlib import aclosing

from baton.proto import inference_pb2 as inference
from baton.proto import inference_pb2_grpc
from baton.proto.context import Context
from baton.router.gateway import Gateway, Refused
from baton.router.keys import Keyring
from baton.router.observe import Call, Face
from baton.router.status import refuse_call


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Serves `Inference` for one gateway. `keys` give clients their names; `Guard` keeps the others out."""

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
