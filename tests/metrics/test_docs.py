"""docs/metrics.md lists what is exported, no more and no less, under its real names, types and labels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from metrics.scraping import Page, Run

DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `([\w:]+)` \| (counter|gauge|histogram) \| ([`\w ]*) \| (.+) \|$", re.MULTILINE)
SECTIONS = {
    "router": ["The router's"],
    "decode-0": ["Each worker's", "A decode worker's"],
    "prefill-0": ["Each worker's"],
}


def documented(names: list[str]) -> dict[str, tuple]:
    """Name -> type, labels and meaning, of some sections and of the one that is for all."""
    sections = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
    rows = ROW.findall("".join(sections[name] for name in [*names, "Both"]))
    return {name: (kind, frozenset(re.findall(r"\w+", labels)), meaning) for name, kind, labels, meaning in rows}


def exported(page: Page) -> dict[str, tuple]:
    found = {}
    for family in page.families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels}
        found[name] = (family.type, frozenset(labels - {"model_name", "engine", "le"}), family.documentation)
    return found


@pytest.mark.parametrize("who", SECTIONS)
def test_the_docs_list_exactly_what_is_exported(who: str, run: Run) -> None:
    assert documented(SECTIONS[who]) == exported(run.scrapes[1][who])


@pytest.mark.parametrize("who", SECTIONS)
def test_all_but_the_process_figures_name_model_and_engine(who: str, run: Run) -> None:
    for family in run.scrapes[1][who].families:
        for sample in family.samples:
            if not family.name.startswith("process_"):
                assert (sample.labels["model_name"], sample.labels["engine"]) == ("paper", who)
