"""How long a worker takes to change its role, idle and under load, and that no request notices.

Owns: the rounds, the load, the table. `python benchmarks/role_change.py [--model M] [--rounds N] [--clients N]`

One worker of a cluster of 1 prefill and 2 decode workers goes decode -> colocated -> prefill -> decode, again and
again: first with nothing to do, then while clients ask without pause. Each answer under load must be that of the same
request before. `total` is what the operator waits for: until the worker serves in its new role. `drain` is the part in
which its running legs end or, after --timeout, move elsewhere; the rest is the change itself. `restart` is from a
SIGKILL until the worker serves again: what a change of role makes unnecessary.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from clusters import Machine, await_rest, local_ray, model_directory, running, shape, workers

from baton.client.client import Client
from baton.proto import cluster_pb2 as cluster

WORKER = "decode-0"
RING = ("colocated", "prefill", "decode")
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 60
RESTART_TIMEOUT_S = 300.0


class Load:
    """Clients that ask the same things again and again, and remember what they were told first."""

    def __init__(self, address: str, num_clients: int) -> None:
        self.num_answers = 0
        self.num_wrong = 0
        self._address = address
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(index,)) for index in range(num_clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, num_more: int) -> None:
        goal = self.num_answers + num_more
        while self.num_answers < goal and any(thread.is_alive() for thread in self._threads):
            time.sleep(0.01)

    def _ask(self, index: int) -> None:
        prompt = [(7 * index + 3 * place) % 250 for place in range(PROMPT_TOKENS)]
        expected: Sequence[int] | None = None
        with Client(self._address) as client:
            while not self._stopping.is_set():
                answer = client.generate(
                    token_ids=prompt, max_tokens=OUTPUT_TOKENS, temperature=0.8, seed=index, ignore_eos=True
                )
                tokens = answer.result().token_ids
                expected = expected or tokens
                with self._lock:
                    self.num_answers += 1
                    self.num_wrong += tokens != expected


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="demo", help="a model, or tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for running legs, before they move")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, model_directory(options.model, Path(directory)) as model:
        # float32: that outputs go on exactly after a move is a promise for it.
        config = shape(model, prefill=1, decode=2, dtype="float32", num_blocks=512)
        with local_ray(), running(config) as address, Client(address) as client:
            print(f"{options.model}, 1 prefill and 2 decode workers of one thread; {Machine.now()}")
            print(f"{'':<28}{'changes':>8}{'total ms p50':>14}{'max':>8}{'drain ms p50':>14}{'max':>8}{'moved':>7}")
            _show("idle", _rounds(client, options.rounds, options.timeout, None))
            with Load(address, options.clients) as load:
                load.wait_for(2 * options.clients)
                _show("under load", _rounds(client, options.rounds, options.timeout, load))
                _show("under load, nobody waits", _rounds(client, options.rounds, 0.0, load))
                load.wait_for(options.clients)
            _, unrest = await_rest(address)
            print(f"restart of the process: {_restart(client):.1f} s")
            print(f"{load.num_answers} answers, {load.num_wrong} of them not as before; at rest: {unrest or 'all'}")
            print(f"afterwards: {Machine.now()}")
            return 1 if load.num_wrong or unrest else 0


def _rounds(client: Client, rounds: int, timeout_s: float, load: Load | None) -> list[cluster.SetRoleResponse]:
    changes = []
    for _ in range(rounds):
        for role in RING:
            if load is not None:
                load.wait_for(6)
            changes.append(client.set_role(WORKER, role, timeout_s=timeout_s))
    return changes


def _show(name: str, changes: list[cluster.SetRoleResponse]) -> None:
    totals, drains = [1e3 * one.total_s for one in changes], [1e3 * one.drain_s for one in changes]
    figures = f"{statistics.median(totals):>14.0f}{max(totals):>8.0f}"
    figures += f"{statistics.median(drains):>14.0f}{max(drains):>8.0f}{sum(one.moved for one in changes):>7}"
    print(f"{name:<28}{len(changes):>8}{figures}", flush=True)


def _restart(client: Client) -> float:
    """Seconds from the kill until the worker serves again."""
    before = next(worker for worker in workers(client.status()) if worker.worker_id == WORKER)
    began_s = time.monotonic()
    os.kill(before.pid, signal.SIGKILL)
    while time.monotonic() < began_s + RESTART_TIMEOUT_S:
        now = next(worker for worker in workers(client.status()) if worker.worker_id == WORKER)
        if now.state == "ready" and now.pid != before.pid:
            return time.monotonic() - began_s
        time.sleep(0.02)
    raise TimeoutError(f"{WORKER} was not back {RESTART_TIMEOUT_S:.0f} s after it was killed")


if __name__ == "__main__":
    sys.exit(main())
