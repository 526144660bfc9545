"""What can go wrong between a client and the router, as a small tree of exceptions.

Owns: the translation of a gRPC status and its `google.rpc` details into one of them.
Refuses to know: what the caller does next (`client.resume` decides whether to try again).

    BatonError
    +-- InvalidRequest      the request breaks a rule; `violations` name the fields
    +-- NotFound            adapter, model, worker or pool that is not there
    +-- AlreadyExists       a request of that id is in progress
    +-- AccessDenied        no token, a wrong one, or one without the right
    +-- Overloaded          queues are full; `retry_after_s` is the router's advice
    +-- DeadlineExceeded
    +-- Cancelled
    +-- Unavailable         no worker, or no connection
    |   +-- ConnectionLost      the connection broke
    |   +-- ConnectionRefused   none could be made
    +-- Untrusted           no TLS between the two: a certificate that one of them does not accept, or no TLS at all
    +-- ServerError         everything that should not happen
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"
# gRPC reports a broken connection with the status that a router would use to say "no worker". Only its words differ.
_REFUSED_WORDS = ("failed to connect", "name resolution", "dns resolution", "no route to host")
# Of a handshake that went wrong, what its library says and what a person makes of it. The first that is found counts.
_TLS_WORDS = (
    ("certificate has expired", "the router's certificate has expired"),
    ("certificate is not yet valid", "the router's certificate is not valid yet: is a clock wrong?"),
    ("hostname verification check failed", "the router's certificate is for another name: see --tls-name"),
    ("peer name", "the router's certificate is for another name: see --tls-name"),
    ("certificate_verify_failed", "the router's certificate is of no authority that is trusted here: see --tls-ca"),
    ("wrong_version_number", "it does not speak TLS there: connect without --tls"),
    ("certificate_required", "it wants a certificate of its clients: see --tls-cert"),
    ("certificate_expired", "this client's certificate has expired"),
    ("unknown_ca", "this client's certificate is of no authority that is trusted there"),
    ("bad_certificate", "this client's certificate is not accepted there"),
    ("ssl_error", "the handshake failed"),
    ("handshake failed", "the handshake failed"),
)
_LOST_WORDS = (
    "socket closed",
    "stream removed",
    "connection reset",
    "broken pipe",
    "cancelling all calls",
    "goaway",
    "rst_stream",
    "endpoint closing",
    "transport closed",
    "recvmsg",
    "keepalive",
    "connection aborted",
    "end of tcp stream",
    "ping timeout",
)


@dataclass(frozen=True, slots=True)
class Violation:
    field: str
    description: str


class BatonError(Exception):
    """A call that did not succeed. `code` is the gRPC status name."""

    def __init__(self, message: str, code: str = "UNKNOWN") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class InvalidRequest(BatonError):
    def __init__(self, message: str, violations: tuple[Violation, ...] = ()) -> None:
        super().__init__(message, "INVALID_ARGUMENT")
        self.violations = violations


class NotFound(BatonError):
    pass


class AlreadyExists(BatonError):
    pass


class AccessDenied(BatonError):
    pass


class Overloaded(BatonError):
    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, "RESOURCE_EXHAUSTED")
        self.retry_after_s = retry_after_s


class DeadlineExceeded(BatonError):
    pass


class Cancelled(BatonError):
    pass


class Unavailable(BatonError):
    pass


class ConnectionLost(Unavailable):
    pass


class ConnectionRefused(Unavailable):
    pass


class Untrusted(BatonError):
    pass


class ServerError(BatonError):
    pass


_BY_CODE: dict[grpc.StatusCode, type[BatonError]] = {
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.UNAUTHENTICATED: AccessDenied,
    grpc.StatusCode.PERMISSION_DENIED: AccessDenied,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
}


def from_rpc_error(error: grpc.RpcError, target: str, tls: bool = False) -> BatonError:
    """The exception for a failed call, sync or asyncio. `target` is named where no connection could be made; `tls`:
    whether it was to be one by TLS."""
    code: grpc.StatusCode = error.code()
    message: str = error.details() or code.name
    words = message.lower()
    if tls and code is grpc.StatusCode.UNAVAILABLE:
        for word, meaning in _TLS_WORDS:
            if word in words:
                return Untrusted(f"no TLS with {target}: {meaning} ({message.rsplit(': ', 1)[-1]})", code.name)
    if code is grpc.StatusCode.UNAVAILABLE and any(word in words for word in _REFUSED_WORDS):
        reason = message.rsplit(": ", 1)[-1]
        if any(word in reason.lower() for word in _LOST_WORDS):
            # Somebody is there and hangs up, as who speaks TLS does on plain text, and who wants a certificate on none.
            reason += (
                "; does it want a certificate, or another? see --tls-cert" if tls else "; does it speak TLS? see --tls"
            )
        return ConnectionRefused(f"no router at {target} ({reason})", code.name)
    connection_codes = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
    if code in connection_codes and any(word in words for word in _LOST_WORDS):
        return ConnectionLost(f"lost the connection to {target} ({message})", code.name)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequest(message, _violations(error))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(message, _retry_after_s(error))
    return _BY_CODE.get(code, ServerError)(message, code.name)


def _violations(error: grpc.RpcError) -> tuple[Violation, ...]:
    bad_request = error_details_pb2.BadRequest()
    return tuple(
        Violation(violation.field, violation.description)
        for detail in _details(error)
        if detail.Unpack(bad_request)
        for violation in bad_request.field_violations
    )


def _retry_after_s(error: grpc.RpcError) -> float | None:
    retry_info = error_details_pb2.RetryInfo()
    for detail in _details(error):
        if detail.Unpack(retry_info):
            return float(retry_info.retry_delay.ToTimedelta().total_seconds())
    return None


def _details(error: grpc.RpcError) -> Iterator[Any]:
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == _DETAILS_KEY:
            yield from status_pb2.Status.FromString(value).details
