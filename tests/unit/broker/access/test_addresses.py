"""Address patterns: every notation of a plain ACL file and of policies."""

from __future__ import annotations

import ipaddress

import pytest

from halfmq.broker.access.addresses import (
    AddressPatternError,
    address_of,
    parse_address_pattern,
)


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("10.1.2.3", ["10.1.2.3"], ["10.1.2.4", "::a01:203"]),
        ("*", ["10.1.2.3", "::1"], []),
        ("*.*.*.*", ["255.0.0.1", "::1"], []),
        ("10.1.2.3,10.1.2.9", ["10.1.2.3", "10.1.2.9"], ["10.1.2.4"]),
        ("10.1.2.{3,9}", ["10.1.2.3", "10.1.2.9"], ["10.1.2.4", "10.1.3.3"]),
        ("10.1.2.1-20", ["10.1.2.1", "10.1.2.20"], ["10.1.2.0", "10.1.2.21", "10.1.3.5"]),
        ("10.1.2.*", ["10.1.2.0", "10.1.2.255"], ["10.1.3.0"]),
        ("10.1.*.*", ["10.1.0.0", "10.1.255.1"], ["10.2.0.0"]),
        ("10.1.1-20.*", ["10.1.1.0", "10.1.20.255"], ["10.1.0.9", "10.1.21.0"]),
        ("10.1.2.0/24", ["10.1.2.200"], ["10.1.3.1", "::1"]),
        ("2001:db8:0:0:0:0:0:7", ["2001:db8::7"], ["2001:db8::8"]),
        ("2001:db8::{7,8}", ["2001:db8::7", "2001:db8::8"], ["2001:db8::9"]),
        ("1:2:3:4:5:6:7:1-ff", ["1:2:3:4:5:6:7:ff"], ["1:2:3:4:5:6:7:100", "10.0.0.1"]),
        ("1:2:3:4:5:6:7:*", ["1:2:3:4:5:6:7:ffff"], ["1:2:3:4:5:6:8:0"]),
        ("2001:db8::/32", ["2001:db8:1::1"], ["2001:db9::1"]),
    ],
)
def test_patterns_match_as_rocketmq_documents(
    pattern: str, inside: list[str], outside: list[str]
) -> None:
    """One host, a list, a set, a range, a star and a network, for IPv4 and IPv6."""
    meant = parse_address_pattern(pattern)

    assert [meant(ipaddress.ip_address(text)) for text in inside] == [True] * len(inside)
    assert [meant(ipaddress.ip_address(text)) for text in outside] == [False] * len(outside)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost",
        "10.1.2",
        "10.1.2.256",
        "10.1.2.9-3",
        "10.*.2.3",
        "10.1-2.3.4",
        "10.1.2-3.4",
        "10.1.2.{}",
        "10.1.2.{3,x}",
        "10.1.2.3,",
        "10.1.2.-3",
        "1:2:3:*",
        "10.1.2.0/33",
    ],
)
def test_an_invalid_pattern_is_refused_with_the_valid_forms(text: str) -> None:
    """An invalid pattern must not match nobody or everybody."""
    with pytest.raises(AddressPatternError, match="is not an address like") as caught:
        parse_address_pattern(text)

    assert caught.value.text == text


def test_an_ipv4_peer_of_an_ipv6_socket_is_its_ipv4_address() -> None:
    """A listener on ``::`` sees ``::ffff:10.1.2.3``; rules are written for 10.1.2.3."""
    mapped = ipaddress.ip_address("::ffff:10.1.2.3").packed

    assert address_of(mapped) == ipaddress.ip_address("10.1.2.3")
