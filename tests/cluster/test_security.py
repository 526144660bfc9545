"""Certificates and keys in real processes: the tokens of a plain cluster, and no secret where others can see it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest
import ray
from certificates import Certificates
from clusters import shape

from baton.client.client import Client
from baton.client.errors import AccessDenied, Unavailable
from baton.client.resume import Patience
from baton.proto import worker_pb2_grpc
from baton.proto.settings import TransferSettings

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

KEY = "sk-0123456789abcdef-in-a-file"
PROMPTS = [[(3 * place + index) % 251 for place in range(120)] for index in range(12)]
IMPATIENT = Patience(give_up_s=0.0)


def tokens(client: Client) -> list[list[int]]:
    asked = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    results = [client.generate(token_ids=prompt, **asked).result() for prompt in PROMPTS]
    assert all(result.finish.usage.transferred_tokens > 0 for result in results)
    return [list(result.token_ids) for result in results]


def test_a_cluster_by_mutual_tls_with_two_routers_has_the_tokens_of_a_plain_one(launch, tiny_model_dir, tmp_path):
    certificates = Certificates.make(tmp_path / "certs")
    keys = tmp_path / "keys"
    keys.write_text(f"ci: {KEY}\n")
    model_dir = tiny_model_dir("llama")
    plain = replace(shape(str(model_dir), 1, 1, budget=64), transfer=TransferSettings(checksums="always"))
    with launch(plain, model_dir) as cluster, Client(cluster.address) as client:
        expected = tokens(client)
    router = replace(plain.router, replicas=2, api_keys_file=str(keys))
    with launch(replace(plain, router=router, security=certificates.security), model_dir) as cluster:
        # A router's connection is one of the two: both have to be met.
        for _ in range(4):
            with Client(cluster.address, token=KEY, tls=certificates.client) as client:
                assert tokens(client) == expected
                status = client.status()
        workers = [worker for pool in status.pools for worker in pool.workers]
        assert [worker.state for worker in workers] == ["ready", "ready"]
        for options, error in (
            ({"token": KEY}, Unavailable),
            ({"tls": certificates.client}, AccessDenied),
            ({"tls": certificates.client, "token": "wrong-key"}, AccessDenied),
        ):
            with Client(cluster.address, timeout_s=20.0, patience=IMPATIENT, **options) as client, pytest.raises(error):
                client.status()
        for address in (workers[0].address, status.routers[0].peer_address):
            with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
                next(worker_pb2_grpc.WorkerStub(channel).Connect(iter(()), timeout=20.0))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        for pid in (*(worker.pid for worker in workers), *(it.pid for it in status.routers)):
            process = psutil.Process(pid)
            assert KEY not in " ".join(process.cmdline())
            assert KEY not in repr(process.environ())
    logs = [path for path in _ray_logs() if KEY.encode() in path.read_bytes()]
    assert not logs


def _ray_logs() -> list[Path]:
    """All that the processes of this session have written."""
    directory = Path(ray._private.worker._global_node.get_logs_dir_path())
    assert directory.is_dir()
    return [path for path in directory.rglob("*") if path.is_file()]
