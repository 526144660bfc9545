"""S4: plan and commit of one step without a model, against vLLM's scheduler class, at 64, 256 and 1,024 running.

Owns: the rows. `scheduler_speed.py` and `peer_scheduler.py` drive the two by the same scenarios; CPU time, both on the
same core, one after the other in each round.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from bars import Better, Measure, Row
from case import Options
from peers import script
from scheduler_speed import measure

from baton.engine.checkpoint import resolve_model

BAR = 5.0
SCENARIOS = ("decode", "mixed")
RUNNING = (64, 256, 1024)


def rows(options: Options) -> Iterator[Row]:
    options.pin_here()
    with ExitStack() as stack:
        peer = None
        if options.peers is not None:
            arguments = [str(resolve_model(options.model))]
            peer = stack.enter_context(script(options.peers, "peer_scheduler.py", arguments, options.core))
        for scenario in SCENARIOS:
            for running in RUNNING[:1] if options.quick else RUNNING:
                steps = 40 if options.quick else 100 if running >= 1000 else 200
                ours, theirs = [], []
                for seed in range(options.rounds_or(3)):
                    ours.append(measure(scenario, running, steps, seed).step_us)
                    if peer is not None:
                        question = {"scenario": scenario, "running": running, "steps": steps, "seed": seed}
                        theirs.append(float(peer.ask(question)["step_us"]))
                measured = Measure("vLLM", Better.LESS, BAR, tuple(ours), tuple(theirs))
                yield Row("S4", f"step of {running} running, {scenario}", "us", (measured,))
