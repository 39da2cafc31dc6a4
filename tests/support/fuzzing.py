"""Bytes that a broker must survive: frames of official clients, changed at random, and worse.

All of it comes from one `random.Random`, so a seed gives the same bytes again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import ssl
from collections.abc import Callable, Sequence
from random import Random
from struct import pack
from typing import Any, Final

from halfmq.remoting.codes import INT32_MAX, INT32_MIN, HeaderType, RequestCode
from halfmq.remoting.errors import ProtocolError, RemotingError
from halfmq.remoting.ext_fields import names_of
from halfmq.remoting.framing import FRAME_SIZE_MAX, FrameDecoder
from halfmq.remoting.header_tables import REQUEST_HEADERS
from halfmq.remoting.serialization import encode_header, join_frame
from tests.support.access import Account, signed_frame
from tests.support.frames import all_recorded

TEXTS: Final = (
    "",
    " ",
    "orders",
    "%RETRY%consumers",
    "%DLQ%consumers",
    "RMQ_SYS_TRANS_HALF_TOPIC",
    "*",
    "../../etc/passwd",
    "\x00\x01\x02",
    "\ud800",
    "\U0001f40d" * 50,
    "a" * 300,
    "9" * 400,
    "-1",
    "true",
    "1e400",
    "NaN",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAA=",
    "User:administrator",
)
"""Values of fields: empty, odd, forbidden, too long, no number, no UTF-8."""

NUMBERS: Final = (0, 1, -1, 16, INT32_MAX, INT32_MIN, 1 << 31, 1 << 63, -(1 << 63), 1 << 70)
BODY_MAX: Final = 70_000  # bytes; a frame that does not come in one read
NESTING: Final = 5_000  # brackets one within the other, more than a recursive reader bears


class Fuzzer:
    """Makes the bytes of one connection after the other."""

    def __init__(self, random: Random, known: Account) -> None:
        """`known` is a user of the broker who may do nothing; its secret is used now and then."""
        self._random = random
        self._known = known
        self._wrong = Account(known.name, "not its secret")
        self._recorded = [line.frame for line in all_recorded() if len(line.frame) <= BODY_MAX]
        self._codes = sorted(RequestCode)

    def stream(self) -> bytes:
        """Return what one connection sends: some frames, mostly whole ones."""
        random = self._random
        frames = [self.frame() for _ in range(random.choice((1, 1, 2, 5, 30)))]
        if random.randrange(4):  # one that cannot be read would end the connection
            frames = [frame for frame in frames if _can_be_read(frame)]
        data = b"".join(frames)
        match random.randrange(20):
            case 0 if data:
                return data[: random.randrange(len(data))]  # a half frame at the end
            case 1:
                return data + self._bytes(random.randrange(1, 200))
            case 2:
                return self._bytes(random.randrange(1, 2_000))
            case 3:
                length = random.choice((0, 3, -1, INT32_MIN, INT32_MAX, FRAME_SIZE_MAX - 4))
                return data + pack(">i", length) + self._bytes(random.randrange(300))
        return data

    def frame(self) -> bytes:
        """Return one frame, changed or not."""
        random = self._random
        makers: Sequence[Callable[[], bytes]] = (
            lambda: random.choice(self._recorded),
            self._changed_bytes,
            self._changed_bytes,
            self._changed_json,
            self._changed_json,
            self._made,
            self._made,
            self._signed,
        )
        return random.choice(makers)()

    def hello(self) -> bytes:
        """Return the first bytes of a TLS connection, changed, cut, or none at all."""
        random = self._random
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="a")
        with contextlib.suppress(ssl.SSLWantReadError):
            client.do_handshake()
        hello = outgoing.read()
        match random.randrange(5):
            case 0:
                return hello[: random.randrange(1, len(hello))]
            case 1:
                return b"\x16" + self._bytes(random.randrange(500))
            case 2:
                return hello + self._bytes(random.randrange(2_000))
            case 3:
                return hello + self.frame()
        return hello[:1] + self._flipped(hello[1:])

    def pieces(self, data: bytes) -> list[bytes]:
        """Cut bytes as a network may."""
        random = self._random
        cuts = sorted(random.randrange(len(data) + 1) for _ in range(random.choice((0, 0, 1, 3))))
        edges = [0, *cuts, len(data)]
        return [data[start:end] for start, end in itertools.pairwise(edges)]

    # -- kinds of frames

    def _changed_bytes(self) -> bytes:
        frame = self._random.choice(self._recorded)
        if self._random.randrange(4):  # its lengths stay right, so that its header is read
            return frame[:8] + self._flipped(frame[8:])
        return self._flipped(frame)

    def _changed_json(self) -> bytes:
        """Change fields of a recorded JSON header."""
        random = self._random
        frame = random.choice(self._recorded)
        size = int.from_bytes(frame[5:8])
        try:
            header: Any = json.loads(frame[8 : 8 + size])
        except ValueError:
            return self._made()
        if not isinstance(header, dict):
            return self._made()
        body = frame[8 + size :]
        for _ in range(random.randrange(1, 4)):
            fields = header.get("extFields")
            where = fields if isinstance(fields, dict) and random.randrange(3) else header
            if not where or random.randrange(8) == 0:
                where["AccessKey"] = random.choice((self._known.name, "administrator", *TEXTS))
                where["Signature"] = random.choice(TEXTS)
            else:
                where[random.choice(list(where))] = self._value()
        if random.randrange(5) == 0:
            body = self._body()
        raw = json.dumps(header, ensure_ascii=random.random() < 0.5).encode(errors="surrogatepass")
        return join_frame(HeaderType.JSON, raw, body)

    def _made(self) -> bytes:
        """Make a request of any code, with each header type."""
        random = self._random
        kind = random.choice(list(HeaderType))
        arguments = (
            self._code(),
            random.choice((1, 7, INT32_MAX, INT32_MIN, random.randrange(INT32_MAX))),
            random.choice((0, 0, 0, 0, 1, 2, 3, -1)),
            random.randrange(14),
            random.choice((0, 355, 399, 479, 32_767)),
            random.choice((None, None, "remark")),
            random.choice((None, self._fields(), self._fields())),
        )
        try:
            raw = encode_header(kind, *arguments)
        except (RemotingError, UnicodeError, OverflowError, ValueError):
            raw = self._bytes(random.randrange(100))
        if random.randrange(6) == 0:
            raw = self._flipped(raw)
        return join_frame(kind, raw, self._body())

    def _signed(self) -> bytes:
        """Sign a request, rightly or not."""
        random = self._random
        account = random.choice((self._known, self._wrong, Account("nobody", "nothing")))
        kind = random.choice(list(HeaderType))
        fields = {name: text for name, text in self._fields().items() if text.isprintable()}
        try:
            frame = signed_frame(
                account,
                self._code(),
                fields,
                self._body(),
                header_type=kind,
                flag=random.choice((0, 0, 0, 2)),
            )
        except (RemotingError, UnicodeError):
            return self._made()
        return frame if random.randrange(3) else self._flipped(frame)

    # -- parts of frames

    def _code(self) -> int:
        random = self._random
        if random.randrange(10) == 0:
            return random.choice((0, -1, 12_345, INT32_MAX, INT32_MIN, random.randrange(400)))
        return random.choice(self._codes)

    def _fields(self) -> dict[str, str]:
        random = self._random
        kind = REQUEST_HEADERS.get(random.choice(self._codes))
        names = [] if kind is None else list(names_of(kind))
        names += random.choice(([], ["AccessKey", "Signature"], ["_UNIQUE_KEY_QUERY"]))
        return {name: str(self._value()) for name in names if random.randrange(8)}

    def _value(self) -> Any:
        random = self._random
        match random.randrange(8):
            case 0:
                return random.choice(NUMBERS)
            case 1:
                return random.choice((None, True, 1.5, [], {}, {"a": ["b"]}))
            case 2 | 3:
                return str(random.randrange(100))
        return random.choice(TEXTS)

    def _body(self) -> bytes:
        random = self._random
        match random.randrange(8):
            case 0:
                return random.choice(self._recorded)[-500:]
            case 1:
                return json.dumps({"topic": "orders", "consumerGroup": "g", "mqSet": []}).encode()
            case 2:
                return b"[" * NESTING
            case 3:
                return b'{"a":' * NESTING
            case 4:
                return b"\x91" * NESTING  # MSGPACK: arrays of one
            case 5:
                return self._bytes(random.randrange(BODY_MAX))
        return b""

    def _bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)

    def _flipped(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self._random.randrange(1, 6)):
            if changed:
                changed[self._random.randrange(len(changed))] = self._random.randrange(256)
        return bytes(changed)


def _can_be_read(frame: bytes) -> bool:
    try:
        return len(FrameDecoder().receive_data(frame)) == 1
    except ProtocolError:
        return False
