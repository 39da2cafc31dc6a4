"""What tests of access control use: accounts, signed requests, and a broker that asks for them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import trustme

from halfmq.remoting import msgpack_header
from halfmq.remoting.codes import FLAG_ONE_WAY, VERSION, HeaderType, LanguageCode
from halfmq.remoting.ext_fields import Header, texts_of
from halfmq.remoting.serialization import encode_header, join_frame
from halfmq.remoting.signature import Signer, signed_fields
from tests.support.peers import Peer

_opaques = itertools.count(1)


class Account(NamedTuple):
    """Somebody who signs requests."""

    name: str
    secret: str

    @property
    def signer(self) -> Signer:
        return Signer(self.secret)


ADMIN: Final = Account("administrator", "secret-of-admin")
PUBLISHER: Final = Account("publisher", "secret-of-publisher")
SUBSCRIBER: Final = Account("subscriber", "secret-of-subscriber")
STRANGER: Final = Account("stranger", "secret-of-stranger")
"""Has rights on other topics and groups."""


def signed_frame(
    account: Account,
    code: int,
    header: Header | Mapping[str, str] | None = None,
    body: bytes = b"",
    *,
    opaque: int | None = None,
    header_type: HeaderType = HeaderType.JSON,
    flag: int = 0,
) -> bytes:
    """Return a request as a client that signs sends it."""
    opaque = next(_opaques) if opaque is None else opaque
    language = LanguageCode.JAVA
    if header_type is HeaderType.MSGPACK:
        raw = msgpack_header.encode(code, opaque, flag, language, VERSION, None, header)
        raw = msgpack_header.sign(raw, body, account.name, account.signer)
    else:
        texts = signed_fields(texts_of(header) or {}, body, account.name, account.signer)
        raw = encode_header(header_type, code, opaque, flag, language, VERSION, None, texts)
    return join_frame(header_type, raw, body)


class SignedPeer(Peer):
    """A client's connection whose requests are signed."""

    def __init__(
        self,
        account: Account,
        group: str = "producers",
        header_type: HeaderType = HeaderType.JSON,
        name: str = "",
    ) -> None:
        super().__init__(group, header_type, name or account.name)
        self.account = account

    def frame(
        self, code: int, header: Header | None, body: bytes = b"", *, one_way: bool = False
    ) -> tuple[int, bytes]:
        opaque = next(self._opaques)
        flag = FLAG_ONE_WAY if one_way else 0
        return opaque, signed_frame(
            self.account,
            code,
            header,
            body,
            opaque=opaque,
            header_type=self.header_type,
            flag=flag,
        )


def certificate(folder: Path) -> Mapping[str, str]:
    """Write a certificate for 127.0.0.1, its key and `ca.pem`; return the settings that use it."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    (folder / "cert.pem").write_bytes(chain)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    return {
        "tlsServerCertPath": str(folder / "cert.pem"),
        "tlsServerKeyPath": str(folder / "key.pem"),
    }
