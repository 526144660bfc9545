"""Ranks in processes of their own, without Ray: what `fleet/actors.py` does with actors.

A rank is forked from a server that has torch loaded, so it is there in a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from baton.engine.parallel import Ranks, follow
from baton.engine.part import ModelPart
from baton.engine.runner import Runner
from baton.proto.settings import EngineSettings, RankSettings

END_S = 20.0
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["baton.engine.runner"])


@dataclass
class Nursery:
    """Starts ranks, and keeps their processes and what rank 0 was told of them."""

    processes: list[BaseProcess] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    opened: list[Ranks] = field(default_factory=list)

    def ranks(self, settings: EngineSettings, theirs: EngineSettings | None = None) -> Ranks:
        """Ranks of these settings; `theirs`: those that the others get instead."""

        def start(place: RankSettings) -> None:
            process = _CONTEXT.Process(target=live, args=(theirs or settings, place), daemon=True)
            process.start()
            self.processes.append(process)

        ranks = Ranks(settings, start, self.failures.append)
        self.opened.append(ranks)
        return ranks

    def runner(self, settings: EngineSettings) -> Runner:
        """Rank 0's runner, or the only one."""
        return Runner(settings, self.ranks(settings) if settings.tensor_parallel > 1 else None)

    def close(self) -> None:
        for ranks in self.opened:
            ranks.close()
        for process in self.processes:
            process.join(END_S)
            assert process.exitcode is not None, "a rank has outlived rank 0"


def live(settings: EngineSettings, place: RankSettings) -> None:
    """A rank's process."""
    follow(settings, place, _ignore)


def _ignore(part: ModelPart, line: Connection) -> None:
    """Nothing is handed off."""
