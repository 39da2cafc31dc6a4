"""Settings of the client: addresses, and values that cannot work."""

from __future__ import annotations

import pickle

import pytest

from halfmq.client import (
    BrokerRefusedError,
    ClientConfig,
    ConfigurationError,
    ConnectError,
    Consumer,
    DecisionConflictError,
    MessageTooLargeError,
    Producer,
    SendTimeoutError,
)
from halfmq.client.config import DEFAULT_NAMESRV, parse_addresses


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("a:9876", ["a:9876"]),
        ("a", ["a:9876"]),
        ("a:1;b:2", ["a:1", "b:2"]),
        (" a:1 ; ", ["a:1"]),
        ("a:1,b:2, c", ["a:1", "b:2", "c:9876"]),
        ("a:1,[::1]:2;::1", ["a:1", "[::1]:2", "[::1]:9876"]),
        ("[::1]", ["[::1]:9876"]),
        ("mq_1.example-2.org", ["mq_1.example-2.org:9876"]),
        ("[::1]:9999", ["[::1]:9999"]),
        ("::1", ["[::1]:9876"]),
    ],
)
def test_name_servers_are_read_as_users_write_them(text: str, addresses: list[str]) -> None:
    """Several are separated by a semicolon or a comma, and the port may be left out."""
    assert parse_addresses(text) == addresses


@pytest.mark.parametrize("text", ["", ";", ":9876", "a:0", "a:70000", "a:b", "[::1"])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    """A wrong address is an error of the constructor, not a later timeout."""
    with pytest.raises(ConfigurationError, match="namesrv"):
        ClientConfig(namesrv=text)


def test_the_name_server_comes_from_the_argument_then_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NAMESRV_ADDR is what RocketMQ's own clients read; an argument overrides it."""
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    assert ClientConfig().namesrv_addresses == [DEFAULT_NAMESRV]

    monkeypatch.setenv("NAMESRV_ADDR", "env:1")
    assert ClientConfig().namesrv_addresses == ["env:1"]
    assert Producer("g", namesrv="arg:2").config.namesrv_addresses == ["arg:2"]


@pytest.mark.parametrize(
    "settings",
    [
        {"send_timeout": 0.0},
        {"in_flight_max": -1},
        {"header_type": "xml"},
        {"reconnect_delay_min": 3.0, "reconnect_delay_max": 1.0},
    ],
)
def test_a_value_out_of_range_is_refused(settings: dict[str, object]) -> None:
    """The error names the setting, its value and what was expected."""
    with pytest.raises(ConfigurationError) as caught:
        ClientConfig(**settings)  # type: ignore[arg-type]

    assert caught.value.name in settings
    assert caught.value.expected in str(caught.value)


@pytest.mark.parametrize("group", ["", "a b", "DEFAULT_PRODUCER", "DEFAULT_CONSUMER", "x" * 300])
def test_a_group_name_that_brokers_refuse_is_refused_here(group: str) -> None:
    """Otherwise the first send would fail."""
    with pytest.raises(ConfigurationError, match="group"):
        Producer(group)


@pytest.mark.parametrize(
    "arguments",
    [
        {"subscriptions": {}},
        {"subscriptions": {"bad topic": "*"}},
        {"subscriptions": {"orders": "||"}},
        {"start_from": "yesterday"},
        {"ack_timeout": 0},
        {"retries_max": -1},
    ],
)
def test_a_consumer_refuses_arguments_that_cannot_work(arguments: dict[str, object]) -> None:
    """Otherwise it would consume nothing, or other messages than intended."""
    with pytest.raises(ConfigurationError):
        Consumer("g", **({"subscriptions": {"orders": "*"}} | arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error",
    [
        BrokerRefusedError(1, "x"),
        DecisionConflictError(604, "x", "id", "COMMIT"),
        ConnectError("a:1", "refused"),
        SendTimeoutError("a:1", 310, 3.0, 2),
        MessageTooLargeError("body", 5, 4),
        ConfigurationError("a", 1, "b"),
    ],
)
def test_errors_survive_pickling(error: Exception) -> None:
    """Errors cross process borders in pools and in Spark."""
    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert str(copy) == str(error)


@pytest.mark.parametrize(
    ("code", "retriable"),
    [(1, True), (2, True), (14, True), (16, False), (13, False), (604, False)],
)
def test_a_refusal_is_retriable_by_its_code(code: int, retriable: bool) -> None:
    """The codes on which the official client retries, but 16: a permission stays missing."""
    assert BrokerRefusedError(code, "").retriable is retriable
