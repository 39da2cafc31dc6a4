"""The HTML report as a text; what a browser makes of it is in `tests/browser`."""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from itertools import product
from pathlib import Path

import pytest

from halfmq.spark_jobs.audit.auditor import Anomaly, Audit
from halfmq.spark_jobs.audit.rules.model import AuditedState, Kind
from halfmq.spark_jobs.report.anomalies import shown_kinds
from halfmq.spark_jobs.report.kinds import KINDS
from halfmq.spark_jobs.report.page import ROWS_MAX, page
from halfmq.spark_jobs.report.text import isolated, visible
from halfmq.spark_jobs.times import duration
from tests.support import golden_store
from tests.support.documents import ROOT
from tests.support.reports import HOSTILE, LONG, audit_of, chosen_by_others

TEXTS = ("text", "muted", "link", "good", "bad")  # colours that texts have
MARKS = ("committed", "rolled-back", "parked", "pending", "bad")  # and parts of charts
GROUNDS = ("paper", "panel")
WRITTEN = 1_700_000_000_000  # ms
VOID = {"meta", "link", "input"}
SIZE_MAX = 2_000_000  # bytes of a report, whatever the log is


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    return audit_of(golden_store.unpack("tx-midway-killed", tmp_path_factory.mktemp("store")).root)


