"""All recorded frames of official clients and servers, decoded and encoded again."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator

import pytest

from halfmq.remoting.codes import HeaderType
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import ProtocolError
from halfmq.remoting.framing import FrameDecoder, encode_frame
from halfmq.remoting.serialization import ext_fields
from tests.support.frames import FILES, RecordedFrame, all_recorded, recorded

OUT_OF_RANGE = 8589934592  # the one frame whose opaque is beyond int32: its server hung up


def decode(frame: bytes) -> RemotingCommand:
    (command,) = FrameDecoder().receive_data(frame)
    return command


def valid_frames(file: str) -> Iterator[tuple[RecordedFrame, RemotingCommand]]:
    for line in recorded(file):
        if line.code is not None and line.opaque != OUT_OF_RANGE:
            yield line, decode(line.frame)


@pytest.mark.parametrize("file", FILES)
def test_recorded_frames_decode_to_the_recorded_values(file: str) -> None:
    """Code, opaque, flag, header type and body are those that the official peer read."""
    for line, command in valid_frames(file):
        assert command.code == line.code
        assert command.opaque == int(str(line.opaque or 0))
        assert command.flag == (line.flag or 0)
        assert command.header_type == line.header_type
        assert command.raw_header == line.header
        assert command.body == line.body


@pytest.mark.parametrize("file", FILES)
def test_server_and_client_decoders_agree(file: str) -> None:
    """The kind of command that a decoder tries first affects only its speed."""
    for line, command in valid_frames(file):
        (other,) = FrameDecoder(responses_first=True).receive_data(line.frame)
        assert other == command


@pytest.mark.parametrize("file", FILES)
def test_recorded_frames_encode_again_to_the_same_bytes(file: str) -> None:
    """Encoding gives the bytes that the Java client and the official servers write."""
    for line, command in valid_frames(file):
        again = RemotingCommand(
            command.code,
            command.opaque,
            command.flag,
            command.language,
            command.version,
            command.remark,
            ext_fields(command) if has_ext_fields(line) else None,
            command.body,
            command.header_type,
        )
        if is_canonical(line):
            assert encode_frame(again) == line.frame
        else:
            back = decode(encode_frame(again))
            back.raw_header = command.raw_header
            assert back == command


def has_ext_fields(line: RecordedFrame) -> bool:
    return line.header_type == HeaderType.ROCKETMQ or "extFields" in json.loads(line.header)


def is_canonical(line: RecordedFrame) -> bool:
    """Return whether the frame has no blanks, the usual order of fields, and no duplicates."""
    if line.header_type == HeaderType.ROCKETMQ:
        keys = binary_keys(line.header)
        return len(keys) == len(set(keys))
    fields = json.loads(line.header)
    keys = list(fields)
    values = (fields.get("extFields") or {}).values()
    return (
        keys == sorted(keys)
        and {"flag", "language", "opaque", "serializeTypeCurrentRPC", "version"} <= set(keys)
        and all(isinstance(value, str) for value in values)
        and not line.header.endswith(b"\n")  # the C++ client's
        and b"\\u001A" not in line.header  # we write hex digits in lower case
    )


def binary_keys(header: bytes) -> list[bytes]:
    """Read the names of a ROCKETMQ header's ext fields, including duplicates."""
    position = 21 + int.from_bytes(header[13:17])
    keys = []
    while position < len(header):
        key_end = position + 2 + int.from_bytes(header[position : position + 2])
        keys.append(header[position + 2 : key_end])
        position = key_end + 4 + int.from_bytes(header[key_end : key_end + 4])
    return keys


def test_most_recorded_frames_are_canonical() -> None:
    """So the test above compares nearly all frames byte for byte."""
    lines = [line for line in all_recorded() if line.code is not None]
    canonical = [line for line in lines if is_canonical(line)]

    assert len(lines) == 4001
    assert len(canonical) > 3000


# Requests that a tool sent to a client or server without the fields they need, on purpose.
INCOMPLETE = {
    "raw-5.3.3-header",
    "raw-5.3.3-unknown",
    "broker-4.9.7-raw-unknown",
}


@pytest.mark.parametrize("file", [file for file in FILES if file not in INCOMPLETE])
def test_every_request_of_an_official_client_fits_its_header_class(file: str) -> None:
    """No class requires a field that a client leaves out, or refuses a number that it writes."""
    assert [command.header_error for _, command in valid_frames(file) if command.header_error] == []


def test_incomplete_requests_give_the_missing_field() -> None:
    """The broker refuses them with this text; their fields stay readable."""
    errors = {
        (command.code, command.header_error)
        for file in INCOMPLETE
        for _, command in valid_frames(file)
        if command.header_error
    }

    assert (30, "topic is missing") in errors
    assert (30, "queueId is missing") in errors
    assert (30, "queueId is not a number in range: 'abc'") in errors
    assert (40, "consumerGroup is missing") in errors


def test_garbage_is_a_protocol_error() -> None:
    """Where the official servers hang up at once, our decoder raises, and raises nothing else.

    The exceptions: bytes in front of which a PROXY or TLS line stood on that connection, which
    are whole frames by themselves.
    """
    garbage = [line for line in all_recorded() if line.code is None]
    assert len(garbage) == 42

    answered = []
    for line in garbage:
        try:
            commands = FrameDecoder().receive_data(line.frame)
        except ProtocolError:
            continue
        assert commands, "garbage may not be kept in the hope of more"
        answered += [command.code for command in commands]

    assert answered == [30, 30]


def test_an_opaque_beyond_int32_is_a_protocol_error() -> None:
    """No answer could repeat it; the official broker closes the connection."""
    (line,) = [line for line in all_recorded() if line.opaque == OUT_OF_RANGE]

    with pytest.raises(ProtocolError, match="opaque"):
        decode(line.frame)


# -- signatures: they cover every ext field as received ----------------------------------------

SECRETS = {
    "": "",  # the wheel signs with an empty secret when it has no credentials
    "rocketmq": "12345678",
    "rocketmq2": "12345678",
    "RocketMQ": "12345678",
    "alice": "alice12345",
}


def signature(fields: dict[str, str], body: bytes, secret: str, *leave_out: str) -> str:
    skipped = {"Signature", *leave_out}
    content = "".join(fields[key] for key in sorted(fields) if key not in skipped).encode() + body
    return base64.b64encode(hmac.digest(secret.encode(), content, hashlib.sha1)).decode()


@pytest.mark.parametrize("file", FILES)
def test_signatures_of_official_clients_can_be_recomputed(file: str) -> None:
    """``ext_fields`` keeps every field and digit, so access control can verify signatures."""
    wrong = 0
    for _, command in valid_frames(file):
        fields = ext_fields(command)
        secret = SECRETS.get(fields.get("AccessKey", "nobody"))
        if "Signature" in fields and not command.is_response and secret is not None:
            expected = {
                signature(fields, command.body, secret),
                signature(fields, command.body, secret, "_UNIQUE_KEY_QUERY"),
                signature(fields, command.body, "wrongsecret"),
            }
            wrong += fields["Signature"] not in expected

    changed_after_signing = {"raw-5.3.3-acl": 2}
    assert wrong == changed_after_signing.get(file, 0)
