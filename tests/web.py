"""How tests call the HTTP face, and read its server-sent events down to their framing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx2
from small_cluster import SmallCluster

DEADLINE_S = 30.0


@dataclass
class Stream:
    """`chunks`: the parsed data of all events but the last, which is [DONE]."""

    chunks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk.get("choices", [])]

    def text(self, index: int = 0) -> str:
        """Of a completion or of a chat."""
        parts = [choice for choice in self.choices if choice["index"] == index]
        return "".join(part["text"] if "text" in part else part["delta"].get("content", "") for part in parts)

    def finish_reason(self, index: int = 0) -> str | None:
        reasons = [choice["finish_reason"] for choice in self.choices if choice["index"] == index]
        assert all(reason is None for reason in reasons[:-1]), "something came after the end"
        return reasons[-1]


def parsed(body: bytes) -> Stream:
    assert body.endswith(b"data: [DONE]\n\n")
    *events, done, nothing = body.split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    assert all(event.startswith(b"data: {") and b"\n" not in event for event in events)
    return Stream([json.loads(event[len(b"data: ") :]) for event in events])


async def streamed(http: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> Stream:
    response = await http.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return parsed(response.content)


def client_of(cluster: SmallCluster, **options) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=f"http://{cluster.http_address}", timeout=DEADLINE_S, **options)
