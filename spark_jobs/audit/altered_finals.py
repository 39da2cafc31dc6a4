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
    decode_properties,
)
from halfmq.store.format.topics import DELAYED_TOPICS

from ..log.final_content import HOSTS, MAY_DIFFER, NUMBERS
from ..log.lookup import LogLookup
from ..log.rows import Rows

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


def _differences(half: Rows, final: Rows) -> Iterator[str]:
    for name in NUMBERS:
        if half.field(name)[0] != final.field(name)[0]:
            yield _NAMES.get(name, name)
    for name in HOSTS:
        if half.hosts(name) != final.hosts(name):
            yield _NAMES[name]
    flags = int(half.field("sys_flag")[0] ^ final.field("sys_flag")[0])
    if flags & _COMPRESSED:
        yield "compression flags"
    if flags & ~(TRANSACTION_MASK | HOSTS_MASK | _COMPRESSED):
        yield "system flags"
    old, new = _properties(half), _properties(final)
    yield from _destination(old, new, final)
    for name in sorted(old.keys() | new.keys()):
        if name not in MAY_DIFFER and old.get(name) != new.get(name):
            yield f"property {name}"
    half_id = new.get(PROPERTY_TRANSACTION_HALF_ID)
    if half_id is not None and not half_id.upper().endswith(f"{half.physical_offsets[0]:016X}"):
        yield f"property {PROPERTY_TRANSACTION_HALF_ID}"


def _destination(old: dict[str, str], new: dict[str, str], final: Rows) -> Iterator[str]:
    topic, queue = final.topic_names[0], str(final.field("queue_id")[0])
    if topic in DELAYED_TOPICS:
        topic, queue = new.get(PROPERTY_REAL_TOPIC, ""), new.get(PROPERTY_REAL_QID, "")
    if old.get(PROPERTY_REAL_TOPIC) != topic:
        yield "topic"
    if old.get(PROPERTY_REAL_QID) != queue:
        yield f"queue ({queue} instead of {old.get(PROPERTY_REAL_QID)})"


def _properties(record: Rows) -> dict[str, str]:
    return decode_properties(record.properties[0].as_py())
