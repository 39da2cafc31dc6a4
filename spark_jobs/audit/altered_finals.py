"""Say in what a final message differs from its half, by a look at both records.

The rules know only that there is a difference: they compare hashes (``log/final_content.py``).
"""

from collections.abc import Iterator
from typing import Final

from halfmq.store.format.flags import HOSTS_MASK, TRANSACTION_MASK
from halfmq.store.format.properties import (
    PROPERTY_REAL_QID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TRANSACTION_HALF_ID,
)
from halfmq.store.format.record import Record
from halfmq.store.format.topics import DELAYED_TOPICS

from ..log.final_content import HOSTS, MAY_DIFFER, NUMBERS
from ..log.lookup import LogLookup

_NAMED_MAX: Final = 8
_COMPRESSED: Final = 0x0701  # the bits of sys_flag about the body
_NAMES: Final = {
    "born_timestamp": "born time",
    "reconsume_times": "reconsume times",
    "body_crc": "body",
    "body_size": "length",
    "born_host": "born host",
    "store_host": "store host",
}


def difference(lookup: LogLookup, half: int, final: int) -> str:
    """Name what differs between the records at two offsets; empty if they cannot be read."""
    records = lookup.record(half), lookup.record(final)
    if records[0] is None or records[1] is None:
        return ""
    found = list(_differences(records[0], records[1]))
    more = [f"{len(found) - _NAMED_MAX} more"] if len(found) > _NAMED_MAX else []
    return ", ".join([*found[:_NAMED_MAX], *more])


def _differences(half: Record, final: Record) -> Iterator[str]:
    for name in (*NUMBERS, *HOSTS):
        if _field(half, name) != _field(final, name):
            yield _NAMES.get(name, name)
    flags = half.sys_flag ^ final.sys_flag
    if flags & _COMPRESSED:
        yield "compression flags"
    if flags & ~(TRANSACTION_MASK | HOSTS_MASK | _COMPRESSED):
        yield "system flags"
    old, new = half.property_map, final.property_map
    yield from _destination(old, new, final)
    for name in sorted(old.keys() | new.keys()):
        if name not in MAY_DIFFER and old.get(name) != new.get(name):
            yield f"property {name}"
    half_id = new.get(PROPERTY_TRANSACTION_HALF_ID)
    if half_id is not None and not half_id.upper().endswith(f"{half.physical_offset:016X}"):
        yield f"property {PROPERTY_TRANSACTION_HALF_ID}"


def _field(record: Record, name: str) -> object:
    return len(record.body) if name == "body_size" else getattr(record, name)


def _destination(old: dict[str, str], new: dict[str, str], final: Record) -> Iterator[str]:
    topic, queue = final.topic, str(final.queue_id)
    if topic in DELAYED_TOPICS:
        topic, queue = new.get(PROPERTY_REAL_TOPIC, ""), new.get(PROPERTY_REAL_QID, "")
    if old.get(PROPERTY_REAL_TOPIC) != topic:
        yield "topic"
    if old.get(PROPERTY_REAL_QID) != queue:
        yield f"queue ({queue} instead of {old.get(PROPERTY_REAL_QID)})"
