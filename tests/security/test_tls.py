"""TLS from the client to the router, and mutual TLS among Baton's own processes: the same tokens, and nobody else's."""

from __future__ import annotations

import asyncio
import os
import ssl
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import httpx2
import pytest
from asking import answer, request, until
from certificates import front_pair, member_pair, stranger
from journey.test_replicas import replicated
from paper_model import PaperRunner, paper_output
from small_cluster import SmallCluster

from baton.client.client import AsyncClient
from baton.client.errors import AccessDenied, BatonError, ConnectionRefused, Untrusted
from baton.client.resume import Patience
from baton.client.servers import OpenAIServer
from baton.proto import cluster_pb2 as cluster
from baton.proto import cluster_pb2_grpc, worker_pb2_grpc
from baton.proto import worker_pb2 as wire
from baton.proto.credentials import PLAIN, ClientTls, ClusterWire, CredentialsError
from baton.proto.settings import ClusterTlsSettings, SecuritySettings, TlsSettings
from baton.router.config import RouterSettings
from baton.router.link import WorkerLink

PROMPT = [index % 251 for index in range(90)]
KEY = "sk-0123456789abcdef"
IMPATIENT = Patience(give_up_s=0.0)
DEADLINE_S = 20.0


@asynccontextmanager
async def serving(paper_dir, security: SecuritySettings, client_tls: ClientTls | None = None, **options):
    async with SmallCluster(paper_dir, PaperRunner, security=security, client_tls=client_tls, **options) as small:
        small.router.ready.set()
        yield small


async def refusal(small: SmallCluster, tls: ClientTls | None, token: str | None = None) -> BatonError:
    """What a client is told that should not be let in, at its first try."""
    async with AsyncClient(small.address, token=token, tls=tls, timeout_s=DEADLINE_S, patience=IMPATIENT) as client:
        with pytest.raises(BatonError) as caught:
            await client.model()
    return caught.value


async def test_tokens_through_tls_everywhere_are_the_same(paper_dir, certificates) -> None:
    async with serving(paper_dir, certificates.security, certificates.client, prefill=2, decode=2) as small:
        answers = [answer(small.inference, request(PROMPT[index:], 40)) for index in range(8)]
        for index, got in enumerate(await asyncio.gather(*answers)):
            assert got.tokens == paper_output(PROMPT[index:], 40)
            assert got.finish.usage.transferred_tokens > 0
        await small.at_rest()


async def test_http_by_tls_gives_the_same_tokens(paper_dir, certificates) -> None:
    async with serving(paper_dir, certificates.security, certificates.client) as small:
        context = ssl.create_default_context(cafile=certificates.file("ca.pem"))
        async with httpx2.AsyncClient(base_url=f"https://{small.http_address}", verify=context) as http:
            body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            response = await http.post("/v1/completions", json=body)
            assert response.status_code == 200
            assert response.json()["usage"]["completion_tokens"] == 20
            [router, *workers] = (await http.get("/metrics/targets")).json()
            assert router["labels"]["__scheme__"] == "https"
            assert all("__scheme__" not in worker["labels"] for worker in workers)
        server = OpenAIServer(f"https://{small.http_address}", None, DEADLINE_S, certificates.client)
        num_tokens = [message.num_tokens async for message in server.stream(PROMPT, 10, 1)]
        assert num_tokens[-1] == 10
        await server.close()


