"""`baton serve` as a person runs it: what is wrong is said in one line, and whatever ends it, no process stays behind.

Also the operator's changes to a cluster that runs: scaling and draining under load lose no request.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest
import yaml
from asking import answer, request, until

from baton.client.client import Client
from baton.proto import cluster_pb2 as cluster
from baton.proto import cluster_pb2_grpc, inference_pb2_grpc
from baton.proto.settings import EngineSettings, SchedulerSettings, TransferSettings
from baton.router.__main__ import StartError, check
from baton.router.config import ClusterConfig, RouterSettings, defaults

pytestmark = pytest.mark.cluster

BATON = (sys.executable, "-m", "baton.client.cli")
MARK = "BATON_TEST_MARK"
PROMPT = [index % 251 for index in range(120)]


class Serve:
    """One `baton serve` in a session of its own, and every process that it started, directly or not."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._mark = secrets.token_hex(8)
        self._known: dict[int, psutil.Process] = {}
        self.began_s = time.monotonic()
        self.process = subprocess.Popen(
            [*BATON, "serve", *arguments],
            env={**os.environ, **environment, MARK: self._mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=pair)
            for pair in ((self.process.stdout, self.lines), (self.process.stderr, self.errors))
        ]
        for reader in self._readers:
            reader.start()

    def said(self, word: str, timeout_s: float) -> str:
        """Waits for a line of standard output that begins with a word."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.look()
            for line in self.lines:
                if line.startswith(word):
                    return line
            assert self.process.poll() is None, f"it ended: {self.lines} {self.errors}"
            assert time.monotonic() < deadline, f"no {word!r} within {timeout_s} s: {self.lines} {self.errors}"
            time.sleep(0.1)

    def interrupt(self) -> None:
        """Ctrl-C: the terminal sends it to every process in the foreground."""
        os.killpg(self.process.pid, signal.SIGINT)

    def exit_code(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self.look()
            assert time.monotonic() < deadline, f"still there after {timeout_s} s: {self.lines} {self.errors}"
            time.sleep(0.1)
        for reader in self._readers:
            reader.join(5)
        return self.process.returncode

    def look(self) -> list[psutil.Process]:
        """Those of its processes that live. Some rewrite their environment: they are known by their parent."""
        for process in psutil.process_iter(["ppid"]):  # parents come first: process ids grow
            if process.pid in self._known:
                continue
            if process.info["ppid"] in self._known or self._is_marked(process):
                self._known[process.pid] = process
        return [process for process in self._known.values() if _lives(process)]

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._mark
        except psutil.Error:
            return False

    def gone_within(self, timeout_s: float, but: tuple[str, ...] = ()) -> None:
        """Waits until none of its processes lives, but for those of the given titles."""
        deadline = time.monotonic() + timeout_s
        while living := [title for process in self.look() if (title := _title(process)) not in ("", *but)]:
            assert time.monotonic() < deadline, f"left behind: {living}"
            time.sleep(0.1)

    def end(self) -> None:
        for process in self.look():
            process.kill()
        self.process.wait(10)

    def _read(self, stream, lines: list[str]) -> None:
        lines.extend(line.rstrip("\n") for line in stream)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _title(process: psutil.Process) -> str:
    """Its command line, or what it calls itself; empty if it is gone."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.NoSuchProcess:
        return ""


ANY_PORTS = ("--port", "0", "--http-port", "0")


@pytest.fixture
def serve() -> Iterator[object]:
    """`serve(*ANY_PORTS, NAME="value")` starts one; it is gone at the end of the test, come what may."""
    started: list[Serve] = []

    def start(*arguments: str, **environment: str) -> Serve:
        started.append(Serve(list(arguments), environment))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir) -> str:
    return str(tiny_model_dir("llama"))


def refused(one: Serve, timeout_s: float) -> str:
    """Its one line on standard error, after it has failed as it should."""
    code = one.exit_code(timeout_s)
    assert code in (1, 2)
    one.gone_within(5.0)
    assert len(one.errors) == 1, one.errors
    assert one.errors[0].startswith("baton: ")
    return one.errors[0]


