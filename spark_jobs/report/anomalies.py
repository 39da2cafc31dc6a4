"""The anomalies of a report: what each kind means, which rows are shown, the bytes to look at."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ..audit.judge import Kind
from ..audit.lookup import Place
from ..log.files import open_remote
from .text import escaped, isolated, many, number

if TYPE_CHECKING:
    from ..audit.auditor import Anomaly

OPEN_MAX: Final = 10  # rows; of so few the bytes are shown at once
_DETAIL_MAX: Final = 600  # characters
_OFFSETS_MAX: Final = 12  # of one row; more are counted
_PLACES_MAX: Final = 4  # of one row whose bytes are shown
_BYTES_MAX: Final = 128  # of one place: the fixed fields of a record take 88, or 112 with IPv6
_LINE: Final = 8  # bytes in a line of a dump, which a phone can hold

# Title, and what it means to whoever has the log.
KINDS: Final = {
    Kind.COMMITTED_TWICE: ("Committed twice", "Consumers see the message more than once."),
    Kind.COMMIT_AFTER_ROLLBACK: (
        "Committed after a rollback",
        "Consumers see a message whose producer was told that it is rolled back.",
    ),
    Kind.ROLLBACK_AFTER_COMMIT: (
        "Rolled back after a commit",
        "Consumers see the message; a producer was told that it is rolled back.",
    ),
    Kind.DECISION_WITHOUT_HALF: (
        "Decision without half message",
        "A final message or a rollback record names a half message that is not there.",
    ),
    Kind.OP_WITHOUT_HALF: (
        "Op without half message",
        "An op message marks something as done that was never prepared.",
    ),
    Kind.PARKED_WITHOUT_HALF: (
        "Parked without half message",
        "A message was given up whose half message is not there.",
    ),
    Kind.DUPLICATE_PREPARE: (
        "Prepared twice",
        "One message was prepared as two transactions, and both may be committed.",
    ),
    Kind.MISSING_FINAL: (
        "Final message missing",
        "Of several messages committed together, one never reached its queue.",
    ),
    Kind.SPLIT_GROUP: (
        "Several messages, not decided alike",
        "Messages of one transaction should be decided together.",
    ),
    Kind.OVERDUE_HALF: (
        "Undecided for too long",
        "A half message has waited longer than the age that was asked for.",
    ),
    Kind.LOST_PARKING: (
        "Neither decided nor parked",
        "The broker stopped asking about a half message and left nothing behind.",
    ),
    Kind.OUT_OF_ORDER: (
        "Out of order",
        "Queue offsets do not rise with the offsets in the log.",
    ),
    Kind.QUEUE_GAP: ("Gap in a queue", "Offsets of a queue are missing from the log."),
    Kind.WRONG_QUEUE_ENTRY: (
        "Wrong queue entry",
        "A consume queue says something else than the log.",
    ),
    Kind.MISSING_QUEUE_ENTRY: (
        "Missing queue entry",
        "A message in the log that consumers are not shown.",
    ),
    Kind.UNKNOWN_QUEUE: (
        "Unknown topic or queue",
        "Messages of a topic or a queue that the broker's table does not have.",
    ),
    Kind.CORRUPT_RECORD: ("Corrupt record", "Bytes where a record should be."),
    Kind.CRC: ("CRC mismatch", "The bytes of a record are not those that were written."),
    Kind.GAP: ("Gap in the log", "A stretch of the log was never written, or is lost."),
    Kind.OVERLAP: ("Overlapping segments", "Two segments claim the same offsets."),
}


class ShownKind(NamedTuple):
    """A kind of anomaly, and the rows of it that the report has."""

    kind: str
    title: str
    meaning: str
    found: int
    rows: list[tuple[int, "Anomaly"]]  # with their numbers


def shown_kinds(
    anomalies: Iterable["Anomaly"], counts: dict[str, int], most: int
) -> list[ShownKind]:
    """Choose up to ``most`` rows, so that a flood of one kind does not hide the others."""
    by_kind: dict[str, list[Anomaly]] = {str(kind): [] for kind in Kind}
    for anomaly in anomalies:
        by_kind[anomaly.kind].append(anomaly)
    rounds = zip_longest(*by_kind.values())
    fair = (one for together in rounds for one in together if one is not None)
    chosen = {id(one) for one, _ in zip(fair, range(most), strict=False)}
    shown: list[ShownKind] = []
    first = 1
    for kind, all_of_it in by_kind.items():
        if counts.get(kind):
            rows = list(enumerate((one for one in all_of_it if id(one) in chosen), first))
            shown.append(ShownKind(kind, *KINDS[Kind(kind)], counts[kind], rows))
            first += len(rows)
    return shown


def kind_section(shown: ShownKind, *, is_open: bool) -> Iterator[str]:
    """Give the rows of one kind."""
    yield f'<section class="kind" id="kind-{shown.kind}">'
    yield f"<h3>{shown.title}: {number(shown.found)}</h3>"
    yield f'<p class="note">{shown.meaning}</p>'
    for place, anomaly in shown.rows:
        yield from _row(place, shown.title, anomaly, is_open=is_open)
    left_out = shown.found - len(shown.rows)
    if left_out:
        yield f'<p class="left-out">And {number(left_out)} more of this kind, not shown here.</p>'
    yield "</section>"


def _row(place: int, title: str, anomaly: "Anomaly", *, is_open: bool) -> Iterator[str]:
    identity = f"anomaly-{place}"
    yield f'<article id="{identity}" data-kind="{escaped(anomaly.kind)}">'
    yield f'<h4><a href="#{identity}">{place}.</a> {title}</h4><dl class="facts">'
    if anomaly.transaction_id is not None:
        yield f"<dt>Transaction</dt><dd>{isolated(anomaly.transaction_id)}</dd>"
    offsets = ", ".join(map(str, anomaly.offsets[:_OFFSETS_MAX]))
    more = len(anomaly.offsets) - _OFFSETS_MAX
    yield f"<dt>Offsets</dt><dd>{offsets}{f' and {number(more)} more' if more > 0 else ''}</dd>"
    yield f"<dt>What</dt><dd>{isolated(anomaly.detail, _DETAIL_MAX)}</dd></dl>"
    yield from _dumps(anomaly.places, is_open=is_open)
    yield "</article>"


def _dumps(places: Sequence[Place], *, is_open: bool) -> Iterator[str]:
    if not places:
        yield '<p class="note">None of these offsets lies in a file of the log.</p>'
        return
    yield f"<details{' open' if is_open else ''}><summary>Bytes to look at</summary>"
    yield '<div class="dumps">'
    for place in places[:_PLACES_MAX]:
        yield f'<div><p class="note">{_where(place)}</p>{_dump(place)}</div>'
    yield "</div>"
    if len(places) > _PLACES_MAX:
        yield f'<p class="note">And {many(len(places) - _PLACES_MAX, "more place")}.</p>'
    yield "</details>"


def _where(place: Place) -> str:
    file = f"<bdi>{escaped(Path(place.file).name)}</bdi>"
    size = f"{number(place.size)} bytes" if place.size else "no record begins here"
    return f"{file} at {place.position}, {size}"


def _dump(place: Place) -> str:
    wanted = min(place.size or _BYTES_MAX, _BYTES_MAX)
    try:
        with open_remote(place.file) as file:
            content = bytes(file.read_at(wanted, place.position))
    except OSError as error:  # deleted since, for one
        return f'<p class="note">{escaped(error.strerror or str(error))}</p>'
    lines = [
        _dump_line(start, content[start : start + _LINE]) for start in range(0, len(content), _LINE)
    ]
    if place.size > len(content):
        lines.append(f"… {many(place.size - len(content), 'more byte')}")
    return f"<pre>{chr(10).join(lines)}</pre>"


def _dump_line(start: int, content: bytes) -> str:
    letters = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in content)
    return f"{start:4x}  {content.hex(' '):{3 * _LINE - 1}}  {escaped(letters)}"
