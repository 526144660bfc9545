"""The status page in a real browser: what a person sees of a cluster that works, fails, restarts and is attacked.

Run by `make test-browser`, which needs Chromium; the file's name keeps it out of `make test`, which needs nothing.
With BATON_PICTURES set to a directory, each look is kept there as a PNG.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path

import pytest
from asking import answer, request
from chromium import Page, browsing
from fake_router import Wire
from paper_model import PaperRunner, write_paper_tokenizer
from small_cluster import SmallCluster

from baton.router.ledger import Timeline
from baton.router.observe import Call, Face, OutputRecord, RequestRecord

STAGES = ("retry", *(field.name for field in fields(Timeline) if field.name not in ("retry", "total")))
LOOKS = [(width, scheme) for width in (1600, 1280, 820, 380) for scheme in ("light", "dark")]
ATTACK = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


@pytest.fixture(scope="module")
def paper_dir(tmp_path_factory):
    return write_paper_tokenizer(tmp_path_factory.mktemp("paper"))


@pytest.fixture
async def cluster(paper_dir) -> AsyncIterator[SmallCluster]:
    async with small_cluster(paper_dir) as small:
        yield small


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with browsing() as page:
        await page.look(1600)
        yield page


def small_cluster(paper_dir: Path) -> SmallCluster:
    return SmallCluster(paper_dir, lambda: PaperRunner(seconds_per_token=0.0002, step_s=0.005), prefill=1, decode=2)


@asynccontextmanager
async def load(cluster: SmallCluster, num_clients: int = 4) -> AsyncIterator[None]:
    """Clients that ask one request after another for as long as the block runs."""

    async def ask(client: int) -> None:
        number = 0
        while True:
            number += 1
            prompt = [(client * 7 + number * 13 + place) % 290 for place in range(50 + 40 * (number % 8))]
            await answer(cluster.inference, request(prompt, 10 + 5 * client, request_id=f"client-{client}-{number}"))

    tasks = [asyncio.create_task(ask(client)) for client in range(num_clients)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, asyncio.CancelledError), error


async def watch(page: Page, address: str) -> None:
    await page.open(f"http://{address}/cluster")
    await page.until("document.body?.dataset.link === 'live'")


def figure(name: str) -> str:
    """The JavaScript that reads one of the router's figures."""
    find = (
        f"[...document.querySelectorAll('#figures > div')].find(figure => figure.firstChild.textContent === '{name}')"
    )
    return f"Number({find}.querySelector('b').textContent.replaceAll(',', ''))"


async def test_it_shows_each_worker_with_its_state_and_its_cache(cluster: SmallCluster, page: Page) -> None:
    await watch(page, cluster.http_address)
    rows = await page.value("[...document.querySelectorAll('#workers tbody tr')].map(row => row.innerText)")
    assert [row.split()[0] for row in rows] == ["prefill", "prefill-0", "decode", "decode-0", "decode-1"]
    assert "2/2 ready" in rows[2]
    incarnations = {seat.worker_id: seat.description.incarnation[:8] for seat in cluster.members()}
    for row in (rows[1], rows[3], rows[4]):
        assert incarnations[row.split()[0]] in row
        assert "ready" in row
        assert "of 256 blocks" in row
    labels = await page.value("[...document.querySelectorAll('#workers [role=img]')].map(bar => bar.ariaLabel)")
    assert len(labels) == 10
    assert all(label.startswith(("KV cache: ", "Queued prompt tokens: ")) for label in labels)
    assert page.complaints == []


async def test_figures_change_while_requests_run(cluster: SmallCluster, page: Page) -> None:
    await watch(page, cluster.http_address)
    first_row = await page.value("window.kept = document.querySelector('#workers tbody tr'), kept.innerText")
    async with load(cluster):
        await page.until(f"{figure('Requests')} > 5")
        await page.until(f"{figure('Running')} > 0")
        await page.until(f"{figure('Output')} > 0")
        count = await page.value(figure("Requests"))
        await page.until(f"{figure('Requests')} > {count}")
        await page.until(f"kept.innerText !== {first_row!r}")
        assert await page.value("kept === document.querySelector('#workers tbody tr')"), "the row was made anew"
        await page.until("/held [1-9]/.test(document.querySelector('#workers').innerText)")
    assert page.complaints == []


async def test_a_finished_request_is_a_bar_of_its_stages(cluster: SmallCluster, page: Page) -> None:
    await watch(page, cluster.http_address)
    assert "none has ended yet" in await page.value("document.querySelector('#recent-note').innerText")
    done = await answer(cluster.inference, request(range(200), 30, request_id="the-one"))
    await page.until("document.querySelectorAll('#recent tbody tr').length === 1")
    assert "the-one" in await page.value("document.querySelector('#recent tbody tr').innerText")
    bar = "document.querySelector('#recent tbody .bar')"
    kinds = await page.value(f"[...{bar}.children].map(segment => segment.className)")
    timeline = done.finish.timeline
    assert kinds == [name for name in STAGES if getattr(timeline, name) > 0]
    assert "prefill_compute" in kinds
    label = await page.value(f"{bar}.ariaLabel")
    assert "prefill compute" in label
    assert " ms" in label
    filled = await page.value(f"[...{bar}.children].reduce((sum, s) => sum + s.getBoundingClientRect().width, 0)")
    width = await page.value(f"{bar}.getBoundingClientRect().width")
    assert filled == pytest.approx(width, abs=len(kinds) + 1)
    for name in kinds:
        share = await page.value(f"{bar}.querySelector('.{name}').getBoundingClientRect().width") / width
        assert share == pytest.approx(getattr(timeline, name) / timeline.total, abs=0.06), name
    await page.value("document.querySelector('[name=scale][value=share]').click()")
    cell = await page.value(f"{bar}.parentElement.clientWidth")
    assert await page.value(f"{bar}.getBoundingClientRect().width") == pytest.approx(cell, abs=12)
    await page.value("document.querySelector('#recent tbody tr').focus()")
    detail = await page.value("document.querySelector('#detail').innerText")
    assert "the-one" in detail
    assert "200 prompt tokens, 0 of them cached" in detail
    assert "tokens handed over by local" in detail
    assert page.complaints == []


