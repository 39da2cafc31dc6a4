"""Body of REGISTER_BROKER (103): the topics of a broker, as it registers them at name servers.

Source: RocketMQ ``RegisterBrokerBody``, ``TopicConfigSerializeWrapper``, ``DataVersion``,
``TopicConfig#decode``.
"""

import zlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Final

import msgspec

from .codes import RequestCode
from .errors import BodyError
from .ext_fields import Int32, Int64, Name
from .fastjson import convert, dump, parse
from .request_sizes import REQUEST_SIZES

_CONTENT_MAX: Final = REQUEST_SIZES[RequestCode.REGISTER_BROKER].body
_ZLIB: Final = 0x78
"""First byte of a compressed body. The field ``compressed`` of 5.x headers does not tell."""


QUEUES_MAX: Final = 65_535
"""Queues of a topic in one broker; clients make a list of them."""

Queues = Annotated[int, msgspec.Meta(ge=0, le=QUEUES_MAX)]


class DataVersion(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The version of a table of topics or groups; it differs after each change."""

    counter: Int64 = 0
    state_version: Int64 = 0
    timestamp: Int64 = 0


class RegisteredTopic(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What name servers keep of a topic of one broker."""

    perm: Int32 = 6  # 4 read, 2 write, 1 inherit
    read_queue_nums: Queues = 16
    topic_sys_flag: Int32 = 0
    write_queue_nums: Queues = 16


class _Topics(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    data_version: DataVersion = DataVersion()
    topic_config_table: dict[Name, RegisteredTopic] = {}


class _Body(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    topic_config_serialize_wrapper: _Topics = _Topics()


class Registration(msgspec.Struct, frozen=True):
    """The topics in one registration: all of the broker, or those that have changed."""

    version: DataVersion
    topics: Mapping[str, RegisteredTopic]


def encode_registration(
    topics: Iterable[tuple[str, Mapping[str, object]]], version: DataVersion
) -> bytes:
    """Return the body, not compressed; entries of topics are those of ``topics.json``."""
    wrapper = {"dataVersion": version, "topicConfigTable": dict(topics)}
    return dump({"filterServerList": [], "topicConfigSerializeWrapper": wrapper})


def decode_registration(body: bytes) -> Registration:
    """Decode the body, compressed or not; an empty one has no topics. Raises BodyError."""
    if not body:
        return Registration(DataVersion(), {})
    if body[0] == _ZLIB:
        return _decode_binary(_inflate(body))
    found = convert(parse(body), _Body, "a registration").topic_config_serialize_wrapper
    return Registration(found.data_version, found.topic_config_table)


def decode_data_version(body: bytes) -> DataVersion:
    """Decode the body of QUERY_DATA_VERSION (322). Raises BodyError."""
    return convert(parse(body), DataVersion, "a data version")


def encode_data_version(version: DataVersion) -> bytes:
    """Return the body of the answer to QUERY_DATA_VERSION (322)."""
    return dump(version)


def _inflate(body: bytes) -> bytes:
    """Decompress, up to the size that a body may have without compression."""
    inflater = zlib.decompressobj()
    try:
        content = inflater.decompress(body, _CONTENT_MAX)
    except zlib.error as error:
        raise BodyError(f"the registration cannot be decompressed: {error}") from error
    if not inflater.eof:
        raise BodyError(f"the registration is cut off, or has more than {_CONTENT_MAX} bytes")
    return content


def _decode_binary(content: bytes) -> Registration:
    """Decode blocks, each after its length: the version, topics after their number, and others."""
    version, at = _block(content, 0)
    count, at = _integer(content, at)
    topics: dict[str, RegisteredTopic] = {}
    for _ in range(count):
        block, at = _block(content, at)
        try:
            name, read, write, perm, *_ = block.decode().split(" ")
            numbers = {"readQueueNums": read, "writeQueueNums": write, "perm": perm}
            topics[msgspec.convert(name, Name)] = msgspec.convert(
                numbers, RegisteredTopic, strict=False
            )
        except ValueError as error:  # of msgspec, too
            raise BodyError(f"not a topic of a registration: {block[:200]!r}") from error
    return Registration(decode_data_version(version), topics)


def _block(content: bytes, at: int) -> tuple[bytes, int]:
    size, at = _integer(content, at)
    return content[at : at + size], at + size


def _integer(content: bytes, at: int) -> tuple[int, int]:
    value = int.from_bytes(content[at : at + 4], "big", signed=True)
    if at + 4 > len(content) or value < 0:
        raise BodyError("the registration is cut off")
    return value, at + 4
