"""Address patterns of access control: one host, a list, a range, a network, or all.

There are two notations. A plain ACL file has ``*``, ``10.1.2.3``, ``10.1.2.3,10.1.2.4``,
``10.1.2.{3,4}``, ``10.1.2.1-20`` and ``10.1.*.*``, also for IPv6; each group may be a range or a
star. Policies have hosts and networks such as ``10.1.2.0/24``.

RocketMQ compares only the groups up to the first range or star: its ``10.1.5-9.3`` matches
``10.1.7.200``. Here every group counts, because addresses are trusted without a signature.
Source: RocketMQ 4.9.8 ``RemoteAddressStrategyFactory``, 5.3 ``IPAddressUtils``.
"""

import ipaddress
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final, TypeAlias

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

AddressPattern: TypeAlias = Callable[[Address], bool]
"""Returns whether a peer's address matches."""

EXPECTED: Final = (
    "an address like 10.1.2.3, a list (10.1.2.3,10.1.2.4 or 10.1.2.{3,4}), a range (10.1.2.1-20 or "
    "10.1.*.*), a network (10.1.2.0/24) or *"
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
            return any_of([_one(head + member) for member in _members(members)])
        return any_of([_one(part) for part in _members(text)])
    except ValueError as error:
        raise AddressPatternError(text) from error


def any_of(patterns: Iterable[AddressPattern]) -> AddressPattern:
    """Return a pattern that matches what any of these match."""
    alternatives = tuple(patterns)
    return lambda address: any(pattern(address) for pattern in alternatives)


def _members(text: str) -> list[str]:
    """Return what commas separate, without empty members; at least one."""
    members = [member.strip() for member in text.split(",")]
    return [member for member in members if member] or [""]


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
    """Return the pattern of an address whose groups are numbers, ranges and stars."""
    six = ":" in text
    groups = _groups_of_six(text) if six else text.split(".")
    version, count, width, base, largest = (6, 8, 2, 16, 0xFFFF) if six else (4, 4, 1, 10, 0xFF)
    bounds: list[tuple[int, int]] = []
    for group in groups:
        low, dash, high = group.strip().partition("-")
        if low == "*" and not dash:
            low, dash, high = "0", "-", f"{largest:x}" if six else f"{largest}"
        bounds.append((int(low, base), int(high if dash else low, base)))
    if len(bounds) != count or not all(0 <= low <= high <= largest for low, high in bounds):
        raise ValueError(text)

    def within(address: Address) -> bool:
        if address.version != version:
            return False
        packed = address.packed
        return all(
            low <= int.from_bytes(packed[index * width : (index + 1) * width]) <= high
            for index, (low, high) in enumerate(bounds)
        )

    return within


def _groups_of_six(text: str) -> list[str]:
    """Return the groups of an IPv6 pattern, with those that ``::`` or a last star stands for."""
    head, gap, tail = (part.strip() for part in text.partition("::"))
    first = head.split(":") if head else []
    last = tail.split(":") if tail else []
    left_out = 8 - len(first) - len(last)
    if gap:
        return first + ["0"] * left_out + last
    return first + ["*"] * (left_out if first[-1] == "*" else 0)