async def test_a_lost_router_is_told_and_its_successor_is_found(paper_dir: Path, page: Page) -> None:
    async with small_cluster(paper_dir) as first:
        wire = Wire(_port(first))
        await wire.mend()
        await watch(page, wire.target)
        await answer(first.inference, request(range(20), 3))
        await page.until("document.querySelectorAll('#recent tbody tr').length === 1")
        await wire.cut()
    await page.until("document.body.dataset.link === 'lost'")
    assert "connection lost" in await page.value("document.querySelector('#link').innerText")
    await _keep(page, "lost")
    async with small_cluster(paper_dir) as second:
        again = Wire(_port(second))
        again.port = wire.port
        await again.mend()
        await page.until("document.body.dataset.link === 'live'", timeout_s=30.0)
        assert second.router.incarnation[:8] in await page.value("document.querySelector('#router-note').innerText")
        assert await page.value("document.querySelectorAll('#recent tbody tr').length") == 0
        await answer(second.inference, request(range(20), 3))
        await page.until("document.querySelectorAll('#recent tbody tr').length === 1")
        await again.cut()
    assert [complaint for complaint in page.complaints if "net::ERR" not in complaint] == []


async def test_what_clients_and_workers_say_is_never_markup(cluster: SmallCluster, page: Page) -> None:
    record = _record(ATTACK)
    cluster.router.recent.ended(record)
    seat = cluster.seats["decode-0"]
    cluster.router.config = replace(cluster.router.config, model=ATTACK)
    seat.link.description = replace(seat.description, incarnation="<b>x</b>")
    await watch(page, cluster.http_address)
    await page.until("document.querySelectorAll('#recent tbody tr').length === 1")
    await page.value("document.querySelector('#recent tbody tr').focus()")
    assert ATTACK in await page.value("document.querySelector('#detail').textContent")
    assert ATTACK in await page.value("document.querySelector('#recent tbody').textContent")
    assert await page.value("document.querySelector('#model').textContent") == ATTACK
    assert await page.value("document.querySelectorAll('img, b b, body script').length") == 0
    assert await page.value("window.hacked ?? null") is None
    assert page.complaints == []


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
async def test_it_fits_and_can_be_read(cluster: SmallCluster, page: Page, width: int, scheme: str) -> None:
    cluster.router.recent.ended(_record("a-very-long-request-id-" * 8))
    await page.look(width, scheme=scheme)
    async with load(cluster):
        await watch(page, cluster.http_address)
        await page.until("document.querySelectorAll('#recent tbody tr').length > 8")
        await _keep(page, f"{width}-{scheme}")
        assert await page.value("document.documentElement.scrollWidth") <= width
        past = "[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
        assert await page.value(f"{past}.map(e => e.outerHTML.slice(0, 80))") == []
        colours = await page.value(_COLOURS)
    for text, ground in colours:
        assert _contrast(text, ground) >= 4.5, (text, ground)
    assert page.complaints == []


# Colours of texts, each with the nearest opaque ground behind it.
_COLOURS = """[...document.querySelectorAll('main *, header *')].filter(e => e.checkVisibility() &&
    [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())).map(e => {
  let ground = e;
  const clear = () => getComputedStyle(ground).backgroundColor.endsWith(', 0)');
  while (ground.parentElement && clear()) ground = ground.parentElement;
  return [getComputedStyle(e).color, getComputedStyle(ground).backgroundColor];
}).filter(([, ground]) => ground.startsWith('rgb('))"""


def _contrast(first: str, second: str) -> float:
    """Of two CSS colours, by WCAG's formula."""

    def luminance(colour: str) -> float:
        channels = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, bright = sorted((luminance(first), luminance(second)))
    return (bright + 0.05) / (dark + 0.05)


def _record(text: str) -> RequestRecord:
    """A failed request that says `text` wherever it can."""
    timeline = Timeline(0.01, 0.02, 0.3, 0.01, 0.02, 0.01, 0.5, 0.1, 0.97)
    output = OutputRecord(
        index=0,
        finish="internal",
        message=text,
        completion_tokens=4,
        cached_tokens=8,
        transferred_tokens=16,
        recomputed_tokens=3,
        retries=1,
        prefill_worker=text,
        decode_worker=text,
        connector=text,
        timeline=timeline,
    )
    return RequestRecord(
        request_id=text,
        call=Call(Face.HTTP),
        traceparent="",
        arrived_unix_s=0.0,
        duration_s=0.97,
        ttft_s=0.4,
        prompt_tokens=20,
        max_tokens=4,
        temperature=0.0,
        top_p=1.0,
        outputs=(output,),
        trouble="internal",
    )


async def _keep(page: Page, name: str) -> None:
    directory = os.environ.get("BATON_PICTURES")
    if directory:
        (Path(directory) / f"{name}.png").write_bytes(await page.picture())


def _port(cluster: SmallCluster) -> int:
    return int(cluster.http_address.rpartition(":")[2])
