"""Composition: what one worker process is made of, whatever its role.

Owns: which engine, connector and duties stand behind a `WorkerFactory`, and behind a further rank. Refuses to know: how
such a process comes to be (`actors`), and what a cluster is. Launcher and router hold these functions and never call
them: their imports stand inside, so that torch, 1.5 s and 200 MiB for each process, is loaded by workers alone. And a
worker loads this file, not the launcher's, with which the router and its web server would come.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

from baton.fleet.actors import StartRank, Worker, WorkerFactory
from baton.proto.messages import Role
from baton.proto.settings import RankSettings, WorkerSettings

Failed = Callable[[BaseException], None]


def worker(settings: WorkerSettings, failed: Failed, start_rank: StartRank) -> Worker:
    from baton.decode_worker.duty import DecodeDuty
    from baton.engine import roles
    from baton.engine.parallel import open_ranks
    from baton.engine.runner import Runner
    from baton.engine.worker import DutyFactory
    from baton.kvtransfer.connector import KvPool
    from baton.kvtransfer.sharded import open_sharded
    from baton.prefill_worker.duty import PrefillDuty

    ranks = open_ranks(settings.engine, partial(start_rank, further_rank, settings), failed)
    runner = Runner(settings.engine, ranks)
    connector = open_sharded(settings.transfer, ranks.side_lines if ranks is not None else (), failed)
    address = connector.attach(KvPool(runner.kv, runner.geometry))
    lends = partial(PrefillDuty, connector=connector, address=address)
    pulls = partial(DecodeDuty, connector=connector, pull_ids=itertools.count(1))
    duties: dict[Role, DutyFactory] = {Role.PREFILL: lends, Role.DECODE: pulls, Role.COLOCATED: pulls}
    return roles.Worker(settings, runner, connector, duties, failed)


def further_rank(settings: WorkerSettings, place: RankSettings) -> None:
    """What a process does that holds a part of a worker's model and of its KV, and is not rank 0."""
    from baton.engine.parallel import follow
    from baton.engine.part import ModelPart
    from baton.kvtransfer.connector import KvPool, open_connector
    from baton.kvtransfer.sharded import serve

    def hand_off(part: ModelPart, line: Connection) -> None:
        serve(line, open_connector(settings.transfer), KvPool(part.kv, part.geometry, part.first_kv_head))

    follow(settings.engine, place, hand_off)


# Whatever it begins as, a process can take any role later.
FACTORIES: dict[Role, WorkerFactory] = dict.fromkeys(Role, worker)