def cluster_file(directory: Path, **section) -> str:
    path = directory / "cluster.yaml"
    pools = {role: {"role": role, "size": 1} for role in ("prefill", "decode")}
    path.write_text(yaml.safe_dump({"metadata": {"baton": {"pools": pools, **section}}}))
    return str(path)


class TestTrouble:
    """Found before Ray is started, so it is told within a second or two."""

    def test_a_model_that_is_not_there_is_named(self, serve, tmp_path):
        missing = str(tmp_path / "no-such-model")
        assert missing in refused(serve("--model", missing, *ANY_PORTS), 10)

    def test_a_hub_model_that_cannot_be_had_is_told_in_one_line(self, serve, tmp_path):
        one = serve("--model", "nobody/nothing", *ANY_PORTS, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
        assert "nobody/nothing" in refused(one, 20)

    def test_a_port_that_is_taken_is_named(self, serve, model_dir):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            assert f"127.0.0.1:{port}" in refused(serve("--model", model_dir, "--port", port), 10)

    def test_a_gpu_that_is_not_there_is_told(self, monkeypatch, model_dir):
        monkeypatch.setattr("baton.router.__main__.GPU_DEVICES", ())
        with pytest.raises(StartError, match="GPU"):
            check(defaults(model=model_dir, device="cuda").with_port(0))

    def test_kv_pools_that_exceed_memory_are_told_with_both_sizes(self, serve, model_dir, tmp_path):
        path = cluster_file(tmp_path, model=model_dir, engine={"kv_cache_gib": 3000.0})
        line = refused(serve(path, *ANY_PORTS), 10)
        assert "6000.0 GiB" in line
        assert "kv_cache_gib" in line

    def test_a_missing_nixl_is_told(self, serve, model_dir, tmp_path):
        (tmp_path / "sitecustomize.py").write_text(
            "import sys\n"
            "class Blocker:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            "        if name.partition('.')[0].startswith('nixl'):\n"
            "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
            "sys.meta_path.insert(0, Blocker())\n"
        )
        line = refused(serve("--model", model_dir, *ANY_PORTS, PYTHONPATH=str(tmp_path)), 10)
        assert "nixl" in line
        assert "not installed" in line

    def test_a_wrong_key_of_the_cluster_file_is_named_with_the_file(self, serve, tmp_path):
        path = cluster_file(tmp_path, router={"prot": 50051})
        one = serve(path)
        line = refused(one, 10)
        assert path in line
        assert "metadata.baton.router.prot" in line
        assert "port" in line
        assert one.process.returncode == 2


class TestTroubleInAWorker:
    """What only a worker finds out comes back through the router in the same form."""

    def test_a_nixl_that_does_not_load_is_told(self, serve, model_dir, tmp_path):
        for name in ("nixl", "nixl_cu12", "nixl_cu13"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text("raise ImportError('libucp.so.0: no such file')\n")
        line = refused(serve("--model", model_dir, *ANY_PORTS, PYTHONPATH=str(tmp_path)), 60)
        assert "libucp.so.0" in line

    def test_more_blocks_than_memory_holds_are_told(self, serve, model_dir, tmp_path):
        path = cluster_file(tmp_path, model=model_dir, engine={"num_blocks": 1_000_000_000})
        assert "GiB" in refused(serve(path, *ANY_PORTS), 60)


class TestEnd:
    def test_serving_takes_seconds_and_ctrl_c_ends_it_with_0_and_leaves_nothing(self, serve, model_dir):
        one = serve("--model", model_dir, *ANY_PORTS)
        address = one.said("ready", 60).split()[2]
        took_s = time.monotonic() - one.began_s
        text = subprocess.run(
            [*BATON, "generate", "ab", "--max-tokens", "3", "--json", "--target", address],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout
        assert json.loads(text)
        one.interrupt()
        stopped_s = time.monotonic()
        assert one.exit_code(10) == 0
        stop_s = time.monotonic() - stopped_s
        one.gone_within(5.0)
        assert one.errors == []
        # Bounds for a machine that does other things as well; alone on two cores it takes 7 s and 0.7 s.
        assert took_s < 40
        assert stop_s < 8

    @pytest.mark.parametrize("after_s", [0.0, 1.5, 4.0])
    def test_ctrl_c_while_it_starts_leaves_nothing(self, serve, model_dir, after_s):
        one = serve("--model", model_dir, *ANY_PORTS)
        one.said("starting", 20)
        time.sleep(after_s)  # no event of its own tells how far Ray has come: early, in the middle, late
        one.interrupt()
        assert one.exit_code(10) == 130
        one.gone_within(5.0)
        assert one.errors == []

    def test_a_killed_worker_is_told_on_the_terminal_and_replaced(self, serve, model_dir):
        one = serve("--model", model_dir, *ANY_PORTS)
        address = one.said("ready", 60).split()[2]
        with Client(address) as client:
            (victim,) = client.status().pools[1].workers
            os.kill(victim.pid, signal.SIGKILL)
            deadline = time.monotonic() + 30
            while not one.errors:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert f"{victim.worker_id} (pid {victim.pid}) was lost" in one.errors[0]
            assert client.generate("ab", max_tokens=3, timeout_s=30).result().token_ids
        one.interrupt()
        assert one.exit_code(10) == 0
        assert len(one.errors) == 1

    def test_a_killed_launcher_takes_every_process_with_it(self, serve, model_dir):
        one = serve("--model", model_dir, *ANY_PORTS)
        one.said("ready", 60)
        assert len(one.look()) > 5
        one.process.kill()
        # Ray's own two agents, which hold nothing of ours, first try for a minute to tell its dead server of it.
        one.gone_within(10.0, but=("ray::DashboardAgent", "ray::RuntimeEnvAgent"))


# --- changes to a cluster that runs ---------------------------------------------------------------------------------


def small_config(model_dir: str, decode: int = 1) -> ClusterConfig:
    config = defaults(decode=decode)
    pools = tuple(
        replace(
            pool,
            engine=EngineSettings(model=model_dir, dtype="float32", num_blocks=512, threads=1),
            scheduler=SchedulerSettings(max_num_batched_tokens=64),
            num_cpus=0.1,
        )
        for pool in config.pools
    )
    router = RouterSettings(port=0, http_port=0, drain_timeout_s=1.0)
    return ClusterConfig(model_dir, pools, router, TransferSettings(checksums="always"))


def held(status: cluster.ClusterStatus) -> int:
    """Blocks that anybody holds, and legs."""
    return sum(
        worker.load.held_blocks + worker.load.lent_blocks + worker.load.quarantined_blocks + worker.in_flight
        for pool in status.pools
        for worker in pool.workers
    )


def decode_pool(status: cluster.ClusterStatus) -> cluster.PoolStatus:
    return next(pool for pool in status.pools if pool.name == "decode")


class Stream:
    """Requests one after the other until it is told to stop; each answer is checked against the first."""

    def __init__(self, stub, index: int, num_tokens: int) -> None:
        self._message = request(PROMPT[index:], num_tokens)
        self._stub = stub
        self.stopping = False
        self.num_answers = 0

    async def run(self) -> None:
        expected = None
        while not self.stopping:
            tokens = (await answer(self._stub, self._message)).tokens
            expected = expected or tokens
            assert tokens == expected
            self.num_answers += 1


async def scale_under_load(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        operator = cluster_pb2_grpc.ClusterStub(channel)
        streams = [Stream(inference_pb2_grpc.InferenceStub(channel), index, 150) for index in range(4)]
        running = [asyncio.create_task(stream.run()) for stream in streams]

        async def status() -> cluster.ClusterStatus:
            return await operator.GetStatus(cluster.GetStatusRequest(), timeout=5)

        async def answers(more: int) -> None:
            wanted = [stream.num_answers + more for stream in streams]
            await until(
                lambda: (
                    any(task.done() for task in running)
                    or all(stream.num_answers >= goal for stream, goal in zip(streams, wanted, strict=True))
                ),
                timeout_s=60,
                what="answers",
            )

        await answers(1)
        assert (await operator.Scale(cluster.ScaleRequest(pool="decode", size=2), timeout=60)).size == 2
        workers = decode_pool(await status()).workers
        assert [worker.state for worker in workers] == ["ready", "ready"]
        assert len({worker.pid for worker in workers}) == 2

        async def both_busy() -> bool:
            return all(worker.in_flight for worker in decode_pool(await status()).workers)

        await until(both_busy, timeout_s=30, what="work on both")
        await operator.Scale(cluster.ScaleRequest(pool="decode", size=1), timeout=60)
        left = decode_pool(await status())
        assert left.size == 1
        gone = {worker.pid for worker in workers} - {worker.pid for worker in left.workers}
        await answers(2)
        for stream in streams:
            stream.stopping = True
        await asyncio.gather(*running)
        await until(lambda: not any(psutil.pid_exists(pid) for pid in gone), timeout_s=5, what="end of the process")

        async def rest() -> bool:
            return held(await status()) == 0

        await until(rest, what="free blocks")


async def drain_under_load(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub, operator = inference_pb2_grpc.InferenceStub(channel), cluster_pb2_grpc.ClusterStub(channel)
        expected = (await answer(stub, request(PROMPT, 300))).tokens
        running = [asyncio.create_task(answer(stub, request(PROMPT, 300))) for _ in range(4)]

        async def worker(worker_id: str) -> cluster.WorkerStatus:
            status = await operator.GetStatus(cluster.GetStatusRequest(), timeout=5)
            return next(worker for worker in decode_pool(status).workers if worker.worker_id == worker_id)

        async def busy() -> int:
            return (await worker("decode-0")).load.running

        await until(busy, what="work on decode-0")
        drained = await operator.Drain(cluster.DrainRequest(worker_id="decode-0", timeout_s=0.05), timeout=30)
        assert drained.moved >= 1
        results = await asyncio.gather(*running)
        assert all(result.tokens == expected for result in results)
        assert sum(result.finish.retries for result in results) >= 1
        later = [await answer(stub, request(PROMPT[index:], 5)) for index in range(4)]
        assert {result.finish.decode_worker for result in later} == {"decode-1"}

        async def out_of_placement() -> bool:
            return (await worker("decode-0")).state == "draining"

        await until(out_of_placement, what="the state draining")


def test_scaling_a_pool_up_and_down_under_load_loses_no_request_and_leaves_nothing(launch, model_dir):
    with launch(small_config(model_dir), Path(model_dir)) as running:
        asyncio.run(scale_under_load(running.address))


def test_a_drained_workers_requests_move_and_it_gets_no_more(launch, model_dir):
    with launch(small_config(model_dir, decode=2), Path(model_dir)) as running:
        asyncio.run(drain_under_load(running.address))


def test_status_shows_each_process_and_its_memory(launch, model_dir):
    with launch(small_config(model_dir), Path(model_dir)) as running:
        status = running.status()
        pids = [status.router.pid, *(worker.pid for pool in status.pools for worker in pool.workers)]
        assert len(set(pids)) == 3
        assert all(psutil.pid_exists(pid) for pid in pids)
        sizes = [status.router.rss_bytes, *(worker.rss_bytes for pool in status.pools for worker in pool.workers)]
        assert all(size > 50 << 20 for size in sizes)
        # The router computes nothing, so it does without torch and stays smaller than any worker.
        assert min(sizes) == status.router.rss_bytes
        assert {worker.state for pool in status.pools for worker in pool.workers} == {"ready"}
