"""Keys: what the file may hold, who gets in by which face, and that no key is ever shown."""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest
from asking import answer, request
from grpc_health.v1 import health_pb2, health_pb2_grpc
from paper_model import PaperRunner
from small_cluster import SmallCluster
from web import client_of

from baton.proto import cluster_pb2 as pb
from baton.proto import inference_pb2 as inference
from baton.router.__main__ import StartError, check
from baton.router.config import RouterSettings, defaults
from baton.router.keys import Keyring, KeysError, KeysFile, read_keys

KEY, OTHER = "sk-0123456789abcdef", "a-second-key-with:colon"
FILE = f"# who may call\n\nci: {KEY}\n{OTHER}\n"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def keys_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text(FILE)
    return file


@pytest.fixture
async def locked(paper_dir, keys_file) -> AsyncIterator[SmallCluster]:
    settings = RouterSettings(port=0, api_keys_file=str(keys_file), cors_origins="https://app.example")
    async with SmallCluster(paper_dir, PaperRunner, router_settings=settings) as small:
        yield small


def test_keys_have_the_names_that_the_file_gives_them(keys_file) -> None:
    keys = KeysFile(keys_file)
    assert keys.name_of(f"Bearer {KEY}") == "ci"
    assert keys.name_of(f"bearer   {OTHER}") == "key-2"
    assert keys.name_of("Basic " + base64.b64encode(f"anyone:{OTHER}".encode()).decode()) == "key-2"


@pytest.mark.parametrize(
    "shown",
    [
        "",
        KEY,
        "Bearer",
        "Bearer ",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Token {KEY}",
        "Basic ???",
        "Basic YQ==",
        "Bearer é",
    ],
)
def test_nothing_else_opens(keys_file, shown) -> None:
    assert KeysFile(keys_file).name_of(shown) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "no key"),
        (b"# none\n\n", "no key"),
        (b"short\n", "line 1"),
        (b"first-long-key\nci: first-long-key\n", "line 2"),
        (b"ci: first-long-key\nci: second-long-key\n", "line 2"),
        (b"two words in a line\n", "line 1"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_used_stops_the_start_and_its_keys_stay_secret(tmp_path, text, says) -> None:
    file = tmp_path / "keys"
    file.write_bytes(text)
    with pytest.raises(KeysError, match=says) as caught:
        read_keys(file)
    assert "long-key" not in str(caught.value)


@pytest.mark.parametrize("make", [lambda file: None, lambda file: file.mkdir()], ids=["missing", "folder"])
def test_a_file_that_cannot_be_read_is_named_before_anything_starts(tmp_path, make) -> None:
    file = tmp_path / "keys"
    make(file)
    config = defaults()
    config = replace(config, router=replace(config.router, port=0, http_port=0, api_keys_file=str(file)))
    with pytest.raises(StartError, match="cannot be read") as caught:
        check(config)
    assert str(file) in str(caught.value)


def test_a_keyring_does_not_hold_its_keys() -> None:
    keys = Keyring({"ci": KEY})
    assert KEY not in repr(vars(keys))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/paper"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/cluster"),
        ("GET", "/nothing"),
    ],
)
async def test_http_needs_a_key(locked, method, path) -> None:
    async with client_of(locked) as http:
        for headers in ({}, bearer("wrong-key"), {"Authorization": KEY}):
            response = await http.request(method, path, json={"prompt": "x"}, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"].endswith('realm="baton"')
        response = await http.request(method, path, json={"prompt": "x"}, headers=bearer(KEY))
        assert response.status_code != 401


async def test_what_machines_watch_is_open(locked) -> None:
    async with client_of(locked) as http:
        locked.router.ready.set()
        for path in ("/health", "/version", "/openapi.json"):
            assert (await http.get(path)).status_code == 200


async def test_pages_of_listed_sites_alone_may_call_and_read_refusals(locked) -> None:
    async with client_of(locked) as http:
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for origin, allowed in (("https://app.example", True), ("https://evil.example", False)):
            before = await http.options("/v1/completions", headers={"Origin": origin, **asks})
            refused = await http.post("/v1/completions", json={}, headers={"Origin": origin})
            assert refused.status_code == 401
            for response in (before, refused):
                assert (response.headers.get("access-control-allow-origin") == origin) is allowed


async def test_without_the_setting_no_page_may_call(cluster, http) -> None:
    response = await http.get("/v1/models", headers={"Origin": "https://app.example"})
    assert "access-control-allow-origin" not in response.headers


async def test_grpc_needs_a_key_for_our_services_alone(locked) -> None:
    for metadata in ((), (("authorization", "Bearer wrong-key"),)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await locked.inference.GetModel(inference.GetModelRequest(), metadata=metadata)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            async for _ in locked.inference.Generate(request([1], 2), metadata=metadata):
                pass
        assert streamed.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as status:
            await locked.cluster.GetStatus(pb.GetStatusRequest(), metadata=metadata)
        assert status.value.code() is grpc.StatusCode.UNAUTHENTICATED
    shown = (("authorization", f"Bearer {KEY}"),)
    assert (await locked.inference.GetModel(inference.GetModelRequest(), metadata=shown)).name == "paper"
    parts = [part async for part in locked.inference.Generate(request([1], 2), metadata=shown)]
    assert parts[-1].HasField("finish")
    await health_pb2_grpc.HealthStub(locked.channel).Check(health_pb2.HealthCheckRequest())


class Watcher:
    """An observer that keeps who called."""

    def __init__(self) -> None:
        self.clients: list[str] = []

    def began(self, request_id, call) -> str:
        self.clients.append(call.client)
        return ""

    def refused(self, trouble, call) -> None: ...
    def tokens(self, num_tokens, gap_s) -> None: ...
    def ended(self, record) -> None: ...


async def test_a_call_bears_the_keys_name_and_logs_never_the_key(locked, caplog) -> None:
    watcher = Watcher()
    locked.router.observers.add(watcher)
    with caplog.at_level(logging.DEBUG):
        async with client_of(locked) as http:
            for key in (KEY, OTHER, "wrong-key-of-somebody"):
                await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=bearer(key))
        async for _ in locked.inference.Generate(request([1], 1), metadata=(("authorization", f"Bearer {KEY}"),)):
            pass
    assert watcher.clients == ["ci", "key-2", "ci"]
    own = [record.getMessage() for record in caplog.records if record.name.startswith("baton")]
    assert not [line for line in own if KEY in line or OTHER in line or "wrong-key" in line]


async def test_a_key_taken_out_of_the_file_opens_nothing_and_a_broken_file_changes_nothing(locked, keys_file) -> None:
    async with client_of(locked) as http:

        async def opens(key: str) -> bool:
            answered = await http.get("/v1/models", headers=bearer(key))
            return answered.status_code == 200

        def write(text: str, age_s: int) -> None:
            keys_file.write_text(text)
            os.utime(keys_file, (age_s, age_s))

        assert await opens(KEY)
        write(f"{OTHER}\nnew: another-key-here\n", 1_000)
        assert [await opens(key) for key in (KEY, OTHER, "another-key-here")] == [False, True, True]
        write("short\n", 2_000)
        assert await opens(OTHER)
        write(FILE, 3_000)
        assert await opens(KEY)


async def test_without_keys_nobody_needs_one(cluster) -> None:
    assert (await answer(cluster.inference, request([1], 2))).finish is not None
