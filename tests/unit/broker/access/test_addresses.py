"""Address patterns: every notation of a plain ACL file and of policies."""

from __future__ import annotations

import ipaddress

import pytest

from halfmq.broker.access.addresses import AddressPatternError, address_of, parse_address_pattern


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
        ("*:*:*:*:*:*:*:*", ["10.1.2.3", "::1"], []),
        ("10.*.*.*", ["10.0.0.0", "10.255.255.255"], ["11.0.0.0", "::a00:1"]),
        ("192.100-150.*.*", ["192.100.0.0", "192.150.9.9"], ["192.99.0.0", "192.151.0.0"]),
        ("192.168.100-200.10-20", ["192.168.150.15"], ["192.168.99.15", "192.168.150.21"]),
        ("192.168.*.1", ["192.168.7.1"], ["192.168.7.2", "192.169.7.1"]),
        ("10.1-2.3.4", ["10.1.3.4", "10.2.3.4"], ["10.3.3.4", "10.1.3.5"]),
        ("10.1.2.3,", ["10.1.2.3"], ["10.1.2.4"]),
        ("10.1.2.{3,}", ["10.1.2.3"], ["10.1.2.4"]),
        ("1050::5:600:300c:1,1050::5:600:300c:2", ["1050::5:600:300c:2"], ["1050::5:600:300c:3"]),
        ("1050::5:600:300C:3261:{1,a}", ["1050::5:600:300c:3261:a"], ["1050::5:600:300c:3261:b"]),
        ("1050::0005:0600:1-200", ["1050::5:600:200"], ["1050::5:600:0", "1050:1::5:600:1"]),
        ("1050::300c:1-20:*", ["1050::300c:1:ffff"], ["1050::300c:21:0", "1050::1:300c:1:0"]),
        ("1050:5:600:*", ["1050:5:600::", "1050:5:600:1:2:3:4:5"], ["1050:5:601::"]),
        ("1050:5:1-20:*", ["1050:5:20:1:2:3:4:5"], ["1050:5:21::"]),
    ],
)
def test_patterns_match_as_rocketmq_documents(
    pattern: str, inside: list[str], outside: list[str]
) -> None:
    """One host, a list, a set, ranges, stars and a network, for IPv4 and IPv6."""
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
        "10.1.*",
        "10.1.2.*.4",
        "10.256-300.2.3",
        "10.1.2.{}",
        "10.1.2.{3,x}",
        "10.1.2.{3},4",
        "10.1.{2,3}.4",
        ",",
        "10.1.2.-3",
        "1:2:3:1-20",
        "1:2:3:*:5",
        "1::2::*",
        "1:2:3:4:5:6:7:8::1-2",
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