class Reader(HTMLParser):
    """Checks that elements nest, and keeps what there is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_what_others_chose_is_text_and_nothing_else(audit: Audit) -> None:
    """Names bring no element, no attribute, nothing invisible, and no endless line."""
    plain = Reader(page(audit, written_ms=WRITTEN))
    text = page(chosen_by_others(audit, rows=50), written_ms=WRITTEN)
    hostile = Reader(text)

    assert set(hostile.seen) <= {*plain.seen, "bdi"}
    assert not hostile.seen["script"]
    assert {name for name, _ in hostile.attributes} <= {name for name, _ in plain.attributes}
    assert not re.search("[^\\n -~\\u00a0-\\uffff]|[\\u200b\\u202a-\\u202e\\u2066-\\u2069]", text)
    assert "&lt;script&gt;window.taken = 1&lt;/script&gt;" in text
    longest = max(len(word) for part in hostile.texts for word in part.split() if "{" not in part)
    assert longest < 2_500
    assert LONG not in text
    assert "(10,000 characters)" in text


def test_nothing_is_fetched_and_no_script_is_needed(audit: Audit) -> None:
    """Every address leads into the page itself."""
    found = Reader(page(audit, written_ms=WRITTEN))

    addresses = {value for name, value in found.attributes if name in {"href", "src", "action"}}
    assert all(address.startswith("#") for address in addresses - {"data:,"})
    assert not {name for name, _ in found.attributes if name.startswith("on") or name == "style"}
    assert found.seen["article"] == len(audit.anomalies)
    assert found.seen["svg"] == 2


def test_a_row_shows_who_where_and_the_bytes(audit: Audit) -> None:
    """Id, offsets, what is wrong, and what stands there in hexadecimal."""
    text = page(audit, written_ms=WRITTEN)

    for anomaly in audit.anomalies:
        assert anomaly.transaction_id
        assert anomaly.transaction_id in text
        assert ", ".join(map(str, anomaly.offsets)) in text
        for place in anomaly.places:
            content = Path(place.file).read_bytes()[place.position :][: place.size]
            assert f"   0  {content[:8].hex(' ')}  " in text
            assert f"  78  {content[120:128].hex(' ')}  " in text
            assert f"… {place.size - 128:,} more bytes" in text


def test_what_became_of_transactions_is_said(audit: Audit) -> None:
    """In numbers, in a chart with a description, and in a table."""
    text = page(audit, written_ms=WRITTEN)

    assert f"<dt>committed</dt><dd>{audit.states[AuditedState.COMMITTED]}</dd>" in text
    assert f"{audit.states[AuditedState.COMMITTED]} committed" in text
    charts = re.findall(r'<svg [^>]*class="chart.*?<desc id="[\w-]+">(.+?)</desc>', text)
    assert len(charts) == text.count("<svg ") == 2
    assert text.count("<caption>") >= 4


def test_every_kind_is_explained() -> None:
    """In the report and in the documentation alike: a reader need not look into the code."""
    documented = (ROOT / "docs/audit.md").read_text()

    assert set(KINDS) == set(Kind)
    assert all(text.endswith(".") for one in KINDS.values() for text in one)
    for kind, one in KINDS.items():
        assert f"| `{kind}` | {one.meaning} | {one.remedy} |" in documented


def test_a_flood_of_one_kind_does_not_hide_another(audit: Audit) -> None:
    """Each kind has its own rows; those left out are counted, by kind and in all."""
    like = audit.anomalies[0]
    flood = [Anomaly(str(Kind.CRC), None, [at], "flood", []) for at in range(70_000)]
    rare = [like._replace(kind=str(Kind.OVERLAP)), like._replace(kind=str(Kind.COMMITTED_TWICE))]
    counts = {str(Kind.CRC): 5_000_000, str(Kind.OVERLAP): 1, str(Kind.COMMITTED_TWICE): 1}

    shown = shown_kinds([*flood, *rare], counts, ROWS_MAX)
    many = replace(audit, anomalies=[*flood, *rare], anomaly_kinds=Counter(counts))
    text = page(many, written_ms=WRITTEN, details=Path("/audits/today"))

    assert {kind.kind: len(kind.rows) for kind in shown} == {
        Kind.CRC: ROWS_MAX,
        Kind.OVERLAP: 1,
        Kind.COMMITTED_TWICE: 1,
    }
    numbers = [number for kind in shown for number, _ in kind.rows]
    assert numbers == list(range(1, ROWS_MAX + 3))
    assert text.count("<article") == ROWS_MAX + 2
    assert f"And {5_000_000 - ROWS_MAX:,} more of this kind" in text
    assert f"{ROWS_MAX + 2} of 5,000,002 are shown here" in text
    assert "/audits/today/anomalies" in text
    assert "--output DIR" in page(many, written_ms=WRITTEN)


def test_the_size_is_bounded(audit: Audit) -> None:
    """By the number of rows, of names and of their characters."""
    worst = chosen_by_others(audit, rows=5_000)
    delays = [one._replace(producer_group=LONG * 2, topic=LONG) for one in worst.delays * 300]

    assert len(page(replace(worst, delays=delays), written_ms=WRITTEN).encode()) < SIZE_MAX


def test_a_clean_log_is_said_to_be_clean(audit: Audit) -> None:
    """And a log without a single transaction has a report too."""
    clean = replace(audit, anomalies=[], anomaly_kinds=Counter())
    empty = replace(
        clean,
        states=Counter(),
        delays=[],
        timeline=audit.timeline._replace(
            prepared={state: [0] for state in audit.timeline.prepared}, decided=[0]
        ),
        open_ages=audit.open_ages._replace(
            counts={state: [0] * 7 for state in audit.open_ages.counts}
        ),
    )

    assert "Clean: no anomaly was found." in page(clean, written_ms=WRITTEN)
    assert Reader(page(empty, written_ms=WRITTEN)).seen["svg"] == 0


def test_bytes_that_are_gone_do_not_stop_a_report(audit: Audit) -> None:
    """A broker deletes old segments while an audit runs."""
    gone = [place._replace(file="/no/such/file") for place in audit.anomalies[0].places]
    anomalies = [audit.anomalies[0]._replace(places=gone)]

    assert "No such file or directory" in page(
        replace(audit, anomalies=anomalies), written_ms=WRITTEN
    )


def test_imports_stay_quiet_after_a_report(audit: Audit) -> None:
    """The chart library leaves no import hook that Python warns about."""
    page(audit, written_ms=WRITTEN)

    assert all(hasattr(finder, "find_spec") for finder in sys.meta_path)


def test_the_picture_in_the_documentation_is_there_and_small() -> None:
    """What the page links to exists, and loads quickly."""
    (link,) = set(re.findall(r"\((images/[\w-]+\.png)\)", (ROOT / "docs/audit.md").read_text()))
    picture = ROOT / "docs" / link
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 300_000


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_stand_out(scheme: int) -> None:
    """Texts by 4.5, parts of charts by 3, on everything they stand on."""
    style = resources.files("halfmq.spark_jobs.report").joinpath("templates/report.css").read_text()
    palette = dict(
        re.findall(r"--([a-z-]+):(#\w{6})", re.findall(r":root\{[^}]+\}", style)[scheme])
    )
    for name, ground in product(TEXTS, GROUNDS):
        assert contrast(palette[name], palette[ground]) >= 4.5, (name, ground)
    for name in MARKS:
        assert contrast(palette[name], palette["paper"]) >= 3, name


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [part / 255 for part in bytes.fromhex(colour[1:])]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(
    ("ms", "said"),
    [(0, "0 ms"), (999, "999 ms"), (1_500, "1.5 s"), (90_000, "1.5 min"), (86_400_000, "1 d")],
)
def test_durations_have_a_fitting_unit(ms: int, said: str) -> None:
    """As a person would say them."""
    assert duration(ms) == said


def test_a_text_shows_all_that_is_in_it() -> None:
    """Whatever a terminal or a browser would act upon becomes an escape; letters stay."""
    assert visible("a\x00\x1b\n\u202e\u200b\ud800") == r"a\x00\x1b\n\u202e\u200b\ud800"
    assert visible(HOSTILE[6]) == HOSTILE[6]
    assert visible("e" + "\u0301" * 5) == "e" + "\u0301" * 3 + r"\u0301\u0301"
    assert isolated("<a href='x'>&\"") == "<bdi>&lt;a href=&#39;x&#39;&gt;&amp;&#34;</bdi>"
    assert visible(LONG).endswith("-the-end-of-the-name (10,000 characters)")
