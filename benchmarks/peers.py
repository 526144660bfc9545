"""The programs of others that this project is measured beside: where they are and how they are run at their best.

Owns: the environment `.venv-peers` (made by `make bench-peers`), the variables and preloaded libraries that vLLM's
documentation advises on CPUs, processes pinned to a core, their stop and their end.
Refuses to know: what is asked of them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import select
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
VENV = HERE.parent / ".venv-peers"
LOGS = HERE / "out" / "logs"
START_TIMEOUT_S = 900.0
"""vLLM compiles at its first start, which on a busy machine takes minutes."""
ANSWER_TIMEOUT_S = 1200.0
STOP_TIMEOUT_S = 20.0
KV_GIB = 2
OFFLINE_BUDGET = 4096
SERVER_BUDGET = 512
"""max_num_batched_tokens: with vLLM's own default its servers' latencies are worse here."""
MAX_MODEL_LEN = 4096
SIDE_CHANNEL_PORTS = (25_600, 25_601)
"""Always the same: vLLM compiles anew for each port."""
TCMALLOC = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/lib")


class PeerFailed(RuntimeError):
    """A peer did not start, answer or end as it should; the message names its log."""


@dataclass(frozen=True, slots=True)
class Peers:
    """The peers' environment. `missing`: what keeps them from their best figures here."""

    folder: Path
    preload: tuple[str, ...]
    missing: tuple[str, ...]

    @classmethod
    def find(cls, folder: Path = VENV) -> Peers | None:
        """None where they are not installed."""
        folder = folder.resolve()  # what vLLM has compiled it finds again by its own path
        if not (folder / "bin" / "python").exists():
            return None
        preload, missing = [], []
        tcmalloc = next((path for name in TCMALLOC for path in _libraries(name)), None)
        if tcmalloc is None:
            missing.append("tcmalloc (Debian: libtcmalloc-minimal4) is not on this machine: vLLM runs with malloc")
        else:
            preload.append(str(tcmalloc))
        openmp = folder / "lib" / "libiomp5.so"
        if openmp.exists():
            preload.append(str(openmp))
        else:
            missing.append("Intel's OpenMP is not in the peers' environment: vLLM runs with GNU's")
        return cls(folder, tuple(preload), tuple(missing))

    def version(self, distribution: str) -> str:
        found = importlib.metadata.distributions(
            path=[str(next((self.folder / "lib").glob("python3.*/site-packages")))]
        )
        return next((d.version for d in found if d.metadata["Name"] == distribution), "?")

    def program(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    def environment(self, core: int, *, preload: bool = True, **more: str) -> dict[str, str]:
        """Variables of a process that computes on one core."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return kept | {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": str(HERE / "peer_site"),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            # On CPU this version cannot load what it has compiled ahead of time, and would compile at every start. The
            # code that runs is the same.
            "VLLM_USE_AOT_COMPILE": "0",
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            **({"LD_PRELOAD": os.pathsep.join(self.preload)} if preload and self.preload else {}),
            **more,
        }


def _libraries(name: str) -> Iterator[Path]:
    yield from (path for folder in LIBRARY_FOLDERS if (path := Path(folder) / name).exists())


# --- processes ------------------------------------------------------------------------------------------------------


class Process:
    """One process and what it starts, in a group of their own, on the given cores."""

    def __init__(
        self, name: str, command: Sequence[str], environment: dict[str, str], cores: set[int], *, pipes: bool = False
    ) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = LOGS / f"{name}.log"
        self._cores = cores
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def pin(self) -> None:
        """Puts every thread of it back on its cores: some peers move their own."""
        for process in self._tree():
            pin(process.pid, self._cores)

    def halt(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        """To it and to all that it has started."""
        for process in self._tree():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                pass

    def _tree(self) -> list[psutil.Process]:
        try:
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def ask(self, question: dict[str, Any] | None, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """Its answer to one line; None only waits for what it says first. Raises PeerFailed."""
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        try:
            if question is not None:
                pipe_in.write(json.dumps(question).encode() + b"\n")
                pipe_in.flush()
            # Lines are answers to questions, so nothing of a later one can be waiting in the buffer.
            ready, _, _ = select.select([pipe_out], [], [], timeout_s)
            line = pipe_out.readline() if ready else b""
        except BrokenPipeError:
            line = b""
        if not line:
            raise PeerFailed(f"{self.name} gave no answer within {timeout_s:.0f} s or ended; see {self.log}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends it and what it has started, also where that has been stopped."""
        started = self._tree()
        for number in (signal.SIGTERM, signal.SIGCONT):
            self._signal(number)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        _, alive = psutil.wait_procs(started[1:], STOP_TIMEOUT_S / 4)
        for process in alive:
            process.kill()
        self._process.wait(STOP_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def pin(pid: int, cores: set[int]) -> None:
    """Every thread that the process has now; those it starts later inherit from one of them."""
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:
            pass


@contextmanager
def script(peers: Peers, name: str, arguments: Sequence[str], core: int, **more: str) -> Iterator[Process]:
    """A file of this folder, run by the peers' interpreter on one core; asked by `Process.ask` once it is ready."""
    process = Process(
        Path(name).stem,
        [peers.program("python"), str(HERE / name), *arguments],
        peers.environment(core, **more),
        {core},
        pipes=True,
    )
    try:
        process.ask(None, START_TIMEOUT_S)
        yield process
    finally:
        process.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def await_http(process: Process, url: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Until the address answers with success. Raises PeerFailed."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.has_ended:
            raise PeerFailed(f"{process.name} ended while it started; see {process.log}")
        try:
            with urllib.request.urlopen(url, timeout=5.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise PeerFailed(f"{process.name} was not ready within {timeout_s:.0f} s; see {process.log}")


# --- vLLM's servers -------------------------------------------------------------------------------------------------


class Servers:
    """Some processes that serve together at `url`. They can be stopped where they stand, and go on later."""

    def __init__(self, url: str, processes: Sequence[Process]) -> None:
        self.url = url
        self._processes = processes

    def halt(self) -> None:
        """They take no CPU until `resume`."""
        for process in self._processes:
            process.halt()

    def resume(self) -> None:
        for process in self._processes:
            process.resume()


@contextmanager
def vllm_servers(peers: Peers, model: Path, budget: int, cores: Sequence[int]) -> Iterator[dict[str, Servers]]:
    """`colocated`: one server with a thread on each core. `disaggregated`: one prefill and one decode server, a core
    each, KV by NIXL, behind vLLM's router. All of them run when they are yielded."""
    with ExitStack() as stack:

        def start(name: str, cores: Sequence[int], *arguments: str, **variables: str) -> tuple[Process, str]:
            port = free_port()
            bind = str(cores[0]) if len(cores) == 1 else f"{cores[0]}-{cores[-1]}"
            environment = peers.environment(cores[0], **variables) | {"VLLM_CPU_OMP_THREADS_BIND": bind}
            command = [peers.program("vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
            command += ["--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN)]
            command += ["--max-num-batched-tokens", str(budget), *arguments]
            process = Process(f"vllm-{name}", command, environment, set(cores))
            stack.callback(process.close)
            return process, f"http://127.0.0.1:{port}"

        def transfer(role: str) -> str:
            extra = {"backends": ["UCX"], "num_threads": 1}
            return json.dumps(
                {
                    "kv_connector": "NixlConnector",
                    "kv_role": role,
                    "kv_buffer_device": "cpu",
                    "kv_connector_extra_config": extra,
                }
            )

        # One after the other where it compiles: each does so for itself, with both cores.
        alone, alone_url = start("colocated", cores)
        await_http(alone, f"{alone_url}/health")
        both = []
        for index, (name, role) in enumerate((("prefill", "kv_producer"), ("decode", "kv_consumer"))):
            variables = {
                "UCX_TLS": "all",
                "UCX_NET_DEVICES": "all",
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_CHANNEL_PORTS[index]),
            }
            core = cores[index % len(cores)]
            both.append(start(name, [core], "--kv-transfer-config", transfer(role), **variables))
        for process, url in both:
            await_http(process, f"{url}/health")
            # The connector moves the main thread of both its ends onto the machine's last core.
            process.pin()
        (prefill, prefill_url), (decode, decode_url) = both
        router = stack.enter_context(rust_router(peers, prefill=prefill_url, decode=decode_url, cores=set(cores)))
        yield {
            "disaggregated": Servers(router.url, [prefill, decode, *router.processes]),
            "colocated": Servers(alone_url, [alone]),
        }


@dataclass(frozen=True, slots=True)
class RustRouter:
    url: str
    processes: tuple[Process, ...]

    @property
    def pid(self) -> int:
        return self.processes[0].pid


@contextmanager
def rust_router(peers: Peers, *, prefill: str, decode: str, cores: set[int]) -> Iterator[RustRouter]:
    """vLLM's router between one prefill and one decode server."""
    port = free_port()
    command = [peers.program("vllm-router"), "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    command += ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--prefill", prefill, "--decode", decode]
    command += ["--worker-startup-check-interval", "1", "--log-level", "error", "--prometheus-port", str(free_port())]
    process = Process("vllm-router", command, peers.environment(0, preload=False), cores)
    try:
        await_http(process, f"http://127.0.0.1:{port}/health", 60.0)
        yield RustRouter(f"http://127.0.0.1:{port}", (process,))
    finally:
        process.close()
