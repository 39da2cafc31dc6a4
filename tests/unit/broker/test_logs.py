"""The log: a line per event, and no flood of them."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
from pathlib import Path

import pytest

from halfmq.broker.logs import (
    ALIKE_PER_SECOND_MAX,
    EACH,
    LINE_MAX,
    BoundedHandler,
    JsonFormatter,
    LineFormatter,
)


class Clock:
    """Seconds, as the test says."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Written:
    """A logger of its own with such a handler, and what came out."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._stream = io.StringIO()
        handler = BoundedHandler(self._stream, self.clock)
        handler.setFormatter(LineFormatter())
        self.log = logging.Logger("test", logging.DEBUG)  # noqa: LOG001 -- one for each test
        self.log.addHandler(handler)

    @property
    def lines(self) -> list[str]:
        """The lines without their time."""
        return [line.split(" ", 1)[1] for line in self._stream.getvalue().splitlines()]


@pytest.fixture
def written() -> Written:
    """Nothing so far."""
    return Written()


def test_the_first_lines_of_one_kind_in_each_second_are_written(written: Written) -> None:
    """A client may be refused ten thousand times per second."""
    for second in range(3):
        written.clock.now = float(second)
        for number in range(1_000):
            written.log.warning("event=decision_refused half_offset=%d", second * 1_000 + number)
    written.clock.now = 3.0
    written.log.info("event=stopping")

    refused = [line for line in written.lines if "half_offset" in line]
    assert len(refused) == 3 * ALIKE_PER_SECOND_MAX
    assert refused[ALIKE_PER_SECOND_MAX] == "WARNING test event=decision_refused half_offset=1000"
    told = [line for line in written.lines if "lines_left_out" in line]
    left_out = 1_000 - ALIKE_PER_SECOND_MAX
    line = f"WARNING halfmq.broker.logs event=lines_left_out count={left_out} of=test"
    assert told == [f"{line} like='event=decision_refused'"] * 3
    assert written.lines[-1] == "INFO test event=stopping"


def test_other_lines_are_written_beside_a_flood(written: Written) -> None:
    """Rare lines must not be lost among frequent ones."""
    for number in range(1_000):
        written.log.warning("event=decision_refused half_offset=%d", number)
        if number % 100 == 99:
            written.log.error("event=half_unreadable half_offset=%d", number)
    assert len([line for line in written.lines if "half_unreadable" in line]) == 10


def test_debug_lines_are_never_omitted(written: Written) -> None:
    """DEBUG is enabled to see each event."""
    for number in range(1_000):
        written.log.debug("event=transaction_check half_offset=%d", number)
    assert len(written.lines) == 1_000


def test_lines_marked_for_operators_are_never_omitted(written: Written) -> None:
    """Who decided what and why, and what an operator has to decide."""
    for number in range(1_000):
        written.log.info("event=operator_decided half_offset=%d", number, extra=EACH)
    assert len(written.lines) == 1_000


def test_a_traceback_is_one_line(written: Written) -> None:
    """A reader of single lines sees complete events."""
    try:
        int("one\ntwo")
    except ValueError:
        written.log.exception("event=failed")
    (line,) = written.lines
    assert line.startswith("ERROR test event=failed\\nTraceback")
    assert "\\nValueError: " in line


@pytest.mark.parametrize("raised", [False, True])
def test_a_text_of_a_client_is_cut_and_moves_no_cursor(written: Written, raised: bool) -> None:
    """A name of 15 MB, in the line and in its traceback; ESC, CR and line separators."""
    name = "\x1b[2J\rfake line\u2028" + 15_000_000 * "x" + "end"
    error = ValueError(name) if raised else None
    written.log.warning("event=refused topic=%s code=%d", name, 17, exc_info=error)

    (line,) = written.lines
    assert line.startswith(r"WARNING test event=refused topic='\x1b[2J\rfake line\u2028xxx")
    assert "xend' code=17" in line
    assert line.isprintable()
    assert len(line) < 2 * LINE_MAX
    assert line.endswith("xend" if raised else " code=17")


@pytest.mark.parametrize(
    ("value", "written_as"),
    [
        ("orders", "orders"),
        (7, "7"),
        (Path("/a b/c"), "'/a b/c'"),
        ("a b", "'a b'"),
        ("", "''"),
        ("it's", '"it\'s"'),
        ("""say "it's" all""", r'''"say \"it's\" all"'''),
        (ValueError("no such file"), "'no such file'"),
    ],
)
def test_a_value_is_one_word_or_in_quotes(written: Written, value: object, written_as: str) -> None:
    """A text of a client, a path or a reason cannot look like further values."""
    written.log.warning("event=failed percent=100%% topic=%s code=%d why=%r", value, 17, "a b")

    assert written.lines == [
        f"WARNING test event=failed percent=100% topic={written_as} code=17 why='a b'"
    ]


def _as_json(template: str, *args: object) -> dict[str, object]:
    record = logging.Logger("halfmq.test").makeRecord(  # noqa: LOG001 -- only its name counts
        "halfmq.test", logging.WARNING, __file__, 1, template, args, None
    )
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found: dict[str, object] = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(found.pop("time")))
    assert (found.pop("level"), found.pop("logger")) == ("WARNING", "halfmq.test")
    return found


def test_a_line_of_json_has_the_fields_of_the_text() -> None:
    """Numbers are numbers, notes have no quotes, and texts of clients cannot break it."""
    assert _as_json("event=kept count=%d rate=%.1f note='It costs %d %%; see docs'", 3, 0.5, 7) == {
        "event": "kept",
        "count": 3,
        "rate": 0.5,
        "note": "It costs 7 %; see docs",
    }
    assert _as_json("event=refused peer=%s:%d error=%r", "::1", 80, 'a "b"\n event=fake') == {
        "event": "refused",
        "peer": "::1:80",
        "error": 'a "b"\\n event=fake',
    }
    assert _as_json("lost %s of %d", "one", 2) == {"message": "lost one of 2"}
    assert len(json.dumps(_as_json("event=long name=%s", "x" * 100_000))) < LINE_MAX


def test_a_line_of_json_has_its_traceback() -> None:
    try:
        os.stat("/nowhere")  # noqa: PTH116
    except OSError:
        record = logging.Logger("test").makeRecord(  # noqa: LOG001
            "test", logging.ERROR, __file__, 1, "event=failed", (), sys.exc_info()
        )
    assert "FileNotFoundError" in json.loads(JsonFormatter().format(record))["exception"]
