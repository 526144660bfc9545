"""Errors in the form that gRPC clients read: a status code, a message, and google.rpc details.

Owns: the translation of refusals and troubles to status codes.
Refuses to know: what caused them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from baton.proto.context import Context
from baton.router.admission import FieldViolation
from baton.router.gateway import Refused
from baton.router.journey import Trouble

CODES = {
    Trouble.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Trouble.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Trouble.EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Trouble.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Trouble.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Trouble.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Trouble.INTERNAL: grpc.StatusCode.INTERNAL,
}


async def refuse_fields(context: Context, violations: Sequence[FieldViolation]) -> NoReturn:
    """INVALID_ARGUMENT with a BadRequest that names every field."""
    detail = error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(field=violation.field, description=violation.description)
            for violation in violations
        ]
    )
    message = "; ".join(violation.description for violation in violations)
    await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, message, detail)


async def refuse_call(context: Context, refused: Refused, request_id: str) -> NoReturn:
    """The trouble's code, with RetryInfo where waiting helps and the request's id where a person must look."""
    if refused.violations:
        await refuse_fields(context, refused.violations)
    details: list[Message] = []
    if refused.retry_after_s is not None:
        seconds = int(refused.retry_after_s)
        delay = Duration(seconds=seconds, nanos=int((refused.retry_after_s - seconds) * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    internal = refused.trouble is Trouble.INTERNAL
    if internal:
        details.append(error_details_pb2.RequestInfo(request_id=request_id))
    message = f"request {request_id}: {refused.message}" if internal else refused.message
    await refuse(context, CODES[refused.trouble], message, *details)


async def refuse(context: Context, code: grpc.StatusCode, message: str, *details: Message) -> NoReturn:
    """Ends the call with a status and its details."""
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    await context.abort(code, message, trailing_metadata=(("grpc-status-details-bin", status.SerializeToString()),))
    raise AssertionError("abort returns never")
