"""Subscriptions of a consumer: what it asks for, and how it registers them with brokers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from itertools import product

from halfmq.remoting.bodies import (
    ConsumeFromWhere,
    ConsumerData,
    ConsumeType,
    HeartbeatData,
    MessageModel,
    SubscriptionData,
    encode_subscription_check,
    subscription_data,
)
from halfmq.remoting.codes import RequestCode, ResponseCode

from ..arguments import is_topic, topic_error
from ..errors import FILTER_EXPECTED, ConfigurationError
from ..net.response_errors import expect_success
from ..net.session import Session, wall_clock_ms
from .filters import SQL92, SqlFilter, normalise_filter, sql_error
from .offsets import StartFrom


def subscribe(subscriptions: Mapping[str, str | SqlFilter]) -> dict[str, SubscriptionData]:
    """Return the subscriptions by topic.

    Raises:
        ConfigurationError: A topic or a filter cannot be used; says which.
    """
    given: object = subscriptions
    if not isinstance(given, Mapping) or not given:
        raise ConfigurationError(
            "subscriptions", given, 'a mapping of topics to filters, such as {"orders": "*"}'
        )
    version = wall_clock_ms()
    found: dict[str, SubscriptionData] = {}
    for topic, expression in subscriptions.items():
        if not is_topic(topic):
            raise ConfigurationError("subscriptions", topic, f"a topic: {topic_error(topic)}")
        if isinstance(expression, SqlFilter):
            found[topic] = subscription_data(topic, expression.expression, SQL92, version)
            continue
        if not isinstance(expression, str):
            raise ConfigurationError("subscriptions", expression, f"text, {FILTER_EXPECTED}")
        wanted = normalise_filter(topic, expression)
        found[topic] = subscription_data(topic, wanted, sub_version=version)
    return found


async def check_sql_filters(
    session: Session, group: str, subscriptions: Mapping[str, SubscriptionData]
) -> None:
    """Send the SQL92 filters to every broker, which checks them.

    Raises:
        FilterError: A filter is wrong.
        BrokerRefusedError: A broker does not support SQL92 filters.
    """
    filters = [one for one in subscriptions.values() if one.expression_type == SQL92]
    for subscription, address in product(filters, sorted(session.routes.addresses)):
        body = encode_subscription_check(session.client_id, group, subscription)
        answer = await session.call(address, RequestCode.CHECK_CLIENT_CONFIG, None, body)
        if answer.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED:
            raise sql_error(subscription.topic, subscription.sub_string, answer.remark or "")
        expect_success(answer)


def consumer_heartbeat(
    client_id: str,
    group: str,
    subscriptions: Mapping[str, SubscriptionData],
    start_from: StartFrom,
    *,
    broadcasting: bool,
) -> HeartbeatData:
    """Return the heartbeat that registers a consumer."""
    if isinstance(start_from, datetime):
        where = ConsumeFromWhere.CONSUME_FROM_TIMESTAMP
    elif start_from == "first":
        where = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
    else:
        where = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    consumer = ConsumerData(
        group_name=group,
        consume_from_where=where,
        consume_type=ConsumeType.CONSUME_PASSIVELY,
        message_model=MessageModel.BROADCASTING if broadcasting else MessageModel.CLUSTERING,
        subscription_data_set=tuple(subscriptions.values()),
    )
    return HeartbeatData(client_id=client_id, consumer_data_set=(consumer,))
