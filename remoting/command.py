"""RemotingCommand: one decoded frame, independent of the type of its header."""

from typing import TypeVar

import msgspec

from .codes import FLAG_ONE_WAY, FLAG_RESPONSE, HeaderType, LanguageCode

H = TypeVar("H")


class RemotingCommand(msgspec.Struct, gc=False):
    """One request or response. Written once by the decoder, then only read.

    ``gc=False``: a command holds no reference back to itself, and millions of them would only
    feed the garbage collector.
    """

    code: int
    """Request code or response code, by ``is_response``."""
    opaque: int = 0
    """The request id that the sender chose, int32; the response repeats it."""
    flag: int = 0
    language: int = LanguageCode.JAVA
    version: int = 0
    remark: str | None = None
    header: object = None
    """The ext fields. A request with a known code has its typed struct
    (``header_tables.REQUEST_HEADERS``); any other command has a ``dict[str, str]``, or None if the
    frame had none. A response with a MSGPACK header has the undecoded ``msgspec.Raw``, because only
    the caller of the request knows the class: see ``header_tables.response_header``."""
    body: bytes = b""
    """Empty if the frame had none: the wire does not distinguish an empty body from no body."""
    header_type: int = HeaderType.JSON
    header_error: str | None = None
    """Why the ext fields of a known request do not fit its struct, as text for the error response
    ("topic is missing"). ``header`` is then the dict."""
    raw_header: bytes = b""
    """The header as received: signatures cover all ext fields, unknown ones too."""
    texts: dict[str, str] | None = None
    """All ext fields of a ROCKETMQ header as text, before they were typed."""
    subject: object = None
    """Who signed a request, set by the access control of the broker; never on the wire."""

    @property
    def is_response(self) -> bool:
        return self.flag & FLAG_RESPONSE != 0

    @property
    def is_one_way(self) -> bool:
        return self.flag & FLAG_ONE_WAY != 0

    def header_as(self, kind: type[H]) -> H:
        """Return the header, which the decoder made of this class."""
        header = self.header
        assert isinstance(header, kind)
        return header
