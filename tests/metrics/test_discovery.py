"""Prometheus learns of every endpoint, from a list or from a file, and of nothing that is gone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import yaml
from asking import until
from metrics.scraping import get, targets
from paper_model import PaperRunner
from small_cluster import SmallCluster

from baton.proto.messages import Role
from baton.proto.settings import ObservabilitySettings
from baton.router.config import ConfigError, from_mapping
from baton.router.discovery import TargetsFile, group, reachable
from baton.router.metrics import Target

PROMETHEUS = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "prometheus.yml"


def names(groups: list[dict]) -> list[str]:
    return [each["labels"]["worker_id"] for each in groups]


def read(file: Path) -> list[dict]:
    """What a Prometheus reads at this moment; it must never meet half a file."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


async def test_the_file_is_as_the_list_and_follows_workers_that_come_and_go(paper_dir, tmp_path) -> None:
    file = tmp_path / "prometheus" / "targets.json"
    settings = ObservabilitySettings(targets_file=str(file))
    async with SmallCluster(paper_dir, PaperRunner, observability=settings) as cluster:
        await until(lambda: names(read(file)) == ["router", "prefill-0", "decode-0"], what="the first list")
        assert read(file) == await targets(cluster)
        for each in read(file):
            assert "process_open_fds" in (await get(each["targets"][0], "/metrics")).text
        await cluster.add(Role.DECODE, "decode-1")
        await until(lambda: "decode-1" in names(read(file)), what="a worker that came")
        await cluster.remove("decode-0")
        await until(lambda: names(read(file)) == ["router", "prefill-0", "decode-1"], what="a worker that went")
    assert read(file) == []
    assert [path.name for path in file.parent.iterdir()] == [file.name]


async def test_a_change_of_role_is_another_life_at_the_same_address(paper_dir, tmp_path) -> None:
    file = tmp_path / "targets.json"
    settings = ObservabilitySettings(targets_file=str(file))
    async with SmallCluster(paper_dir, PaperRunner, decode=2, observability=settings) as cluster:
        await until(lambda: len(read(file)) == 4, what="the first list")
        before = next(each for each in read(file) if each["labels"]["worker_id"] == "decode-1")
        await cluster.set_role("decode-1", Role.PREFILL, 5.0, False)

        def now() -> dict:
            return next(each for each in read(file) if each["labels"]["worker_id"] == "decode-1")

        await until(lambda: now()["labels"]["role"] == "prefill", what="the role")
        assert now()["targets"] == before["targets"]
        assert now()["labels"]["pool"] == before["labels"]["pool"]
        assert now()["labels"]["__meta_baton_incarnation"] != before["labels"]["__meta_baton_incarnation"]


async def test_a_file_that_cannot_be_written_is_told_once_and_written_when_it_can_be(tmp_path, caplog) -> None:
    file, found = tmp_path / "folder" / "targets.json", [Target("10.0.0.1:1", "decode", "d", "d-0", "x")]
    file.parent.write_text("in the way")
    keeper = TargetsFile(file, lambda: list(found))
    for _ in range(3):
        await keeper._write(found)
    assert len([record for record in caplog.records if "cannot be written" in record.message]) == 1
    file.parent.unlink()
    keeper.open()
    await until(lambda: names(read(file)) == ["d-0"], what="the file")
    await keeper.close()
    assert read(file) == []


async def test_a_reader_never_meets_half_a_file(tmp_path) -> None:
    file = tmp_path / "targets.json"
    many = [Target(f"10.0.0.1:{port}", "decode", "d", f"d-{port}", "x") for port in range(1000)]
    keeper = TargetsFile(file, list)
    writing = asyncio.create_task(_rewrite(keeper, many))
    lengths = set()
    while not writing.done():
        lengths.add(len(await asyncio.to_thread(read, file)))
    assert lengths <= {0, 1, 1000}
    assert 1000 in lengths


async def _rewrite(keeper: TargetsFile, many: list[Target]) -> None:
    for _ in range(20):
        await keeper._write(many)
        await keeper._write(many[:1])


@pytest.mark.parametrize(
    ("address", "host"), [("10.0.0.7:80", "10.0.0.7"), ("[fd00::7]:80", "fd00::7"), ("baton.local:80", "baton.local")]
)
def test_a_target_names_its_host(address: str, host: str) -> None:
    assert group(Target(address, "decode", "d", "d-0", "x"))["labels"]["host"] == host


def test_only_routers_are_asked_by_tls() -> None:
    router, worker = Target("10.0.0.1:1", "router", "", "router", "x"), Target("10.0.0.1:2", "decode", "d", "d-0", "y")
    assert group(router, by_tls=True)["labels"]["__scheme__"] == "https"
    assert [each for each in (group(router), group(worker, by_tls=True)) if "__scheme__" in each["labels"]] == []


def test_a_router_that_listens_everywhere_is_reached_by_loopback() -> None:
    listening = ["0.0.0.0:8000", "[::]:8000", "10.0.0.7:8000", "[fd00::7]:8000"]
    assert list(map(reachable, listening)) == ["127.0.0.1:8000", "[::1]:8000", "10.0.0.7:8000", "[fd00::7]:8000"]


@pytest.mark.parametrize("name", ["log_dir", "targets_file"])
def test_a_relative_path_is_refused(name: str) -> None:
    pools = {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}}
    section = {"pools": pools, "observability": {name: "here"}}
    with pytest.raises(ConfigError, match=f"metadata.baton.observability.{name}.*'here'.*absolute"):
        from_mapping({"metadata": {"baton": section}})


def test_the_configuration_for_prometheus_asks_where_the_router_answers_and_relabels_what_it_says() -> None:
    jobs = {job["job_name"]: job for job in yaml.safe_load(PROMETHEUS.read_text(encoding="utf-8"))["scrape_configs"]}
    (asked,) = jobs["baton"]["http_sd_configs"]
    assert asked["url"] == "http://127.0.0.1:8000/metrics/targets"
    told = group(Target("10.0.0.1:1", "decode", "d", "d-0", "x"))["labels"]
    assert {label for rule in jobs["baton"]["relabel_configs"] for label in rule["source_labels"]} <= set(told)
    assert jobs["ray"]["file_sd_configs"] == [{"files": ["/tmp/ray/prom_metrics_service_discovery.json"]}]
