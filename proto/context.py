"""The type of a gRPC call's context, as our handlers name it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
else:
    # The class takes no parameters at run time.
    Context = grpc.aio.ServicerContext
