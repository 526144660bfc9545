"""How much of its clients the HTTP face takes: bytes of a body, bytes of all bodies.

Owns: the counts. Refuses to know: what bodies hold and who clients are.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from baton.router.http.errors import ApiError, from_validation, retry_after

READ_S = 60.0
MAX_BODIES = 8
LARGE_BYTES = 1 << 20

M = TypeVar("M", bound=BaseModel)


class BodyReader:
    """Reads JSON bodies of at most `max_bytes`. All that are being read at once have at most 8 times that."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._large = asyncio.Lock()

    async def read(self, request: Request, model: type[M]) -> M:
        """The body as a model. Raises ApiError for one that is too large, too slow, no JSON, or not of the model."""
        headers = request.headers
        media_type = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if media_type != "application/json" and not media_type.endswith("+json"):
            raise ApiError(415, f"Content-Type is {media_type!r}, must be application/json")
        declared = headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > 18 or int(declared) > self._max_bytes):
            raise self._too_large()
        held_bytes = 0
        pieces: list[bytes] = []
        try:
            async with asyncio.timeout(READ_S):
                async for piece in request.stream():
                    held_bytes += len(piece)
                    self._held_bytes += len(piece)
                    if held_bytes > self._max_bytes:
                        raise self._too_large()
                    if self._held_bytes > MAX_BODIES * self._max_bytes:
                        raise ApiError(503, "too many large requests at once", headers=retry_after(1.0))
                    pieces.append(piece)
            body = b"".join(pieces)
            if len(body) < LARGE_BYTES:
                return _parsed(body, model)
            # A parsed body takes some ten times its bytes, so large ones take turns.
            async with self._large:
                return await asyncio.to_thread(_parsed, body, model)
        except TimeoutError as error:
            raise ApiError(
                408, f"the body did not come within {READ_S:g} s", headers={"Connection": "close"}
            ) from error
        except ClientDisconnect as error:
            raise ApiError(400, "the client went away before its request was whole") from error
        finally:
            self._held_bytes -= held_bytes

    def _too_large(self) -> ApiError:
        # The connection stays: closing it on a client that still sends would reset it before the answer was read.
        return ApiError(413, f"the body is larger than {self._max_bytes} bytes")


def _parsed(body: bytes, model: type[M]) -> M:
    if not body:
        raise ApiError(400, "the body is empty, must be a JSON object")
    try:
        data: Any = from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, "the body is JSON, but not an object")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from error
