"""The HTTP face: one ASGI application with the OpenAI API, health, metrics and the status page.

Owns: which route leads where. Refuses to know: what becomes of a request (`gateway`).
"""

from __future__ import annotations

from fastapi import FastAPI

from baton import __version__
from baton.router.cluster import Workforce
from baton.router.gateway import Gateway
from baton.router.router import Router


def create_app(router: Router, gateway: Gateway, workforce: Workforce) -> FastAPI:
    """The application of one router."""
    app = FastAPI(title="Baton", version=__version__, docs_url=None, redoc_url=None)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok" if router.ready.is_set() else "starting"}

    return app
