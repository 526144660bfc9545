"""Every query of the Grafana board and of the alert rules gets data from a run that was really scraped."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from metrics.promql import QueryError, Store, ask
from metrics.scraping import Run

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
BOARD = json.loads((DEPLOY / "grafana" / "baton.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text(encoding="utf-8"))
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [
    pytest.param(target["expr"], target["legendFormat"], id=f"{panel['title']}-{target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]


def as_grafana_asks(query: str) -> str:
    filled = query.replace("$__rate_interval", "5m").replace("$model", ".*").replace("$engine", ".*")
    assert "$" not in filled, f"a variable that the board does not have: {filled}"
    return filled


@pytest.fixture(scope="module")
def store(run: Run) -> Store:
    return run.store()


@pytest.mark.parametrize(("query", "legend"), QUERIES)
def test_a_query_of_the_board_returns_data(query: str, legend: str, store: Store, run: Run) -> None:
    samples = ask(store, as_grafana_asks(query), run.end_s)
    assert any(not math.isnan(sample.value) for sample in samples)
    for label in re.findall(r"{{(\w+)}}", legend):
        assert all(sample.labels.get(label) for sample in samples), label
    legends = [tuple(sample.labels.get(label) for label in re.findall(r"{{(\w+)}}", legend)) for sample in samples]
    assert len(set(legends)) == len(legends), "two lines of one panel have the same name"


@pytest.mark.parametrize(
    "variable", [v for v in BOARD["templating"]["list"] if v["type"] == "query"], ids=lambda v: v["name"]
)
def test_a_variable_of_the_board_has_choices(variable: dict[str, Any], store: Store, run: Run) -> None:
    match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
    assert match is not None
    samples = ask(store, as_grafana_asks(match[1]), run.end_s)
    assert {sample.labels[match[2]] for sample in samples}


def test_what_the_run_was_made_for_shows_on_the_board(store: Store, run: Run) -> None:
    for query in (
        'increase(baton_requests_total{outcome="invalid", face="grpc"}[5m])',
        'increase(baton_requests_total{outcome="overloaded", face="grpc"}[5m])',
        'increase(baton_requests_total{outcome="aborted", face="grpc"}[5m])',
        'sum(increase(baton_retries_total{kind="worker_lost"}[5m]))',
        "sum(increase(vllm:num_preemptions_total[5m]))",
        "sum(increase(baton_tokens_recomputed_total[5m]))",
        'sum(increase(vllm:request_success_total{finished_reason="abort"}[5m]))',
        "sum(increase(vllm:nixl_bytes_transferred_sum[5m]))",
        "sum(increase(baton_chunks_pulled_early_total[5m]))",
    ):
        [sample] = ask(store, query, run.end_s)
        assert sample.value > 0, query


def test_panels_have_places_of_their_own_on_a_grid_of_24() -> None:
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    for panel in BOARD["panels"]:
        assert 0 <= panel["gridPos"]["x"] <= 24 - panel["gridPos"]["w"]
    for one, other in itertools.combinations([panel["gridPos"] for panel in BOARD["panels"]], 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)


def test_panels_say_what_they_show_and_ask_the_chosen_data_source() -> None:
    for panel in PANELS:
        assert panel["description"], panel["title"]
        for asker in (panel, *panel["targets"]):
            assert asker["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


# --- rules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_asks_for_what_is_there(name: str, store: Store, run: Run) -> None:
    ask(store, ALERTS[name]["expr"], run.end_s)


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_tells_a_person_what_it_means_and_what_to_do(name: str) -> None:
    rule = ALERTS[name]
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    assert all(text.strip() for text in rule["annotations"].values())
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))


MODEL = {"model_name": "m", "engine": "router"}
ON_WORKER = {"model_name": "m", "engine": "decode-0"}
REQUESTS = "baton_requests_total"
TTFT = "vllm:time_to_first_token_seconds"

# For each alert, series of six minutes with which it fires. Cut to their first minute, all is well.
BREACHES: dict[str, list[tuple[str, dict[str, str], list[float]]]] = {
    "BatonRouterDown": [("up", {"job": "baton", "role": "router"}, [1, 1, 0])],
    "BatonRouterNotReady": [("baton_router_ready", MODEL, [1, 0]), ("baton_router_draining", MODEL, [0, 0])],
    "BatonWorkerDown": [("baton_worker_up", {**MODEL, "worker": "decode-0", "worker_role": "decode"}, [1, 0])],
    "BatonNoDecodeWorker": [("baton_workers", {**MODEL, "worker_role": "decode", "state": "ready"}, [2, 1, 0])],
    "BatonNoPrefillWorker": [("baton_workers", {**MODEL, "worker_role": "prefill", "state": "ready"}, [1, 0])],
    "BatonWorkerRestarting": [("baton_worker_restarts_total", {**MODEL, "worker": "decode-0"}, [0, 1, 2, 3])],
    "BatonQueueGrowing": [("baton_dispatch_queue_requests", MODEL, [0, 5, 20, 30])],
    "BatonRefusing": [
        (REQUESTS, {**MODEL, "outcome": "ok"}, [0, 10, 20]),
        (REQUESTS, {**MODEL, "outcome": "overloaded"}, [0, 0, 5]),
    ],
    "BatonInternalErrors": [
        (REQUESTS, {**MODEL, "outcome": "ok"}, [0, 10, 20]),
        (REQUESTS, {**MODEL, "outcome": "internal"}, [0, 0, 1]),
    ],
    "BatonTtftSloBurn": [
        (f"{TTFT}_bucket", {**MODEL, "le": "2.5"}, [0, 100, 160]),
        (f"{TTFT}_count", MODEL, [0, 100, 200]),
    ],
    "BatonKvNearlyFull": [
        ("vllm:kv_cache_usage_perc", ON_WORKER, [0.5, 0.97, 0.99]),
        ("vllm:num_preemptions_total", ON_WORKER, [0, 0, 4]),
    ],
    "BatonQuarantinedBlocksStuck": [("baton_blocks", {**ON_WORKER, "state": "quarantined"}, [7, 7, 7])],
    "BatonRetriesHigh": [
        (REQUESTS, {**MODEL, "outcome": "ok"}, [0, 10, 20]),
        ("baton_retries_total", {**MODEL, "kind": "worker_lost"}, [0, 0, 3]),
    ],
    "BatonLeasesExpiring": [("vllm:nixl_num_kv_expired_reqs_total", ON_WORKER, [0, 0, 1])],
    "BatonTransfersFailing": [("vllm:nixl_num_failed_transfers_total", ON_WORKER, [0, 2, 5])],
    "BatonLaneSlow": [("baton_lane_slow", {**ON_WORKER, "source": "prefill-0", "transport": "t"}, [0, 1])],
}
WELL = {"BatonQuarantinedBlocksStuck": [("baton_blocks", {**ON_WORKER, "state": "quarantined"}, [7, 0, 7])]}


def fires(name: str, series: list[tuple[str, dict[str, str], list[float]]]) -> bool:
    store = Store()
    for metric, labels, values in series:
        for minute, value in enumerate(values):
            counts = metric.endswith(("_total", "_bucket", "_count"))
            store.add(metric, labels, 60.0 * (minute + 1), value, counts)
    return bool(ask(store, ALERTS[name]["expr"], 60.0 * max(len(values) for _, _, values in series)))


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_fires_when_it_should_and_not_before(name: str) -> None:
    assert fires(name, BREACHES[name])
    healthy = WELL.get(
        name,
        [(metric, labels, values[:2] if len(values) > 2 else values[:1]) for metric, labels, values in BREACHES[name]],
    )
    assert not fires(name, healthy)


# --- the evaluator itself -------------------------------------------------------------------------------------------


def small_store() -> Store:
    store = Store()
    page = """# TYPE seen_total counter
