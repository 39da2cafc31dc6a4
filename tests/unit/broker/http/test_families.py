"""The metrics that the broker exposes: their documentation and their bound."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from statistics import median

from halfmq.broker.http.families import (
    FAMILIES,
    LAG_LATENCY,
    LAG_MESSAGES,
    SERIES_MAX,
    Found,
    render,
)

DOCUMENT = Path(__file__).parents[4] / "docs" / "metrics.md"


def test_the_document_names_every_metric() -> None:
    """Its table is this one; replace it by these lines when it fails."""
    rows = [
        f"| `{one.name}` | {one.kind} | {', '.join(one.labels)} | {one.help} |"
        for one in FAMILIES.values()
    ]
    table = DOCUMENT.read_text().partition("|---|---|---|---|\n")[2].splitlines()

    assert table == rows, "\n".join(rows)


def test_names_that_clients_choose_do_not_fill_prometheus() -> None:
    """Beyond the limit, numbers are added up in one series and ages are the largest."""
    found = Found()
    for number in range(SERIES_MAX + 100):
        labels = f"group-{number}", "topic", "false"
        found.add(LAG_MESSAGES, 2, *labels)
        found.add(LAG_LATENCY, number, *labels)
    pieces, _ = render(found, {"node_id": "a"}, "")
    lines = b"".join(pieces).decode().splitlines()

    assert sum(line.startswith("rocketmq_consumer_lag_messages{") for line in lines) == 2_001
    assert sum(line.startswith("# ") for line in lines) == 4
    others = [line for line in lines if 'consumer_group="other"' in line]
    assert [line.rpartition(" ")[2] for line in others] == ["200.0", f"{SERIES_MAX + 99}.0"]


def test_no_step_of_a_scrape_does_the_work_of_many_pieces() -> None:
    """Requests are served between two steps; the calls of each are counted."""
    found = Found()
    for number in range(SERIES_MAX):
        found.add(LAG_MESSAGES, 2, f"group-{number}", "topic", "false")
    pieces, _ = render(found, {"node_id": "a"}, "")
    steps = []
    while True:
        calls = count()
        sys.setprofile(lambda *_, calls=calls: next(calls))
        try:
            piece = next(pieces, None)
        finally:
            sys.setprofile(None)
        if piece is None:
            break
        steps.append(next(calls))

    assert len(steps) > SERIES_MAX / 100
    assert max(steps) < 1.5 * median(steps)
