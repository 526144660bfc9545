"""`baton capacity` as a person uses it: what it writes and prints, and how it answers what cannot be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.capacity.cost import CostModel
from baton.capacity.simulation import Simulated
from baton.capacity.study import Study
from baton.capacity.sweep import Backend
from baton.client import live
from baton.client.cli import main
from baton.router import config

CLUSTER = str(Path(__file__).resolve().parents[2] / "cluster.yaml")
DEMO = Path(__file__).resolve().parents[2] / "capacity" / "demo-cost.json"
SMALL = ("--scale-lengths", "0.05", "--num-requests", "40", "--repeats", "1", "--jobs", "1")


@dataclass(frozen=True)
class Printed:
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> Printed:
        try:
            code = main(["capacity", *words])
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        captured = capsys.readouterr()
        return Printed(code, captured.out, captured.err)

    return call


def test_one_run_is_simulated_and_told(run) -> None:
    printed = run("simulate", CLUSTER, "--ratio", "1:2", "--workload", "chat", "--rate", "2", *SMALL[:4])
    assert printed.code == 0
    for said in ("chat, 1:2, 2 requests/s", "TTFT", "TPOT", "prefill", "2 workers", "cost model"):
        assert said in printed.out


def test_a_sweep_writes_its_page_and_goes_on_from_what_it_finished(run, tmp_path: Path) -> None:
    words = ("sweep", CLUSTER, "--ratios", "1:1", "--rates", "1,4", "--rate", "1", *SMALL)
    printed = run(*words)
    assert printed.code == 0, printed.err
    assert "2 co-located" in printed.out
    page = tmp_path / "capacity-sweep" / "report.html"
    assert "baton capacity sweep" in page.read_text(encoding="utf-8")
    points = (tmp_path / "capacity-sweep" / "points.jsonl").read_text(encoding="utf-8")
    assert len(points.splitlines()) == 4
    again = run(*words)
    assert again.code == 0
    assert (tmp_path / "capacity-sweep" / "points.jsonl").read_text(encoding="utf-8") == points
    page.unlink()
    assert run("report", "capacity-sweep").code == 0
    assert page.exists()


def test_a_live_sweep_is_predicted_on_cores_that_are_shared_as_those_of_the_machine(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def instead_of_the_machine(*of_what: object) -> Iterator[Backend]:
        with ThreadPoolExecutor(1) as threads:
            yield Backend("live", Simulated(CostModel.load(DEMO)), threads)

    monkeypatch.setattr(live, "backend", instead_of_the_machine)
    # As many workers as cores: none is left for router and client.
    size = live.num_cores()
    printed = run("sweep", "--ratios", f"1:{size}", "--backend", "live", "--rates", "2", "--rate", "2", *SMALL)
    assert printed.code == 0, printed.err
    study = Study.load(tmp_path / "capacity-sweep" / "study.json")
    assert {each.label for each in study.predictions} == {f"1:{size}", f"{size + 1} co-located"}
    assert any("share these cores fairly" in note for note in study.provenance.notes)
    lines = (tmp_path / "capacity-sweep" / "points.jsonl").read_text(encoding="utf-8").splitlines()
    setups = [json.loads(line)["point"]["setup"] for line in lines]
    assert sorted(setup["shared_cores"] or 0 for setup in setups) == [0, 0, size, size]


def test_a_plan_writes_its_sizes_into_a_copy_of_the_file(run, tmp_path: Path) -> None:
    printed = run("plan", CLUSTER, "--rate", "2", "--write", "planned.yaml", "--max-workers", "6", *SMALL)
    assert printed.code == 0, printed.err
    study = Study.load(tmp_path / "capacity-plan" / "study.json")
    assert study.plan is not None
    assert study.plan.chosen is not None
    planned = config.load(tmp_path / "planned.yaml")
    assert sum(pool.size for pool in planned.pools) == study.plan.chosen.total
    assert study.plan.sentence.split(",")[0] in " ".join(printed.out.split())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("sweep", "--ratios", "0:3"), "'0:3' has 0 prefill workers, must have 1 to"),
        (("sweep", "--ratios", "all"), "--ratios all: needs --total"),
        (("sweep", "--workload", "chess"), "unknown workload 'chess'"),
        (("sweep", "--policies", "best"), "--policies: 'best' is not one of"),
        (("sweep", "--cost", "missing.json"), "missing.json"),
        (("sweep", "--cost", "llama@h100"), "unknown preset 'llama@h100'"),
        (("sweep", "--trace", "missing.csv"), "--trace: missing.csv cannot be read: No such file"),
        (("plan", "--rate", "2", "--workload", "chat,code"), "plan takes one workload at a time"),
        (("plan", "--rate", "2", "--write", "x.yaml"), "--write: needs a cluster file"),
        (("simulate", "--rate", "-1"), "--rate: is '-1', must be a finite number above 0"),
        (("simulate", "--rate", "1", "--ratio", "x"), "'x' is no ratio"),
        (("simulate", "missing.yaml", "--rate", "1"), "missing.yaml: cannot be read"),
        (("report", "nowhere"), "nowhere has no study.json"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(run, words: tuple[str, ...], complaint: str) -> None:
    printed = run(*words)
    assert printed.code in (1, 2)
    assert complaint in printed.err
    assert "Traceback" not in printed.err


def test_a_bad_trace_line_is_named_and_nothing_is_run(run, tmp_path: Path) -> None:
    good = {"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": []}
    (tmp_path / "bad.jsonl").write_text(json.dumps(good) + "\n" + json.dumps({**good, "output_length": "many"}) + "\n")
    printed = run("sweep", "--trace", "bad.jsonl", *SMALL)
    assert printed.code == 2
    assert "bad.jsonl:2: output_length is 'many', must be a whole number of tokens" in printed.err
    assert not (tmp_path / "capacity-sweep").exists()


def test_an_objective_that_nobody_can_meet_is_told_in_the_page(run, tmp_path: Path) -> None:
    printed = run("sweep", "--ratios", "1:1", "--slo-ttft-ms", "1", *SMALL)
    assert printed.code == 0
    assert "No configuration meets the objective at any rate" in printed.out
    assert "requests are good, with TTFT p90" in " ".join(printed.out.split())
