"""Address patterns of access control: one host, a list, a range, a network, or all.

There are two notations. A plain ACL file has ``*``, ``10.1.2.3``, ``10.1.2.3,10.1.2.4``,
``10.1.2.{3,4}``, ``10.1.2.1-20`` and ``10.1.2.*`` (ranges and stars in the last two groups; also
for IPv6, with eight groups). Policies have hosts and networks such as ``10.1.2.0/24``.
Source: RocketMQ 4.9.8 ``RemoteAddressStrategyFactory``, 5.3 ``IPAddressUtils``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final, TypeAlias

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

AddressPattern: TypeAlias = Callable[[Address], bool]
"""Returns whether a peer's address matches."""

EXPECTED: Final = (
    "an address like 10.1.2.3, a list (10.1.2.3,10.1.2.4 or 10.1.2.{3,4}), a range (10.1.2.1-20 or "
    "10.1.2.*), a network (10.1.2.0/24) or *"
)
_EVERYONE: Final = frozenset({"*", "*.*.*.*", "*:*:*:*:*:*:*:*"})


class AddressPatternError(ValueError):
    """A text is not an address pattern."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"{self.text!r} is not {EXPECTED}"


@lru_cache(maxsize=4096)  # peers send many requests each; an address takes 2 us to make
def address_of(packed: bytes) -> Address:
    """Return the address of 4 or 16 packed bytes; an IPv4 peer of an IPv6 socket is IPv4."""
    address = ipaddress.ip_address(packed)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def parse_address_pattern(text: str) -> AddressPattern:
    """Return the pattern that a text describes.

    Raises:
        AddressPatternError: The text is not a pattern.
    """
    text = text.strip()
    try:
        if text in _EVERYONE:
            return _everyone
        if text.endswith("}"):
            head, _, members = text[:-1].rpartition("{")
            return any_of([_one(head + member.strip()) for member in members.split(",")])
        return any_of([_one(part.strip()) for part in text.split(",")])
    except ValueError as error:
        raise AddressPatternError(text) from error


def any_of(patterns: Iterable[AddressPattern]) -> AddressPattern:
    """Return a pattern that matches what any of these match."""
    alternatives = tuple(patterns)
    return lambda address: any(pattern(address) for pattern in alternatives)


def _everyone(_address: Address) -> bool:
    return True


def _one(text: str) -> AddressPattern:
    if "/" in text:
        network = ipaddress.ip_network(text, strict=False)
        return lambda address: address.version == network.version and address in network
    if "*" in text or "-" in text:
        return _range(text)
    host = ipaddress.ip_address(text)
    return lambda address: address == host


def _range(text: str) -> AddressPattern:
    """Return the pattern of an address whose last one or two groups are a range or a star."""
    six = ":" in text
    separator, base, largest = (":", 16, 0xFFFF) if six else (".", 10, 0xFF)
    groups = text.split(separator)
    if len(groups) != (8 if six else 4):
        raise ValueError(text)
    bounds: list[tuple[int, int]] = []
    for group in groups:
        low, dash, high = group.strip().partition("-")
        if low == "*" and not dash:
            bounds.append((0, largest))
        else:
            bounds.append((int(low, base), int(high if dash else low, base)))
    for low_number, high_number in bounds:
        if not 0 <= low_number <= high_number <= largest:
            raise ValueError(text)
    # RocketMQ does not accept "10.*.3.4" either.
    if any(low != high for low, high in bounds[:-2]) or (
        bounds[-2][0] != bounds[-2][1] and bounds[-1] != (0, largest)
    ):
        raise ValueError(text)
    version, width = (6, 2) if six else (4, 1)

    def within(address: Address) -> bool:
        if address.version != version:
            return False
        packed = address.packed
        return all(
            low <= int.from_bytes(packed[index * width : (index + 1) * width]) <= high
            for index, (low, high) in enumerate(bounds)
        )

    return within
