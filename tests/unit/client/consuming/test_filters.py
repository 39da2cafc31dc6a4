"""Filter expressions are read when subscribing, and tags keep to what they can name."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmq.client import (
    ConfigurationError,
    Consumer,
    FilterError,
    InvalidMessageError,
    Message,
    SqlFilter,
    blocking,
)
from halfmq.client.arguments import is_tag
from halfmq.client.consuming.filters import normalise_filter, sql_error
from halfmq.remoting.bodies import subscription_data

EXPRESSIONS = st.text(st.sampled_from("ab é=|*,> \t\u00a0\ud800") | st.characters(), max_size=12)


def read(expression: str) -> str | FilterError:
    """The normal form, or why there is none."""
    try:
        return normalise_filter("orders", expression)
    except FilterError as error:
        return error


@pytest.mark.parametrize(
    ("expression", "position"),
    [
        ("a > 5", 2),
        ("a,b", 1),
        ("a | b", 2),
        ("a|b", 1),
        ("a ||| b", 4),
        ("a ; b", 2),
        ("a OR b", 2),
        ("created || is paid", 14),
        ("a && b", 2),
        ("a = 'x'", 2),
        ("color in ('red')", 6),
        ("'a'", 0),
        ("", 0),
        ("  ", 2),
        ("||", 0),
        ("a ||", 4),
        ("|| a", 0),
        ("a || || b", 5),
        ("a || *", 5),
        ("created*", 7),
        ("a\u00a0|| b", 1),
        ("a\x00", 1),
        ("\ud800", 0),
    ],
)
def test_a_filter_that_no_message_passes_is_refused_at_its_mistake(
    expression: str, position: int
) -> None:
    """Both consumers say where and what to write; before, they waited for ever."""
    for kind in (Consumer, blocking.Consumer):
        with pytest.raises(FilterError) as refusal:
            kind("billing", {"orders": expression})
        error = refusal.value
        assert (error.topic, error.expression) == ("orders", expression)
        assert error.position == position
        assert 'expected "*", or tags separated by ||' in str(error)


def test_the_mistake_is_shown_with_a_caret() -> None:
    """A person finds it without counting."""
    with pytest.raises(FilterError) as refusal:
        Consumer("billing", {"orders": "amount > 5"})

    assert str(refusal.value).splitlines() == [
        (
            "filter of topic orders, position 7 (the first is 0): > cannot be part of a tag; "
            'SQL92 expressions are given as SqlFilter(…); expected "*", or tags separated by || '
            'such as "created || paid"'
        ),
        "    amount > 5",
        "           ^",
    ]
    copy = pickle.loads(pickle.dumps(refusal.value))
    assert (str(copy), copy.position) == (str(refusal.value), 7)
    assert isinstance(copy, ConfigurationError)


def test_only_the_surroundings_of_a_mistake_are_shown() -> None:
    """A filter of a megabyte makes no error of a megabyte."""
    with pytest.raises(FilterError) as refusal:
        Consumer("billing", {"orders": "a || " * 100_000 + "b > 5"})

    first, line, caret = str(refusal.value).splitlines()
    assert line[caret.index("^")] == ">"
    assert len(first) + len(line) < 400


def test_the_mistake_of_an_sql_filter_is_where_the_broker_says() -> None:
    """Ours or an official one."""
    our_remark = "SQL92 filter is wrong at character 4: write = for equality"
    official_remark = (
        'org.apache.rocketmq.filter.parser.ParseException: Encountered " "=" "= "" at line 1, '
        'column 4.\nWas expecting one of:\n    "NOT" ...\n'
    )
    ours = sql_error("orders", "a == 5", our_remark)
    official = sql_error("orders", "a == 5", official_remark)
    unknown = sql_error("orders", "a == 5", "no reason")

    assert str(ours).splitlines() == [
        (
            "filter of topic orders, position 3 (the first is 0): write = for equality; "
            "expected an SQL92 expression"
        ),
        "    a == 5",
        "       ^",
    ]
    assert (official.position, official.reason) == (3, official_remark.splitlines()[0])
    assert (unknown.position, unknown.reason) == (0, "no reason")
    assert str(pickle.loads(pickle.dumps(ours))) == str(ours)


@pytest.mark.parametrize("expression", [None, 5, "", "  "])
def test_an_sql_filter_that_is_no_text_is_named(expression: object) -> None:
    with pytest.raises(ConfigurationError, match="expected an SQL92 expression"):
        SqlFilter(expression)  # type: ignore[arg-type]


@pytest.mark.parametrize("expression", [None, 5, ["a", "b"]])
def test_a_filter_that_is_no_text_is_named(expression: object) -> None:
    """A list of tags is an easy mistake; the error says what is expected."""
    with pytest.raises(ConfigurationError, match='expected text, "\\*", or tags separated by'):
        Consumer("billing", {"orders": expression})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("expression", "normal"),
    [
        ("*", "*"),
        (" * ", "*"),
        ("created", "created"),
        ("created||paid", "created || paid"),
        ("\n  created ||\n  paid\t|| created", "created || paid"),
        ("支付成功 || größe || v1.2/eu:a-b_c#@$%+~", "支付成功 || größe || v1.2/eu:a-b_c#@$%+~"),
    ],
)
def test_tags_in_any_script_and_layout_are_accepted(expression: str, normal: str) -> None:
    """Blanks around tags do not count, and brokers get one form of each filter."""
    assert normalise_filter("orders", expression) == normal


@given(expression=EXPRESSIONS)
def test_what_is_accepted_means_the_same_to_brokers_and_what_is_not_has_a_place(
    expression: str,
) -> None:
    """No text is accepted here whose tags a broker would read otherwise."""
    normal = read(expression)
    if isinstance(normal, FilterError):
        assert 0 <= normal.position <= len(expression)
        assert str(normal)
        return
    tags = subscription_data("orders", normal).tags_set
    assert tags == frozenset(normal.split(" || ")) - {"*"}
    assert all(map(is_tag, tags))
    assert normalise_filter("orders", normal) == normal


@given(tag=EXPRESSIONS)
def test_a_tag_can_be_sent_exactly_if_it_can_be_subscribed_to(tag: str) -> None:
    """No message of this client has a tag that its consumers cannot name."""
    try:
        Message("orders", b"x", tags=tag)
        sent = True
    except InvalidMessageError:
        sent = False

    assert sent == (read(tag) == tag != "*")
