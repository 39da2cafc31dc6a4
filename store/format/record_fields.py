"""The fields of a commit-log record: name, position and type of each, stated once.

A record is a head of fixed fields, then body, topic and properties:

    head | body | topic length | topic | properties length | properties

The last field of the head is the length of the body. All numbers are big-endian. An IPv6 host
widens its field from 8 to 20 bytes, which shifts the fields after it; two bits of ``sys_flag``
say which hosts are IPv6, so there are four layouts.

Every other module derives the ``Struct``s, numpy types and positions that it needs from here, once,
at import. What the fields mean is said by ``record.Record``.

Source: RocketMQ ``MessageExtEncoder.java``, ``MessageDecoder.java``.
"""

from itertools import pairwise
from struct import Struct, calcsize
from typing import Final, NamedTuple

from .flags import BORN_HOST_V6, HOSTS_MASK, STORE_HOST_V6
from .ids import HOST_V4_SIZE, HOST_V6_SIZE

_DTYPES: Final = {"i": ">i4", "I": ">u4", "q": ">i8"}  # numpy's names of struct's types


class Field(NamedTuple):
    """One field of the head."""

    name: str
    position: int  # bytes from the start of the record
    code: str  # its type, as ``struct`` writes it

    @property
    def size(self) -> int:
        return calcsize(">" + self.code)

    @property
    def end(self) -> int:
        """The position after its last byte."""
        return self.position + self.size

    @property
    def dtype(self) -> str:
        """The type as numpy writes it; of a host, raw bytes."""
        return _DTYPES.get(self.code, f"V{self.size}")


_HEAD: Final = (  # with IPv4 hosts
    Field("total_size", 0, "i"),
    Field("magic", 4, "I"),
    Field("body_crc", 8, "I"),
    Field("queue_id", 12, "i"),
    Field("flag", 16, "i"),
    Field("queue_offset", 20, "q"),
    Field("physical_offset", 28, "q"),
    Field("sys_flag", 36, "i"),
    Field("born_timestamp", 40, "q"),
    Field("born_host", 48, "8s"),
    Field("store_timestamp", 56, "q"),
    Field("store_host", 64, "8s"),
    Field("reconsume_times", 72, "i"),
    Field("prepared_transaction_offset", 76, "q"),
    Field("body_size", 84, "i"),
)
assert all(field.end == following.position for field, following in pairwise(_HEAD))

TOPIC_LENGTH_V1: Final = Struct(">b")  # in records with MAGIC_V1
TOPIC_LENGTH_V2: Final = Struct(">h")
PROPERTIES_LENGTH: Final = Struct(">h")


def _with_hosts(hosts: int) -> dict[str, Field]:
    wide = {"born_host": hosts & BORN_HOST_V6, "store_host": hosts & STORE_HOST_V6}
    fields: dict[str, Field] = {}
    shift = 0
    for name, position, code in _HEAD:
        is_wide = wide.get(name)
        fields[name] = Field(name, position + shift, f"{HOST_V6_SIZE}s" if is_wide else code)
        if is_wide:
            shift += HOST_V6_SIZE - HOST_V4_SIZE
    return fields


HOST_MIXES: Final = (0, BORN_HOST_V6, STORE_HOST_V6, HOSTS_MASK)  # values of sys_flag & HOSTS_MASK
LAYOUTS: Final = {hosts: _with_hosts(hosts) for hosts in HOST_MIXES}
"""The fields of the head by name, in the order of the file, for each value of ``sys_flag &
HOSTS_MASK``."""

FIELDS: Final = LAYOUTS[0]
"""The fields of the head with IPv4 hosts; those up to ``born_host`` begin there in all layouts."""

HOST_BITS_AT: Final = FIELDS["sys_flag"].end - 1
"""Position of the byte of ``sys_flag`` that says which hosts are IPv6."""
assert HOSTS_MASK <= 0xFF


def struct_of(*names: str, hosts: int = 0) -> Struct:
    """Return the ``Struct`` that reads some fields of a record from where the record begins.

    It skips the fields between them and ends after the last one. ``hosts`` is the record's
    ``sys_flag & HOSTS_MASK``.

    Raises:
        KeyError: There is no such field.
        ValueError: The names are not in the order of the file.
    """
    codes: list[str] = []
    position = 0
    for name in names:
        field = LAYOUTS[hosts][name]
        if field.position < position:
            raise ValueError(f"{name} is not in the order of the file: {', '.join(names)}")
        gap = field.position - position
        codes.append(f"{gap}x{field.code}" if gap else field.code)
        position = field.end
    return Struct(">" + "".join(codes))