async def test_replicas_speak_to_each_other_by_mutual_tls(paper_dir, certificates) -> None:
    security = SecuritySettings(cluster_tls=certificates.cluster_tls)
    async with replicated(paper_dir, security=security) as (keeping, second):
        assert (await answer(second.inference, request(PROMPT, 20))).tokens == paper_output(PROMPT, 20)
        # Asked by the keeper, done by the follower.
        assert await keeping.small.router.replicas.drain("decode-0", 1.0) == 0
        assert (await second.states())["decode-0"] == "draining"
        async with PLAIN.channel(keeping.address, ()) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster_pb2_grpc.ClusterStub(channel).GetStatus(cluster.GetStatusRequest(), timeout=DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


# --- who is not let in ---


async def test_a_plain_client_of_a_tls_port_is_told_so(paper_dir, certificates) -> None:
    async with serving(paper_dir, certificates.security) as small:
        error = await refusal(small, None)
        assert isinstance(error, ConnectionRefused)
        assert error.code == "UNAVAILABLE"
        assert "--tls" in error.message


async def test_a_tls_client_of_a_plain_port_is_told_so(paper_dir, certificates) -> None:
    async with serving(paper_dir, SecuritySettings()) as small:
        error = await refusal(small, certificates.client)
        assert isinstance(error, Untrusted)
        assert "does not speak TLS" in error.message


async def test_a_router_of_an_unknown_authority_is_not_believed(paper_dir, certificates, tmp_path) -> None:
    pair = front_pair(tmp_path / "router", stranger())
    async with serving(paper_dir, SecuritySettings(tls=TlsSettings(pair.cert_file, pair.key_file))) as small:
        error = await refusal(small, certificates.client)
        assert isinstance(error, Untrusted)
        assert "--tls-ca" in error.message


async def test_a_router_with_another_name_is_not_believed(paper_dir, certificates, tmp_path) -> None:
    pair = front_pair(tmp_path / "router", certificates.front(), name="other.example")
    async with serving(paper_dir, SecuritySettings(tls=TlsSettings(pair.cert_file, pair.key_file))) as small:
        error = await refusal(small, certificates.client)
        assert isinstance(error, Untrusted)
        assert "--tls-name" in error.message
        named = replace(certificates.client, name="other.example")
        async with AsyncClient(small.address, tls=named, timeout_s=DEADLINE_S) as client:
            assert (await client.model()).name == "paper"


async def test_a_router_with_an_expired_certificate_is_not_believed(paper_dir, certificates, tmp_path) -> None:
    pair = front_pair(tmp_path / "router", certificates.front(), days=-1)
    async with serving(paper_dir, SecuritySettings(tls=TlsSettings(pair.cert_file, pair.key_file))) as small:
        error = await refusal(small, certificates.client)
        assert isinstance(error, Untrusted)
        assert "has expired" in error.message


async def test_where_clients_need_a_certificate_only_theirs_opens(paper_dir, certificates, tmp_path) -> None:
    expired = front_pair(tmp_path / "late", certificates.front(), days=-1, name="alice")
    strange = front_pair(tmp_path / "strange", stranger(), name="alice")
    async with serving(paper_dir, SecuritySettings(tls=certificates.mutual_tls), certificates.alice) as small:
        assert (await answer(small.inference, request(PROMPT, 5))).tokens == paper_output(PROMPT, 5)
        for pair in (None, expired, strange):
            tls = certificates.client
            if pair is not None:
                tls = replace(tls, cert_file=pair.cert_file, key_file=pair.key_file)
            error = await refusal(small, tls)
            assert error.code == "UNAVAILABLE"
            with pytest.raises(BatonError):
                await OpenAIServer(f"https://{small.http_address}", None, DEADLINE_S, tls).model()
        http = OpenAIServer(f"https://{small.http_address}", None, DEADLINE_S, certificates.alice)
        assert (await http.model()).name == "paper"
        await http.close()


async def test_without_a_key_or_with_a_wrong_one_nobody_gets_in_by_tls_either(
    paper_dir, certificates, tmp_path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"ci: {KEY}\n")
    settings = RouterSettings(port=0, api_keys_file=str(keys))
    async with serving(paper_dir, certificates.security, router_settings=settings) as small:
        for token, fault in ((None, "is missing"), ("wrong-key-of-somebody", "is not one")):
            error = await refusal(small, certificates.client, token)
            assert isinstance(error, AccessDenied)
            assert error.code == "UNAUTHENTICATED"
            assert fault in error.message
            assert "wrong-key" not in error.message
        async with AsyncClient(small.address, token=KEY, tls=certificates.client, timeout_s=DEADLINE_S) as client:
            result = await client.generate(token_ids=PROMPT, max_tokens=10, temperature=0.0, ignore_eos=True).result()
            assert list(result.token_ids) == paper_output(PROMPT, 10)


async def hello(address: str, cluster_wire: ClusterWire) -> None:
    """A router's first words to a worker; raises what a connection that is refused raises."""
    async with cluster_wire.channel(address, ()) as channel:
        stream = worker_pb2_grpc.WorkerStub(channel).Connect(timeout=DEADLINE_S)
        await stream.write(wire.RouterMessage(hello=wire.RouterHello(router_incarnation="x")))
        message = await stream.read()
        assert message.HasField("hello")


async def test_a_worker_takes_work_of_members_alone(paper_dir, certificates, tmp_path) -> None:
    ca = certificates.cluster_tls.ca_file
    client_of_the_router = front_pair(tmp_path / "client", certificates.front(), name="alice")
    expired = member_pair(tmp_path / "expired", certificates.cluster(), days=-1)
    strange = member_pair(tmp_path / "strange", stranger())
    async with serving(paper_dir, certificates.security, certificates.client) as small:
        address = small.seats["prefill-0"].description.address
        await hello(address, ClusterWire(certificates.cluster_tls))
        for pair in (client_of_the_router, expired, strange):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await hello(address, ClusterWire(ClusterTlsSettings(ca, pair.cert_file, pair.key_file)))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hello(address, PLAIN)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_router_gives_work_to_members_alone_and_says_why(paper_dir, certificates, tmp_path) -> None:
    ca = certificates.cluster_tls.ca_file
    cases = [
        (member_pair(tmp_path / "expired", certificates.cluster(), days=-1), "expired"),
        (member_pair(tmp_path / "other", certificates.cluster(), name="router.example"), "Hostname Verification"),
        (member_pair(tmp_path / "strange", stranger()), "CERTIFICATE_VERIFY_FAILED"),
    ]
    for pair, says in cases:
        tls = ClusterTlsSettings(ca, pair.cert_file, pair.key_file)
        server = grpc.aio.server()
        port = ClusterWire(tls).add_port(server, "127.0.0.1:0")
        await server.start()
        async with serving(paper_dir, certificates.security) as small:
            described = replace(small.seats["prefill-0"].description, address=f"127.0.0.1:{port}")
            link = WorkerLink(described, "x", 5.0, small.router.wire)
            with pytest.raises(ConnectionError, match=says):
                await link.open(lambda report: None, timeout_s=DEADLINE_S)
        await server.stop(None)


# --- files ---


async def test_a_renewed_certificate_is_shown_without_a_restart(paper_dir, certificates, tmp_path) -> None:
    pair = front_pair(tmp_path / "router", certificates.front(), days=-1)
    tls = TlsSettings(pair.cert_file, pair.key_file)
    async with serving(paper_dir, SecuritySettings(tls=tls)) as small:
        assert isinstance(await refusal(small, certificates.client), Untrusted)
        # Half of a renewal: what was there stays in use.
        certificate = open(tls.cert_file, "rb").read()  # noqa: ASYNC230, SIM115
        front_pair(tmp_path / "other", certificates.front())
        os.replace(tmp_path / "other.pem", tls.cert_file)
        assert isinstance(await refusal(small, certificates.client), Untrusted)
        assert certificate
        front_pair(tmp_path / "router", certificates.front())
        named = replace(certificates.client, name="localhost")

        async def renewed() -> bool:
            async with AsyncClient(small.address, tls=named, timeout_s=DEADLINE_S, patience=IMPATIENT) as client:
                return (await client.model()).name == "paper"

        assert await renewed()
        http = OpenAIServer(f"https://{small.http_address}", None, DEADLINE_S, named)
        assert (await http.model()).name == "paper"
        await http.close()
        await until(lambda: not small.router.num_running, what="rest")


@pytest.mark.parametrize("wrong", ["missing", "garbage", "another's key", "encrypted"])
def test_files_that_cannot_be_used_are_named(certificates, tmp_path, wrong) -> None:
    cert, key = certificates.file("router.pem"), tmp_path / "key.pem"
    if wrong == "garbage":
        key.write_bytes(b"\x00nothing\n")
    elif wrong == "another's key":
        key.write_bytes(open(certificates.file("alice-key.pem"), "rb").read())  # noqa: SIM115
    elif wrong == "encrypted":
        key.write_bytes(b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIB\n-----END ENCRYPTED PRIVATE KEY-----\n")
    with pytest.raises(CredentialsError) as caught:
        ClusterWire(ClusterTlsSettings(certificates.file("cluster/ca.pem"), cert, str(key)))
    assert str(key) in str(caught.value)
    with pytest.raises(CredentialsError, match="cannot be read" if wrong == "missing" else "no certificate"):
        ClientTls(certificates.file("ca.pem"), cert, str(key)).channel_credentials()
