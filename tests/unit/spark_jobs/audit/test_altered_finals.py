"""What is said of a final message that differs from its half; no Spark is needed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halfmq.spark_jobs.audit.altered_finals import difference
from halfmq.spark_jobs.log.log_end import survey
from halfmq.spark_jobs.log.lookup import LogLookup
from tests.support.log_writer import COMMIT, LogWriter, Ours

HALF_ID = f"7F00000100002A9F{0:016X}"
CHANGES: dict[str, dict[str, Any]] = {
    "": {},
    "body": {"body": b"ordex"},
    "length, body": {"body": b"orde"},
    "flag": {"flag": 1},
    "born time": {"born": 5},
    "born host": {"born_host": bytes(8)},
    "store host": {"store_host": bytes(8)},
    "reconsume times": {"reconsume_times": 2},
    "compression flags": {"sys_flag": COMMIT | 1},
    "system flags": {"sys_flag": COMMIT | 2},
    "topic": {"topic": "plain"},
    "queue (4 instead of 3)": {"queue_id": 4},
    "property colour": {"properties": {"colour": "blue"}},
    "property TRANSACTION_HALF_ID": {"properties": {"TRANSACTION_HALF_ID": HALF_ID[:-1] + "1"}},
    "property a, property b, property c, property d, property e, property f, property g, property h"
    ", 2 more": {"properties": dict.fromkeys("abcdefghij", "x")},
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_differs_is_named(what: str, tmp_path: Path) -> None:
    """Fields in words, properties by name, never a value: it may be part of the message."""
    log = LogWriter(tmp_path)
    half = Ours(log).half(colour="red")
    changed = dict(CHANGES[what])
    properties = {
        **half.properties,
        "TRANSACTION_HALF_ID": HALF_ID,
        **changed.pop("properties", {}),
    }
    fields = {"queue_id": 3, "sys_flag": COMMIT, "prepared": half.offset, "born": half.born}
    topic, body = changed.pop("topic", "orders"), changed.pop("body", half.body)
    final = log.append(topic, body, properties, **(fields | changed))
    log.close()

    told = difference(LogLookup(survey(tmp_path).segments), half.offset, final.offset)

    assert sorted(told.split(", ")) == sorted(what.split(", "))


def test_nothing_is_said_of_records_that_cannot_be_read(tmp_path: Path) -> None:
    """The log may have been deleted in between."""
    log = LogWriter(tmp_path)
    half = Ours(log).half()
    log.close()

    assert difference(LogLookup(survey(tmp_path).segments), half.offset, half.offset + 1) == ""
