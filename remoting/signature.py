"""Request signatures: HMAC-SHA1 over the ext fields and the body, as every official client signs.

The signed text of a JSON or ROCKETMQ request is the values of all its ext fields in the order of
their names (``AccessKey`` among them, ``Signature`` not), joined without separators, then the
body. Numbers keep the digits with which they were sent. A MSGPACK header has no field names, so its
signature covers the bytes of the header; see ``msgpack_header``.

Source: RocketMQ ``AclUtils#combineRequestContent``, ``AclSigner``; checked on recorded frames of
the Java, Go and C++ clients.
"""

import binascii
import hashlib
import hmac
from collections.abc import Mapping
from typing import Final, NamedTuple

ACCESS_KEY: Final = "AccessKey"
SIGNATURE: Final = "Signature"
UNIQUE_KEY_QUERY: Final = "_UNIQUE_KEY_QUERY"
"""Clients up to 4.9.3 add this field after signing, later ones sign it. (RocketMQ 4.9.8 always
leaves it out of the signed text and so rejects queries of its own clients.)
Source: ``MixAll``, ``AclClientRPCHook``, ``PlainAccessResource``."""

DIGEST_SIZE: Final = 20
"""Bytes of a signature before base64."""

_BLOCK: Final = 64  # bytes of a SHA-1 block, to which HMAC pads its key. Source: RFC 2104.
_INNER: Final = bytes(byte ^ 0x36 for byte in range(256))
_OUTER: Final = bytes(byte ^ 0x5C for byte in range(256))


class Signer:
    """Signs with one secret; hashes the two padded keys once, not for each request."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, secret: str) -> None:
        key = secret.encode()
        if len(key) > _BLOCK:
            key = hashlib.sha1(key, usedforsecurity=False).digest()
        key = key.ljust(_BLOCK, b"\0")
        self._inner = hashlib.sha1(key.translate(_INNER), usedforsecurity=False)
        self._outer = hashlib.sha1(key.translate(_OUTER), usedforsecurity=False)

    def digest(self, text: bytes, body: bytes = b"") -> bytes:
        """Return the 20 bytes of the signature of ``text`` followed by ``body``."""
        inner = self._inner.copy()
        inner.update(text)
        inner.update(body)
        outer = self._outer.copy()
        outer.update(inner.digest())
        return outer.digest()

    def sign(self, text: bytes, body: bytes = b"") -> str:
        """Return the signature in base64, as official clients send it."""
        return binascii.b2a_base64(self.digest(text, body), newline=False).decode()

    def verify(self, signature: str | bytes, text: bytes, body: bytes = b"") -> bool:
        """Compare a signature, given as base64 text or as 20 bytes, in constant time."""
        digest = self.digest(text, body)
        if isinstance(signature, bytes):
            return hmac.compare_digest(digest, signature)
        expected = binascii.b2a_base64(digest, newline=False)
        return hmac.compare_digest(expected, signature.encode())


class Identity(NamedTuple):
    """The access key of the signer of requests, and its secret as a ``Signer``."""

    access_key: str
    signer: Signer


def signed_text(fields: Mapping[str, str], *, without_unique_key_query: bool = False) -> bytes:
    """Return the part of the signed text that comes from the ext fields."""
    names = sorted(fields)
    if SIGNATURE in fields:
        names.remove(SIGNATURE)
    if without_unique_key_query and UNIQUE_KEY_QUERY in fields:
        names.remove(UNIQUE_KEY_QUERY)
    return "".join(map(fields.__getitem__, names)).encode()


def signed_fields(
    fields: Mapping[str, str], body: bytes, access_key: str, signer: Signer
) -> dict[str, str]:
    """Return the ext fields of a request with access key and signature added.

    ``fields`` must not contain a signature.
    """
    signed = {**fields, ACCESS_KEY: access_key}
    text = "".join([signed[name] for name in sorted(signed)])
    signed[SIGNATURE] = signer.sign(text.encode(), body)
    return signed
