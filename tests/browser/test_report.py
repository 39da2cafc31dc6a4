"""The report of an audit, opened by a browser as a person would."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from halfmq.spark_jobs.audit.auditor import Audit
from halfmq.spark_jobs.report import page as report_html
from tests.support import golden_store
from tests.support.browser import Page
from tests.support.reports import audit_of, chosen_by_others

WRITTEN = 1_700_000_000_000  # ms
PHONE, DESK, PAPER = 360, 1280, 690  # px; the last is A4 between its margins
PAPER_HIGH = 1_010  # px
ROWS = 60  # anomalies of the hostile report

# Each text in the page with its colour, and the colour of the nearest background below it.
COLOURS = """
(() => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    if (element.closest("title, desc, script, style")) continue;
    const style = getComputedStyle(element);
    let ground = element;
    while (ground && getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)")
      ground = ground.parentElement;
    found.push([element.tagName, element.closest("svg") ? style.fill : style.color,
                ground ? getComputedStyle(ground).backgroundColor : "rgb(255, 255, 255)"]);
  }
  return found;
})()
"""


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    """Of transactions that were decided twice, by Apache RocketMQ."""
    return audit_of(golden_store.unpack("tx-midway-killed", tmp_path_factory.mktemp("store")).root)


@pytest.fixture(scope="module")
def reports(audit: Audit, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    audits = {"real": audit, "hostile": chosen_by_others(audit, rows=ROWS)}
    for name, one in audits.items():
        report_html.write_page(one, folder / f"{name}.html", written_ms=WRITTEN)
    return {name: folder / f"{name}.html" for name in audits}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("name", ["real", "hostile"])
def test_it_is_quiet_fits_and_can_be_read(
    tab: Page, reports: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    """No complaint, no request but for itself, nothing beside the screen, texts that stand out."""
    tab.look(width=width, scheme=scheme)
    tab.open(reports[name])

    for opened in (False, True):
        tab.run(f"document.querySelectorAll('details').forEach((one) => one.open = {int(opened)})")
        assert tab.run("document.documentElement.scrollWidth") <= width
        for element, colour, ground in tab.run(COLOURS):
            assert contrast(colour, ground) >= 4.5, (element, colour, ground)
    assert tab.complaints == []
    assert set(tab.requests) <= {reports[name].as_uri(), "data:,"}
    assert tab.run("window.taken") is None
    is_dark = luminance(tab.run("getComputedStyle(document.body).backgroundColor")) < 0.1
    assert is_dark == (scheme == "dark")


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_texts_of_charts_stay_apart(tab: Page, reports: dict[str, Path], width: int) -> None:
    """No two texts of a chart cover each other, whatever the names are."""
    tab.look(width=width)
    tab.open(reports["hostile"])

    covered = tab.run("""
    [...document.querySelectorAll("svg.chart")].flatMap((chart) => {
      const boxes = [...chart.querySelectorAll("text")].filter((one) => one.checkVisibility())
        .map((one) => {
          const own = one.getBoundingClientRect();
          const cut = one.closest("svg:not(.chart)")?.width.baseVal.value ?? Infinity;
          const end = chart.getBoundingClientRect().left + cut;
          return [own.left, Math.min(own.right, end), own.top, own.bottom, one.textContent];
        });
      return boxes.flatMap((a, i) => boxes.slice(i + 1)
        .filter((b) => a[0] < b[1] && b[0] < a[1] && a[2] + 3 < b[3] && b[2] + 3 < a[3])
        .map((b) => [chart.querySelector("title").textContent, a[4], b[4]]));
    })
    """)
    assert covered == []


def test_every_link_reaches_its_row(tab: Page, reports: dict[str, Path], audit: Audit) -> None:
    """From the table to the kinds; a click brings the rows into view."""
    tab.look(width=PHONE)
    tab.open(reports["hostile"])

    links = tab.run("[...document.querySelectorAll('a[href]')].map((a) => a.getAttribute('href'))")
    assert all(link.startswith("#") for link in links)
    lost = tab.run("""
    [...document.querySelectorAll('a')].map((a) => a.getAttribute('href').slice(1))
      .filter((name) => document.querySelectorAll('[id="' + name + '"]').length !== 1)
    """)
    assert lost == []
    rows = tab.run("document.querySelectorAll('article').length")
    assert rows == len(audit.anomalies) + ROWS + 10
    tab.follow("#anomalies tr:last-child a")
    reached = tab.run("""
    (() => { const kind = document.querySelector('section.kind:target');
             const top = kind.getBoundingClientRect().top;
             return [kind === [...document.querySelectorAll('section.kind')].at(-1),
                     top >= 0 && top < innerHeight]; })()
    """)
    assert reached == [True, True]


def test_what_cannot_be_seen_is_said(tab: Page, reports: dict[str, Path], audit: Audit) -> None:
    """To those who have the page read to them: charts and tables."""
    tab.look(width=DESK)
    tab.open(reports["real"])
    tab.run("document.querySelectorAll('details').forEach((one) => one.open = true)")

    spoken: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for node in tab.ask("Accessibility.getFullAXTree")["nodes"]:
        texts = [str(node.get(what, {}).get("value", "")) for what in ("name", "description")]
        spoken[node.get("role", {}).get("value")].append((texts[0], texts[1]))
    described = [name for name, description in spoken["image"] + spoken["group"] if description]
    assert len(described) == tab.run("document.querySelectorAll('svg.chart').length") == 2
    assert all(described)
    for role in ("link", "heading", "table", "region"):
        assert spoken[role]
        assert all(name for name, _ in spoken[role]), role


@pytest.mark.parametrize("name", ["real", "hostile"])
def test_it_prints_without_cutting_a_chart(tab: Page, reports: dict[str, Path], name: str) -> None:
    """Black on white also from a dark screen; a chart fits a page and is kept on one."""
    tab.look(width=PAPER, height=PAPER_HIGH, scheme="dark", media="print")
    tab.open(reports[name])

    assert tab.run("document.documentElement.scrollWidth") <= PAPER
    ground = tab.run("getComputedStyle(document.body).backgroundColor")
    assert luminance(ground) > 0.9
    kept = tab.run("""
    [...document.querySelectorAll("figure")].map((one) =>
      [one.getBoundingClientRect().height, getComputedStyle(one).breakInside])
    """)
    assert all(high < PAPER_HIGH and inside == "avoid" for high, inside in kept)
    assert tab.run("[...document.querySelectorAll('pre')].every((one) => one.checkVisibility())")
    printed = tab.pdf()
    assert printed.startswith(b"%PDF-")
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) >= 2


def test_a_policy_stops_what_escaping_would_miss(
    tab: Page, reports: dict[str, Path], tmp_path: Path
) -> None:
    """Were a name written into the page as it is, its script would not run nor its picture load."""
    planted = "<script>window.taken = 1</script><img src='http://127.0.0.1:9' onerror='taken = 2'>"
    text = reports["real"].read_text().replace("<main>", f"<main>{planted}")
    (tmp_path / "planted.html").write_text(text)

    tab.open(tmp_path / "planted.html")

    assert tab.run("window.taken") is None
    assert len(tab.complaints) >= 2


def luminance(colour: str) -> float:
    """As WCAG 2 defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
