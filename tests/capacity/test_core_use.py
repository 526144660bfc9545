"""Notes of workers that shared a machine's cores tell what each would take on cores of its own, and what lay beside."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from measured_steps import ORIGIN, TRUTH, works
from virtual_cluster import cost_model

from baton.capacity import calibrate, core_use
from baton.capacity.core_use import Occupation, Window
from baton.capacity.cores import Cores
from baton.capacity.cost import CoreCost, CostModel
from baton.capacity.virtual_loop import VirtualLoop
from baton.proto.messages import Role
from baton.proto.step_log import StepLogFile, StepLogHeader, StepRecord

WINDOW_S = 2.0


@dataclass
class Machine:
    """Two workers of one thread each on shared cores. They work through the same kinds of steps: in turns for some
    windows of time, together in others."""

    cost: CoreCost
    cores: float
    num_windows: int = 18
    loop: VirtualLoop = field(default_factory=VirtualLoop)
    logs: dict[str, list[StepRecord]] = field(default_factory=lambda: {"a": [], "b": []})
    windows: list[Window] = field(default_factory=list)

    def run(self) -> list[StepLogFile]:
        generator = random.Random(7)
        model = replace(cost_model(), cores=self.cost)
        machine = Cores(self.loop, self.cores, model)
        kinds = works(3000, generator)

        def begin(name: str) -> None:
            number = int(self.loop.time() / WINDOW_S)
            if number >= self.num_windows:
                return
            # a, b, both, a, b, both, ...
            if number % 3 == (1 if name == "a" else 0):
                self.loop.at((number + 1) * WINDOW_S, lambda: begin(name))
                return
            work, began_s = generator.choice(kinds), self.loop.time()
            alone_s = TRUTH.step_s(*work) * generator.lognormvariate(0, 0.03)
            machine.step(alone_s, lambda: end(name, work, began_s, alone_s))

        def end(name: str, work: tuple[int, int, int, int], began_s: float, alone_s: float) -> None:
            took_s = self.loop.time() - began_s
            self.logs[name].append(StepRecord(began_s, *work, 0, 0.0, took_s, 0.0, None, alone_s))
            begin(name)
            machine.spend(self.cost.step_cpu_s + self.cost.token_cpu_s * work[2])

        self.loop.at(0.0, lambda: begin("a"))
        self.loop.at(0.0, lambda: begin("b"))
        self.loop.at(self.num_windows * WINDOW_S + 10.0, self.loop.stop)
        self.loop.run()
        self._note_windows(generator)
        return [
            StepLogFile(StepLogHeader(name, Role.COLOCATED, device="cpu", threads=1), tuple(steps))
            for name, steps in self.logs.items()
        ]

    def _note_windows(self, generator: random.Random) -> None:
        for number in range(self.num_windows):
            inside = [
                step
                for steps in self.logs.values()
                for step in steps
                if number * WINDOW_S <= step.start_s < (number + 1) * WINDOW_S
            ]
            tokens, requests = sum(step.decode_sequences for step in inside), generator.randint(0, 60)
            beside_s = self.cost.request_cpu_s * requests + self.cost.step_cpu_s * len(inside)
            beside_s += self.cost.token_cpu_s * tokens
            # Some of it is done in the workers' processes.
            of_workers_s = sum(step.cpu_s for step in inside) + 0.2 * beside_s
            start_s, end_s = number * WINDOW_S, (number + 1) * WINDOW_S
            self.windows.append(Window(start_s, end_s, requests, tokens, 0.8 * beside_s, of_workers_s))


def error_of(model: CostModel) -> float:
    """The median of how far steps are off that it has not seen."""
    unseen = works(400, random.Random(9))
    return float(np.median([abs(model.step_s(*work) / TRUTH.step_s(*work) - 1) for work in unseen]))


@pytest.mark.parametrize(("cores", "crowded_speed"), [(1.0, 1.0), (2.0, 1.0), (2.0, 0.7)])
def test_steps_that_shared_cores_are_fitted_as_of_cores_of_their_own(cores: float, crowded_speed: float) -> None:
    machine = Machine(CoreCost(0.003, 0.0008, 0.0002, crowded_speed), cores)
    logs = machine.run()
    found = calibrate.fit(logs, (), ORIGIN, machine.windows, int(cores))
    assert found.cores.request_cpu_s == pytest.approx(0.003, rel=0.1)
    assert found.cores.step_cpu_s == pytest.approx(0.0008, rel=0.1)
    assert found.cores.token_cpu_s == pytest.approx(0.0002, rel=0.1)
    if cores > 1:
        assert found.cores.crowded_speed == pytest.approx(crowded_speed, abs=0.05)
    assert error_of(found) < 0.06
    # Without knowing what lay beside, steps look longer than they would be alone.
    assert error_of(found) < error_of(calibrate.fit(logs, (), ORIGIN))


def test_what_a_step_would_take_alone_is_its_time_less_what_others_took_of_it() -> None:
    def log(name: str, *spans: tuple[float, float], decode: int = 0, threads: int = 1) -> StepLogFile:
        steps = [StepRecord(start, 8, 36, decode, 0, 0, 0.0, end - start, 0.0, None, 0.0) for start, end in spans]
        return StepLogFile(StepLogHeader(name, Role.COLOCATED, device="cpu", threads=threads), tuple(steps))

    logs = [log("a", (0.0, 4.0), (4.0, 5.0)), log("b", (1.0, 2.0), (3.0, 6.0), decode=10)]
    together = Occupation(logs, CoreCost(), 1)
    assert [each.tolist() for each in together.beside()] == [pytest.approx([0.5, 1.0]), pytest.approx([1.0, 2 / 3])]
    assert [each.tolist() for each in together.alone_s(1.0)] == [pytest.approx([3.0, 0.5]), pytest.approx([0.5, 2.0])]
    apart = Occupation(logs, CoreCost(), 2)
    assert [each.tolist() for each in apart.alone_s(1.0)] == [pytest.approx([4.0, 1.0]), pytest.approx([1.0, 3.0])]
    assert [each.tolist() for each in apart.alone_s(0.5)] == [pytest.approx([3.0, 0.5]), pytest.approx([0.5, 2.0])]
    # Two threads of one worker were measured together, whatever they cost each other.
    assert Occupation([log("c", (0.0, 4.0), threads=2)], CoreCost(), 2).alone_s(0.5)[0].tolist() == pytest.approx([4.0])
    # What b has to say of ten tokens takes 0.2 s of the one core from its second second on, 0.4 s as a also computes.
    talking = Occupation(logs, CoreCost(token_cpu_s=0.02), 1)
    assert talking.alone_s(1.0)[0].tolist() == pytest.approx([3.0 - 0.2, 0.5], rel=1e-3)


def test_a_few_windows_give_a_token_all_that_was_spent() -> None:
    windows = [Window(float(k), k + 1.0, 1, 100, 0.05, 0.0) for k in range(3)]
    assert core_use.fit_cpu([], windows) == CoreCost(token_cpu_s=pytest.approx(0.0005))
    assert core_use.fit_cpu([], []) == CoreCost()
