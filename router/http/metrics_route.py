"""Two routes for Prometheus: what the router counts, and where everything is that can be scraped.

Owns: the HTTP side of a scrape. Refuses to know: what is counted (`router.metrics`).
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from baton.router.discovery import group
from baton.router.metrics import RouterMetrics
from baton.telemetry.metrics import expose


def metrics_routes(metrics: RouterMetrics) -> APIRouter:
    """`/metrics` in the format that the scrape asks for, `/metrics/targets` for Prometheus's `http_sd_configs`."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/metrics")
    async def scrape(request: Request) -> Response:
        # The page is read here and written on another thread, so that tokens need not wait for it.
        accept, encoding = (request.headers.get(name, "") for name in ("accept", "accept-encoding"))
        exposition = await asyncio.to_thread(expose, metrics.page(), accept, encoding)
        return Response(exposition.body, headers=exposition.headers)

    @routes.get("/metrics/targets")
    async def targets(request: Request) -> JSONResponse:
        # As the scraper reached us, so it can again: we may listen on all addresses.
        by_tls = request.url.scheme == "https"
        return JSONResponse([group(target, by_tls) for target in metrics.targets(request.url.netloc)])

    return routes
