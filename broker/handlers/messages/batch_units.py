"""The messages in the body of a batch send, as they are stored."""

from typing import Final, NamedTuple

from halfmq.store.format.batch import split_batch
from halfmq.store.format.properties import get_property, tags_code, tags_codes, terminated
from halfmq.store.format.record import CRC_TAIL_START, without_crcs

from ...errors import MessageRefusedError
from ...transaction.admission import fault_in_batch, without_broker_properties

_SPECIAL: Final = (b"TRAN_MSG\x01", b"DELAY\x01", b"TIMER_", b"TRANSACTION_", CRC_TAIL_START)
"""Parts of properties that may have to be refused or dropped; hardly any unit contains one."""


class Units(NamedTuple):
    """The messages of a batch, as columns of equal length."""

    flags: list[int]
    bodies: list[bytes]
    properties: list[bytes]
    tags_codes: list[int]


def read_units(batch: bytes, *, missing_wait: bytes, suffix: bytes) -> Units:
    """Split the body of a batch into messages, without properties that only the broker sets.

    Args:
        batch: The body of the request.
        missing_wait: A property for units that have no WAIT.
        suffix: Properties for all units.

    Raises:
        ValueError: The body does not end with a whole unit.
        RequestRefusedError: A unit asks for a transaction, a delay or a time of delivery.
    """
    flags, bodies, sent = split_batch(batch)
    joined = b"".join(sent)  # a few scans of all units together are faster than one scan of each
    if any(joined.find(mark) >= 0 for mark in _SPECIAL):
        sent = [_admitted(raw, number) for number, raw in enumerate(sent)]
    with_wait = missing_wait + suffix
    stored = [
        (raw if raw[-1:] == b"\x02" else terminated(raw))
        + (suffix if raw.find(b"WAIT\x01") >= 0 else with_wait)
        for raw in sent
    ]
    # A tag of the whole batch is the last TAGS property of each unit, and the last one counts.
    shared = get_property(suffix, b"TAGS") is not None
    codes = [tags_code(suffix)] * len(sent) if shared else tags_codes(sent)
    return Units(flags, bodies, stored, codes)


def _admitted(raw: bytes, number: int) -> bytes:
    """Return the properties of a unit without those that only the broker sets.

    Raises:
        RequestRefusedError: The unit asks for a transaction, a delay or a time of delivery.
    """
    fault = fault_in_batch(raw, f"unit {number} of the batch (counted from 0)")
    if fault is not None:
        raise MessageRefusedError(fault)
    return without_broker_properties(without_crcs(raw))
