"""The page says what ran and what was found, and needs nothing beside itself; a study survives its file."""

from __future__ import annotations

import asyncio
import csv
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import queue_cluster

from baton.capacity import report
from baton.capacity.grid import Model, Shape, configurations, knobs_of, parse_ratios
from baton.capacity.journal import Journal
from baton.capacity.outcome import RoleChange, Slo
from baton.capacity.record import to_plain
from baton.capacity.steady import Share
from baton.capacity.study import Capacity, Choice, Drift, Objective, Plan, Provenance, Study, StudyError
from baton.capacity.sweep import Backend, Experiment, Laboratory, compare, sweep
from baton.capacity.traffic import Traffic
from baton.proto.messages import Role
from baton.proto.settings import EngineSettings
from baton.router import config

SLO = Slo(ttft_s=0.5, tpot_s=0.02)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    model = Model.of(EngineSettings(model="demo"))
    compared = configurations(config.defaults(), model, parse_ratios("1:1,1:2"), knobs_of((), (), ("early",)))
    experiment = Experiment(compared, (Traffic("fixed:100/11", 1.0, 150),), Objective(SLO), repeats=1)
    with ThreadPoolExecutor(1) as threads:
        laboratory = Laboratory(
            Backend("queue", queue_cluster.measure, threads),
            Journal(tmp_path_factory.mktemp("study") / "points.jsonl"),
        )
        workloads, rows = asyncio.run(sweep(experiment, laboratory))
    share = Share(0.95, 0.9, 0.99)
    choice = Choice(Shape(1, 2), share, Capacity(9.0, 8.5, 9.5), 3, 4)
    provenance = Provenance(
        command="baton capacity sweep <cluster.yaml>",
        started="2026-01-02 03:04 UTC",
        took_s=12.0,
        backend="simulate",
        version="0.1.0",
        python="3.11",
        machine="a machine",
        cores=2,
        cost_model="cost.json: measured",
        seeds=(0,),
        num_requests=150,
        scale_lengths=1.0,
        model="demo",
        notes=("Two cores were shared",),
    )
    plan = Plan(
        "fixed:100/11",
        9.0,
        choice,
        None,
        choice,
        Shape(1, 2),
        0.4,
        (Drift(1.25, 1.0, None, share, Shape(2, 2)),),
        "Take it.",
    )
    return Study(provenance, Objective(SLO), workloads, rows, compare(rows, rows), plan)


@pytest.fixture(scope="module")
def written(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page; the rest lies beside it."""
    return report.write(study, tmp_path_factory.mktemp("report"))


class Page(HTMLParser):
    """What a browser would fetch, and what it would show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [
            value or "" for name, value in attrs if name in ("src", "href") and not (value or "").startswith("#")
        ]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_tells_what_ran_and_what_was_found(written: Path) -> None:
    page = Page(written.read_text(encoding="utf-8"))
    for said in (
        "baton capacity sweep <cluster.yaml>",
        "2026-01-02 03:04 UTC",
        "cost.json: measured",
        "a machine, 2 cores",
        "Two cores were shared",
        "Take it.",
        "at least 90% of requests have TTFT <= 500 ms and TPOT <= 20 ms",
        "1:2, early",
        "3 co-located",
        "STABLE",
        "bottleneck",
    ):
        assert said in page.text


def test_the_page_needs_nothing_beside_itself(written: Path) -> None:
    page = Page(written.read_text(encoding="utf-8"))
    assert page.fetched == []
    assert page.tags.count("svg") == len(list(written.parent.glob("*.png"))) >= 6
    assert "script" not in page.tags


def test_every_row_of_the_table_has_all_its_columns(study: Study, written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    start = text.index('<div class="wide"><table>')
    table = text[start : text.index("</table>", start)]
    head, second, *rows = table.split("<tr")[1:]
    columns = head.count('rowspan="2"') + second.count("<th")
    assert len(rows) == len(study.rows)
    assert {row.count("<td") for row in rows} == {columns}


def test_changes_of_role_are_told_with_their_times(study: Study) -> None:
    assert "Changes of role" not in report.html(study, [])
    row = study.rows[0]
    level = row.levels[0]
    change = RoleChange("decode-0", Role.DECODE, Role.PREFILL, at_s=0.0, drain_s=0.125, total_s=0.375)
    level = replace(level, runs=(replace(level.runs[0], role_changes=(change,)),))
    row = replace(row, levels=(level, *row.levels[1:]))
    page = Page(report.html(replace(study, rows=(row, *study.rows[1:])), []))
    assert f"{row.label}decode-0decodeprefill0.1250.375" in page.text


def test_the_tables_are_there_as_csv(study: Study, written: Path) -> None:
    with (written.parent / "levels.csv").open(encoding="utf-8") as file:
        levels = list(csv.DictReader(file))
    assert len(levels) == sum(len(level.runs) for row in study.rows for level in row.levels)
    assert {row["configuration"] for row in levels} == {row.label for row in study.rows}
    with (written.parent / "configurations.csv").open(encoding="utf-8") as file:
        assert [row["configuration"] for row in csv.DictReader(file)] == [row.label for row in study.rows]


def test_a_study_is_the_same_after_its_file(study: Study, tmp_path: Path) -> None:
    study.save(tmp_path / "study.json")
    assert to_plain(Study.load(tmp_path / "study.json")) == to_plain(study)


def test_a_study_from_before_cores_could_be_shared_is_still_read(study: Study, tmp_path: Path) -> None:
    study.save(tmp_path / "study.json")
    older = (tmp_path / "study.json").read_text().replace(',"shared_cores":null', "")
    assert "shared_cores" not in older
    (tmp_path / "older.json").write_text(older)
    assert to_plain(Study.load(tmp_path / "older.json")) == to_plain(study)
    json.loads((tmp_path / "study.json").read_text(), parse_constant=lambda word: pytest.fail(word))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "baton-capacity-study", "version": 1}', "\x00"])
def test_a_file_that_is_no_study_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(StudyError, match=r"study\.json: is no capacity study"):
        Study.load(path)
