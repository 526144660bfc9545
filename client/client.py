"""Python clients of a Baton router: `Client` for threads, `AsyncClient` for asyncio.

Owns: channels, calls, deadlines and the sleep between attempts.
Refuses to know: how an output is continued and when to give up (`client.resume`), and what a status means
(`client.errors`).

    with Client("127.0.0.1:50051") as client:
        for output in client.generate("The capital of France is", max_tokens=8):
            print(output.text, end="")

A stream that breaks because the router died is continued after the tokens that have come, without gap or repeat: the
request's id and seed are fixed here, and tokens are a function of (seed, position).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from baton.client.errors import from_rpc_error
from baton.client.request import RequestOptions, generate_request
from baton.client.result import Record, Result
from baton.client.resume import Attempt, Output, Patience, Progress
from baton.proto import cluster_pb2 as cluster
from baton.proto import cluster_pb2_grpc, inference_pb2_grpc
from baton.proto import inference_pb2 as inference
from baton.proto import worker_pb2 as worker
from baton.proto.credentials import ClientTls

DEFAULT_TARGET = "127.0.0.1:50051"

_MAX_MESSAGE_BYTES = 64 << 20
# gRPC by itself waits up to two minutes between connection attempts; a restarted router is back in seconds.
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Despite its name, how long one attempt may take: TCP, TLS and the first HTTP/2 frame, over however long a wire.
    ("grpc.min_reconnect_backoff_ms", 5000),
    # A machine that dies says nothing: without these a stream from it would wait for ever.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    # A connection for each client, not one for all of a process: so they spread over a router's replicas.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
)
# For calls without a stream, beyond the time that the call itself was given to do its work.
_CALL_TIMEOUT_S = 30.0


class Generation:
    """The outputs of one request as they come, to be iterated once. `result()` takes what is left and adds it up."""

    def __init__(self, request_id: str, outputs: Generator[Output, None, None], record: Record) -> None:
        self.request_id = request_id
        self._outputs = outputs
        self._record = record

    def __iter__(self) -> Iterator[Output]:
        return self

    def __next__(self) -> Output:
        output = next(self._outputs)
        self._record.add(output, time.monotonic())
        return output

    def result(self) -> Result:
        for _ in self:
            pass
        return self._record.result(self.request_id)

    def close(self) -> None:
        """Cancels the request if it is still in progress."""
        self._outputs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncGeneration:
    """`Generation` for asyncio."""

    def __init__(self, request_id: str, outputs: AsyncGenerator[Output, None], record: Record) -> None:
        self.request_id = request_id
        self._outputs = outputs
        self._record = record

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        output = await anext(self._outputs)
        self._record.add(output, time.monotonic())
        return output

    async def result(self) -> Result:
        async for _ in self:
            pass
        return self._record.result(self.request_id)

    async def close(self) -> None:
        await self._outputs.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class Client:
    """A connection to one router, for threads. `token` is sent as a bearer token, `tls` says whom to trust, None is
    plain text; `timeout_s` is for a whole call. Raises CredentialsError for certificates that cannot be used."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        token: str | None = None,
        tls: ClientTls | None = None,
        timeout_s: float | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.target = target
        self._metadata = _metadata(token)
        self._timeout_s = timeout_s
        self._patience = patience or Patience()
        self._tls = tls is not None
        self._channel = (
            grpc.secure_channel(target, tls.channel_credentials(), options=(*_CHANNEL_OPTIONS, *tls.options))
            if tls is not None
            else grpc.insecure_channel(target, options=_CHANNEL_OPTIONS)
        )
        self._inference: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._cluster: Any = cluster_pb2_grpc.ClusterStub(self._channel)
        self._connected = False

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Starts a request when first iterated. Takes exactly one of text, token ids and chat messages
        (`{"role": ..., "content": ...}`). Iterating raises a BatonError if the request fails for good."""
        request = generate_request(prompt, token_ids, messages, options)
        record = Record()
        outputs = self._outputs(request, record, timeout_s if timeout_s is not None else self._timeout_s)
        return Generation(request.request_id, outputs, record)

    def _outputs(
        self, request: inference.GenerateRequest, record: Record, timeout_s: float | None
    ) -> Generator[Output, None, None]:
        progress = Progress(request, self._patience, self._connected)
        record.start(time.monotonic())
        deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        while (attempt := progress.next_attempt()) is not None:
            try:
                yield from self._stream(progress, attempt, deadline)
                error = progress.ended(attempt)
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error, self.target, self._tls)
            if error is not None:
                delay_s = progress.retry_delay_s(error, time.monotonic())
                if delay_s is None:
                    raise error
                record.num_resumes = progress.num_resumes
                time.sleep(_within(delay_s, deadline))

    def _stream(self, progress: Progress, attempt: Attempt, deadline: float | None) -> Iterator[Output]:
        call = self._inference.Generate(attempt.request, timeout=_left(deadline), metadata=self._metadata)
        try:
            for message in call:
                self._connected = True
                yield progress.accept(attempt, message)
        finally:
            call.cancel()

    def abort(self, request_id: str) -> bool:
        """Ends a request of any client; False if the router knows none of that id."""
        response: inference.AbortResponse = self._call(
            self._inference.Abort, inference.AbortRequest(request_id=request_id)
        )
        return response.found

    def model(self) -> inference.ModelInfo:
        response: inference.ModelInfo = self._call(self._inference.GetModel, inference.GetModelRequest())
        return response

    def status(self) -> cluster.ClusterStatus:
        response: cluster.ClusterStatus = self._call(self._cluster.GetStatus, cluster.GetStatusRequest())
        return response

    def watch_status(self, interval_s: float = 1.0) -> Generator[cluster.ClusterStatus, None, None]:
        """The status at once and then every `interval_s`, until the iterator is closed or the router goes."""
        call = self._cluster.WatchStatus(cluster.WatchStatusRequest(interval_s=interval_s), metadata=self._metadata)
        try:
            for status in call:
                self._connected = True
                yield status
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target, self._tls) from None
        finally:
            call.cancel()

    def logs(self, worker_id: str = "router", lines: int = 100, *, previous: bool = False) -> worker.LogTail:
        """The last lines that a worker, or the router, has logged, and where its log file is.

        `previous`: of the process that had this name on that machine before, if `observability.log_dir` is set.
        """
        request = cluster.GetLogsRequest(worker_id=worker_id, lines=lines, previous=previous)
        response: worker.LogTail = self._call(self._cluster.GetLogs, request)
        return response

    def drain(self, worker_id: str, timeout_s: float = 30.0) -> int:
        """Takes a worker out of placement and waits until it is empty; the number of requests that had to move."""
        request = cluster.DrainRequest(worker_id=worker_id, timeout_s=timeout_s)
        response: cluster.DrainResponse = self._call(self._cluster.Drain, request, timeout_s + _CALL_TIMEOUT_S)
        return response.moved

    def leave(
        self, worker_id: str = "", *, host: str = "", timeout_s: float = 30.0, force: bool = False
    ) -> cluster.DrainResponse:
        """Drains a worker, or all workers of a host, and ends them; what is not done by `timeout_s` goes on elsewhere.

        The pool of a single worker is smaller then; the workers of a host get successors on other hosts. `force`: also
        if nothing could be served afterwards.
        """
        request = cluster.DrainRequest(worker_id=worker_id, host=host, timeout_s=timeout_s, leave=True, force=force)
        response: cluster.DrainResponse = self._call(self._cluster.Drain, request, None)
        return response

    def set_role(
        self, worker_id: str, role: str, *, timeout_s: float | None = None, force: bool = False
    ) -> cluster.SetRoleResponse:
        """Makes a running worker a `prefill`, `decode` or `colocated` one; returns when it serves as such.

        `timeout_s`: for its running requests to end, before they go on elsewhere; by default the router's own. `force`:
        also if nothing could be served afterwards.
        """
        request = cluster.SetRoleRequest(worker_id=worker_id, role=role, timeout_s=timeout_s, force=force)
        response: cluster.SetRoleResponse = self._call(self._cluster.SetRole, request, None)
        return response

    def scale(self, pool: str, size: int) -> int:
        """Asks for another number of workers; the size that the pool now has as its goal."""
        response: cluster.ScaleResponse = self._call(
            self._cluster.Scale, cluster.ScaleRequest(pool=pool, size=size), None
        )
        return response.size

    def _call(self, method: Callable[..., Any], request: Any, timeout_s: float | None = _CALL_TIMEOUT_S) -> Any:
        try:
            response = method(request, timeout=self._timeout_s or timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target, self._tls) from None
        self._connected = True
        return response

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """`Client` for asyncio, to be made and used within one event loop."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        token: str | None = None,
        tls: ClientTls | None = None,
        timeout_s: float | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.target = target
        self._metadata = _metadata(token)
        self._timeout_s = timeout_s
        self._patience = patience or Patience()
        self._tls = tls is not None
        self._channel = (
            grpc.aio.secure_channel(target, tls.channel_credentials(), options=(*_CHANNEL_OPTIONS, *tls.options))
            if tls is not None
            else grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        )
        self._inference: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._cluster: Any = cluster_pb2_grpc.ClusterStub(self._channel)
        self._connected = False

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGeneration:
        """See `Client.generate`."""
        request = generate_request(prompt, token_ids, messages, options)
        record = Record()
        outputs = self._outputs(request, record, timeout_s if timeout_s is not None else self._timeout_s)
        return AsyncGeneration(request.request_id, outputs, record)

    async def _outputs(
        self, request: inference.GenerateRequest, record: Record, timeout_s: float | None
    ) -> AsyncGenerator[Output, None]:
        progress = Progress(request, self._patience, self._connected)
        record.start(time.monotonic())
        deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        while (attempt := progress.next_attempt()) is not None:
            call = self._inference.Generate(attempt.request, timeout=_left(deadline), metadata=self._metadata)
            try:
                async for message in call:
                    self._connected = True
                    yield progress.accept(attempt, message)
                error = progress.ended(attempt)
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error, self.target, self._tls)
            finally:
                call.cancel()
            if error is not None:
                delay_s = progress.retry_delay_s(error, time.monotonic())
                if delay_s is None:
                    raise error
                record.num_resumes = progress.num_resumes
                await asyncio.sleep(_within(delay_s, deadline))

    async def abort(self, request_id: str) -> bool:
        response: inference.AbortResponse = await self._call(
            self._inference.Abort, inference.AbortRequest(request_id=request_id)
        )
        return response.found

    async def model(self) -> inference.ModelInfo:
        response: inference.ModelInfo = await self._call(self._inference.GetModel, inference.GetModelRequest())
        return response

    async def status(self) -> cluster.ClusterStatus:
        response: cluster.ClusterStatus = await self._call(self._cluster.GetStatus, cluster.GetStatusRequest())
        return response

    async def watch_status(self, interval_s: float = 1.0) -> AsyncGenerator[cluster.ClusterStatus, None]:
        call = self._cluster.WatchStatus(cluster.WatchStatusRequest(interval_s=interval_s), metadata=self._metadata)
        try:
            async for status in call:
                self._connected = True
                yield status
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target, self._tls) from None
        finally:
            call.cancel()

    async def logs(self, worker_id: str = "router", lines: int = 100, *, previous: bool = False) -> worker.LogTail:
        """See `Client.logs`."""
        request = cluster.GetLogsRequest(worker_id=worker_id, lines=lines, previous=previous)
        response: worker.LogTail = await self._call(self._cluster.GetLogs, request)
        return response

    async def drain(self, worker_id: str, timeout_s: float = 30.0) -> int:
        request = cluster.DrainRequest(worker_id=worker_id, timeout_s=timeout_s)
        response: cluster.DrainResponse = await self._call(self._cluster.Drain, request, timeout_s + _CALL_TIMEOUT_S)
        return response.moved

    async def leave(
        self, worker_id: str = "", *, host: str = "", timeout_s: float = 30.0, force: bool = False
    ) -> cluster.DrainResponse:
        """See `Client.leave`."""
        request = cluster.DrainRequest(worker_id=worker_id, host=host, timeout_s=timeout_s, leave=True, force=force)
        response: cluster.DrainResponse = await self._call(self._cluster.Drain, request, None)
        return response

    async def set_role(
        self, worker_id: str, role: str, *, timeout_s: float | None = None, force: bool = False
    ) -> cluster.SetRoleResponse:
        """See `Client.set_role`."""
        request = cluster.SetRoleRequest(worker_id=worker_id, role=role, timeout_s=timeout_s, force=force)
        response: cluster.SetRoleResponse = await self._call(self._cluster.SetRole, request, None)
        return response

    async def scale(self, pool: str, size: int) -> int:
        response: cluster.ScaleResponse = await self._call(
            self._cluster.Scale, cluster.ScaleRequest(pool=pool, size=size), None
        )
        return response.size

    async def _call(self, method: Callable[..., Any], request: Any, timeout_s: float | None = _CALL_TIMEOUT_S) -> Any:
        try:
            response = await method(request, timeout=self._timeout_s or timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target, self._tls) from None
        self._connected = True
        return response

    async def close(self) -> None:
        await self._channel.close(grace=None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def _metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),) if token else ()


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


def _within(delay_s: float, deadline: float | None) -> float:
    """A sleep that does not outlast the deadline; the call that follows then reports it."""
    left_s = _left(deadline)
    return delay_s if left_s is None else min(delay_s, left_s)