seen_total{kind="a"} %d
seen_total{kind="b"} %d
# TYPE level gauge
level{kind="a"} %d
# TYPE took_seconds histogram
took_seconds_bucket{le="1.0"} %d
took_seconds_bucket{le="2.0"} %d
took_seconds_bucket{le="+Inf"} %d
took_seconds_sum 1
took_seconds_count 1
"""
    store.scrape(page % (0, 0, 3, 0, 0, 0), 60.0, job="j")
    store.scrape(page % (120, 60, 5, 5, 10, 10), 120.0, job="j")
    return store


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("sum(rate(seen_total[5m]))", 3.0),
        ('sum(increase(seen_total{kind!="b"}[5m]))', 120.0),
        ("sum(rate(seen_total[5m])) / 2 + 1 * 4", 5.5),
        ("histogram_quantile(0.75, sum by (le) (rate(took_seconds_bucket[5m])))", 1.5),
        ("max_over_time(level[5m]) - min_over_time(level[5m])", 2.0),
        ('rate(seen_total{kind=~"a|c"}[5m]) / on (kind) level', 0.4),
        ("level > 4", 5.0),
        ("absent(nothing)", 1.0),
        ('level and on (kind) seen_total{kind="a"}', 5.0),
    ],
)
def test_the_evaluator_agrees_with_a_calculation_by_hand(query: str, expected: float) -> None:
    [sample] = ask(small_store(), query, 120.0)
    assert sample.value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ("sum(rate(unseen_total[5m]))", "matches no series"),
        ('seen_total{kind="z"}', "matches no series"),
        ('seen_total{colour="a"}', "no seen_total has the label colour"),
        ("sum by (colour) (level)", "has the label colour"),
        ("rate(level[5m])", "is no counter"),
        ("deriv(seen_total[5m])", "is no gauge"),
        ("histogram_quantile(0.5, sum(rate(took_seconds_bucket[5m])))", "has no le"),
        ("level + on (job) seen_total", "matches many"),
        ("sum(level", "expected"),
        ("tangent(level)", "not known"),
    ],
)
def test_the_evaluator_complains_of_a_query_that_has_no_answer(query: str, complaint: str) -> None:
    with pytest.raises(QueryError, match=complaint):
        ask(small_store(), query, 120.0)
