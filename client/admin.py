"""Admin: decide transactions, administer topics, groups, users and permissions.

::

    async with Admin() as admin:
        async for transaction in admin.transactions(state="parked"):
            print(transaction.transaction_id, transaction.age, transaction.parked_reason)
        await admin.commit(transaction.half_message_id, reason="the order is in the database")

A transaction has two ids. Its ``transaction_id`` is the unique key of the (first) message, and is
``tx.id`` for the producer, ``message.transaction_id`` for the checker, and the id of the ledger's
row. Its ``half_message_id`` is the offset id of its half, and is ``message.half_message_id`` for
consumers. Methods accept either; only the second also identifies a decided transaction. They query
all brokers of the cluster.

The requests are halfmq's own. A broker of Apache RocketMQ has no list of undecided transactions and
accepts decisions from producers only; it supports ``resume`` for a parked message, and ``metrics``.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeAlias

from halfmq.remoting.admin_headers import CreateTopicRequestHeader
from halfmq.remoting.bodies import HeartbeatData, decode_table
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.consumer_bodies import decode_consumers
from halfmq.remoting.errors import ProtocolError
from halfmq.remoting.ext_fields import Header
from halfmq.remoting.headers import (
    QueryConsumersRequestHeader,
    QueryConsumersResponseHeader,
    ResumeCheckHalfMessageRequestHeader,
)
from halfmq.remoting.transaction_bodies import TransactionInfo, decode_transactions
from halfmq.remoting.transaction_headers import (
    DecideTransactionRequestHeader,
    DecideTransactionResponseHeader,
    QueryTransactionsRequestHeader,
    QueryTransactionsResponseHeader,
)
from halfmq.store.format.ids import parse_offset_message_id, unpack_host

from .access import Acl, AclEntry, PolicyType, User, subject_of, user_to_info
from .arguments import check_count, check_kind, check_optional_text, check_text
from .config import ClientConfig, join_address
from .credentials import CredentialsSource
from .errors import (
    AccessDeniedError,
    BadAnswerError,
    ConfigurationError,
    ConnectError,
    DecisionConflictError,
    TransactionNotFoundError,
    UnsupportedRequestError,
)
from .groups import ConsumerGroup, GroupCollector
from .net.access_requests import AccessRequests
from .net.base_client import BaseClient
from .net.broker_requests import BrokerRequests
from .net.response_errors import error_from_response
from .net.session import Session, expect_success, typed
from .net.topic_requests import TopicRequests

PAGE_SIZE: Final = 500
"""Transactions in one request, about 150 kB of answer."""

GROUP: Final = "halfmq-admin"
"""The name of this client in errors; it is not sent to brokers."""

_DEFAULT_TOPIC: Final = "TBW102"  # as RocketMQ's tools name it; brokers ignore it here

State: TypeAlias = Literal["prepared", "parked"]
Action: TypeAlias = Literal["commit", "rollback", "resume"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingTransaction:
    """One undecided transaction, in the state at the time of the request."""

    half_message_id: str
    """The ``half_message_id`` of the (first) message that a commit delivers."""
    transaction_id: str
    """The id that producer, checker and ledger use; unique unless the producer reuses it."""
    group: str
    """The producer group, whose members answer checks."""
    topic: str
    """The topic to which a commit delivers."""
    keys: str
    state: str
    """``prepared``: it is checked; ``parked``: the checks have ended without a decision."""
    age: float
    """Seconds since it was stored, by the broker's clock."""
    prepared_at: datetime
    owner: str | None
    """``host:port`` of the producer that prepared it, while it is connected."""
    checks_sent: int
    checks_delivered: int
    """Sent checks that reached a producer; only these count towards parking."""
    checks_answered: int
    next_check: float | None
    """Seconds until the next check; None: none is planned."""
    parked_reason: str | None
    messages: int
    """How many messages a commit delivers."""
    broker_name: str
    offset: int
    """Physical offset of the half in its broker's commit log."""


_READ: Final = 4  # bits of a topic's perm
_WRITE: Final = 2
_QUEUES_MAX: Final = 1_024  # of a topic on one halfmq broker


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A topic of one broker."""

    name: str
    broker_name: str
    read_queues: int
    """Queues that consumers read; less than ``write_queues`` only for a moment, when it shrinks."""
    write_queues: int
    """Queues that producers send to."""
    readable: bool
    writable: bool
    attributes: Mapping[str, str]
    """Such as ``message.type``; see RocketMQ's ``TopicAttributes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Messages of a period."""

    messages: int
    per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """How many messages were stored in a topic, or delivered to a group."""

    minute: Counted
    """The last minute; at most ten seconds old, as are the others."""
    hour: Counted
    day: Counted


def _topic_from_entry(name: str, entry: Mapping[str, Any], broker_name: str) -> Topic:
    perm = int(entry.get("perm", _READ | _WRITE))
    return Topic(
        name=name,
        broker_name=broker_name,
        read_queues=int(entry.get("readQueueNums", 0)),
        write_queues=int(entry.get("writeQueueNums", 0)),
        readable=perm & _READ != 0,
        writable=perm & _WRITE != 0,
        attributes={key: str(value) for key, value in (entry.get("attributes") or {}).items()},
    )


def _pending_from_info(info: TransactionInfo, broker_name: str) -> PendingTransaction:
    return PendingTransaction(
        half_message_id=info.message_id,
        transaction_id=info.transaction_id,
        group=info.producer_group,
        topic=info.topic,
        keys=info.keys,
        state=info.state,
        age=info.age_ms / 1000,
        prepared_at=datetime.fromtimestamp(info.store_timestamp / 1000, UTC),
        owner=info.owner,
        checks_sent=info.checks_sent,
        checks_delivered=info.checks_delivered,
        checks_answered=info.checks_answered,
        next_check=None if info.next_check_ms is None else info.next_check_ms / 1000,
        parked_reason=info.parked_reason,
        messages=info.messages,
        broker_name=broker_name,
        offset=info.offset,
    )


async def pending_pages(
    session: Session,
    *,
    group: str | None = None,
    state: State | None = None,
    after: PendingTransaction | None = None,
    limit: int | None = None,
) -> AsyncIterator[list[PendingTransaction]]:
    """Yield the undecided transactions of all brokers that a session knows, a page at a time.

    Sorted by broker name, then by age, the oldest first. A page may be empty.

    Raises:
        UnsupportedRequestError: A broker is not halfmq's.
        ClientError: A broker does not answer, or refuses.
    """
    check_optional_text("group", group)
    if state not in (None, "prepared", "parked"):  # no set: it may be unhashable
        raise ConfigurationError("state", state, "prepared or parked")
    if after is not None:
        check_kind("after", after, PendingTransaction)
    if limit is not None:
        check_count("limit", limit, range(1 << 31))
    left = limit
    for broker_name, address in sorted(session.routes.brokers.items()):
        position: int | None = -1
        if after is not None:
            if broker_name < after.broker_name:
                continue
            if broker_name == after.broker_name:
                position = after.offset
        while position is not None and left != 0:
            header = QueryTransactionsRequestHeader(
                producer_group=group,
                state=state,
                after=position,
                max_count=PAGE_SIZE if left is None else min(PAGE_SIZE, left),
                broker_name=broker_name,
            )
            infos, position = await _query(session, address, header)
            if left is not None:
                left -= len(infos)
            yield [_pending_from_info(info, broker_name) for info in infos]


async def pending_transactions(
    session: Session,
    *,
    group: str | None = None,
    state: State | None = None,
    after: PendingTransaction | None = None,
    limit: int | None = None,
) -> AsyncIterator[PendingTransaction]:
    """Yield the transactions of ``pending_pages``, one at a time."""
    async for page in pending_pages(session, group=group, state=state, after=after, limit=limit):
        for transaction in page:
            yield transaction


class Admin(BaseClient):
    """Lists and decides transactions, administers topics, groups, users and permissions."""

    def __init__(
        self,
        *,
        namesrv: str | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
        credentials: CredentialsSource | None = None,
        tls: bool | ssl.SSLContext | None = None,
        config: ClientConfig | None = None,
    ) -> None:
        """Create a client for all brokers of a cluster.

        Args:
            namesrv: ``host:port``, several with ``;`` or ``,``; overrides ``config``.
            access_key: Signs every request; overrides ``config``, as do the next three.
            secret_key: The secret of ``access_key``.
            credentials: A function that returns both, called again if a broker rejects them.
            tls: Whether connections are encrypted; or an ``ssl.SSLContext``.
            config: All other settings.

        Raises:
            ConfigurationError: An argument cannot be used; says which.
        """
        super().__init__(
            GROUP,
            namesrv=namesrv,
            access_key=access_key,
            secret_key=secret_key,
            credentials=credentials,
            tls=tls,
            config=config,
        )

    def transactions(
        self,
        group: str | None = None,
        state: State | None = None,
        after: PendingTransaction | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[PendingTransaction]:
        """Iterate over undecided transactions, by broker name, then the oldest first.

        They are fetched page by page: one that is decided meanwhile may be included or not.

        Args:
            group: Only of this producer group; None: of all groups.
            state: ``prepared`` or ``parked``; None: both.
            after: Start after this one.
            limit: The maximum number; None: all.

        Raises:
            UnsupportedRequestError: A broker is not halfmq's.
            ClientError: A broker does not answer, or refuses.
        """
        return pending_transactions(
            self._session, group=group, state=state, after=after, limit=limit
        )

    async def page(
        self,
        group: str | None = None,
        state: State | None = None,
        after: PendingTransaction | None = None,
        limit: int = PAGE_SIZE,
    ) -> list[PendingTransaction]:
        """Return up to ``limit`` results of ``transactions``; an empty list is the end."""
        transactions = self.transactions(group, state, after, limit)
        return [transaction async for transaction in transactions]

    async def transaction(self, transaction_id: str) -> PendingTransaction | None:
        """Return the undecided transaction with this id; None if there is none (any more).

        Raises:
            UnsupportedRequestError: A broker is not halfmq's.
            ClientError: A broker does not answer, or refuses.
        """
        session = self._session
        check_text("transaction_id", transaction_id)
        wanted = transaction_id.upper()
        for broker_name, address in sorted(session.routes.brokers.items()):
            header = QueryTransactionsRequestHeader(
                transaction_id=transaction_id, broker_name=broker_name
            )
            infos, _ = await _query(session, address, header)
            for info in infos:
                # The same offset may belong to another transaction on another broker.
                if wanted in {info.message_id.upper(), info.transaction_id.upper()}:
                    return _pending_from_info(info, broker_name)
        return None

    async def commit(self, transaction_id: str, *, reason: str | None = None) -> str | None:
        """Commit a transaction: its message is delivered. Return the offset id of that message.

        If it was committed before, the same id is returned again. ``reason`` is written to the
        broker's log.

        Raises:
            DecisionConflictError: It was rolled back before.
            TransactionNotFoundError: No broker knows it.
            UnsupportedRequestError: The broker is not halfmq's.
            ClientError: The broker does not answer, or refuses; a retry is safe.
        """
        return await self._decide(transaction_id, "commit", reason)

    async def rollback(self, transaction_id: str, *, reason: str | None = None) -> None:
        """Roll back a transaction: its message is dropped. Raises what ``commit`` raises."""
        await self._decide(transaction_id, "rollback", reason)

    async def resume(self, transaction_id: str, *, reason: str | None = None) -> None:
        """Resume the checks of a parked transaction.

        An official broker accepts the offset id of a message in ``TRANS_CHECK_MAX_TIME_TOPIC``, any
        number of times. Raises what ``commit`` raises, except ``UnsupportedRequestError``.
        """
        try:
            await self._decide(transaction_id, "resume", reason)
        except (UnsupportedRequestError, TransactionNotFoundError):
            if self._address_in(transaction_id) is None:
                raise
            await self._resume_parked(transaction_id)

    async def metrics(self) -> dict[str, dict[str, str]]:
        """Return the metrics of each broker, by broker name: RocketMQ's keys and halfmq's.

        Raises:
            ClientError: A broker does not answer, or refuses.
        """
        session = self._session
        code = RequestCode.GET_BROKER_RUNTIME_INFO
        found: dict[str, dict[str, str]] = {}
        for broker_name, address in sorted(session.routes.brokers.items()):
            answer = expect_success(await _call(session, address, code, None))
            try:
                found[broker_name] = decode_table(answer.body)
            except ProtocolError as error:
                raise BadAnswerError(address, str(error)) from error
        return found

    async def settings(self) -> dict[str, dict[str, str]]:
        """Return the settings of each broker, by broker name; secrets are hidden.

        Raises:
            ClientError: A broker does not answer, or refuses.
        """
        return {name: await broker.settings() for name, broker in self._brokers_by_name()}

    async def change_setting(self, key: str, value: str) -> None:
        """Change a setting of every broker while it runs, and in its configuration file.

        Raises:
            BrokerRefusedError: The setting takes effect at a start only, the value is wrong, or the
                broker has no file; says which. The brokers before it, by name, have changed.
            ClientError: A broker does not answer, or refuses; a retry is safe.
        """
        check_text("key", key)
        check_text("value", value)
        for _name, broker in self._brokers_by_name():
            await broker.change_setting(key, value)

    async def traffic(self, topic: str, group: str | None = None) -> Traffic:
        """Return how many messages all brokers stored in a topic lately.

        With ``group``, how many of them were delivered to that consumer group. An unknown topic or
        group has none.

        Raises:
            ClientError: A broker does not answer, or refuses.
        """
        check_text("topic", topic)
        check_optional_text("group", group)
        name, key = "TOPIC_PUT_NUMS", topic
        if group is not None:
            name, key = "GROUP_GET_NUMS", f"{topic}@{group}"
        each = [await broker.counted(name, key) for _name, broker in self._brokers_by_name()]
        found = [counted for counted in each if counted is not None]

        def total(period: str) -> Counted:
            items = [counted[period] for counted in found if period in counted]
            return Counted(
                messages=sum(item.sum for item in items), per_second=sum(item.tps for item in items)
            )

        return Traffic(minute=total("statsMinute"), hour=total("statsHour"), day=total("statsDay"))

    async def groups(self, group: str | None = None) -> list[ConsumerGroup]:
        """Return the connected consumer groups, sorted by name; with ``group`` only that one.

        Raises:
            UnsupportedRequestError: A broker is not halfmq's.
            ClientError: A broker does not answer, or refuses.
        """
        session = self._session
        check_optional_text("group", group)
        found = GroupCollector()
        for broker_name, address in sorted(session.routes.brokers.items()):
            position: tuple[str, str] | None = ("", "")
            while position is not None:
                header = QueryConsumersRequestHeader(
                    consumer_group=group,
                    after_group=position[0],
                    after_client=position[1],
                    max_count=PAGE_SIZE,
                    broker_name=broker_name,
                )
                position = await _collect(session, address, header, found)
        return found.groups()

    # -- topics and groups

    async def topics(self) -> list[Topic]:
        """Return the topics of all brokers, the brokers' own included, by name and broker name.

        Raises:
            UnsupportedRequestError: A broker does not serve this.
            ClientError: A broker does not answer, or refuses.
        """
        session = self._session
        found: list[Topic] = []
        for broker_name, address in sorted(session.routes.brokers.items()):
            entries = await TopicRequests(session, address).topics()
            try:
                found += [_topic_from_entry(*one, broker_name) for one in entries.items()]
            except (TypeError, ValueError, AttributeError) as error:
                raise BadAnswerError(address, f"a topic has {error}") from error
        return sorted(found, key=lambda one: (one.name, one.broker_name))

    async def create_topic(
        self,
        name: str,
        *,
        queues: int = 4,
        read_queues: int | None = None,
        readable: bool = True,
        writable: bool = True,
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        """Create a topic on every broker, or replace its settings; it is on disk then.

        Args:
            name: The topic.
            queues: Queues on each broker that producers send to.
            read_queues: Queues that consumers read; None: as many. To shrink a topic, lower
                ``queues`` first, and this when the others are consumed.
            readable: Whether consumers may read it.
            writable: Whether producers may send to it.
            attributes: Attributes to set; others stay as they are.

        Raises:
            BrokerRefusedError: The name is no topic name, is the broker's own, or an attribute
                does not exist. The brokers before it, by name, have the topic.
            ClientError: A broker does not answer, or refuses; a retry is safe.
        """
        check_text("name", name)
        check_count("queues", queues, range(1, _QUEUES_MAX + 1))
        if read_queues is not None:
            check_count("read_queues", read_queues, range(1, _QUEUES_MAX + 1))
        header = CreateTopicRequestHeader(
            topic=name,
            default_topic=_DEFAULT_TOPIC,
            read_queue_nums=queues if read_queues is None else read_queues,
            write_queue_nums=queues,
            perm=_READ * readable + _WRITE * writable,
            topic_filter_type="SINGLE_TAG",
            topic_sys_flag=0,
            attributes=",".join(f"+{key}={value}" for key, value in (attributes or {}).items()),
        )
        for requests in self._all_topic_requests():
            await requests.create_topic(header)

    async def delete_topic(self, name: str) -> None:
        """Delete a topic, its consumers' offsets and its route; a topic that is unknown is none.

        Producers that still send create it again where topics are created by use.

        Raises:
            BrokerRefusedError: It is the broker's own.
            ClientError: A broker or name server does not answer, or refuses; a retry is safe.
        """
        check_text("name", name)
        for requests in self._all_topic_requests():
            await requests.delete_topic(name)
        for address in self.config.namesrv_addresses:
            await TopicRequests(self._session, address).delete_route(name)

    async def create_group(
        self,
        name: str,
        *,
        max_retries: int = 16,
        retry_queues: int = 1,
        enabled: bool = True,
        broadcasting: bool = True,
    ) -> None:
        """Create a consumer group on every broker, or replace its settings; it is on disk then.

        Args:
            name: The group.
            max_retries: Deliveries of a message that fails, until it is a dead letter.
            retry_queues: Queues of its retry topic, when that is created.
            enabled: Whether its members may consume.
            broadcasting: Whether they may all get every message.

        Raises:
            BrokerRefusedError: The name is no group name.
            ClientError: A broker does not answer, or refuses; a retry is safe.
        """
        check_text("name", name)
        entry = {
            "consumeBroadcastEnable": broadcasting,
            "consumeEnable": enabled,
            "groupName": name,
            "retryMaxTimes": max_retries,
            "retryQueueNums": retry_queues,
        }
        for requests in self._all_topic_requests():
            await requests.create_group(entry)

    async def delete_group(self, name: str, *, offsets: bool = False) -> None:
        """Delete a consumer group; with ``offsets`` also where it was in each topic.

        Raises what ``delete_topic`` raises. An unknown group is none.
        """
        check_text("name", name)
        for requests in self._all_topic_requests():
            await requests.delete_group(name, offsets=offsets)

    # -- users and policies

    async def users(self, name_contains: str = "") -> list[User]:
        """Return users sorted by name; with ``name_contains`` those whose name contains it.

        Users are read from the first broker by name, and changed on all brokers of the cluster in
        the order of their names: if one refuses, the brokers before it have been changed.

        Raises:
            UnsupportedRequestError: The broker keeps no users.
            AccessDeniedError: The signer is not an administrator.
            ClientError: A broker does not answer, or refuses.
        """
        return await self._first_broker().users(name_contains)

    async def user(self, name: str) -> User | None:
        """Return the user with this name, or None. Raises what ``users`` raises."""
        return await self._first_broker().user(name)

    async def create_user(
        self, name: str, password: str, *, is_super: bool = False, enabled: bool = True
    ) -> None:
        """Create a user. Raises what ``users`` raises; BrokerRefusedError if it exists."""
        user = User(name=name, password=password, is_super=is_super, enabled=enabled)
        for broker in self._all_brokers():
            await broker.create_user(user)

    async def update_user(
        self,
        name: str,
        *,
        password: str | None = None,
        is_super: bool | None = None,
        enabled: bool | None = None,
    ) -> None:
        """Update a user; None leaves a field unchanged.

        Raises what ``users`` raises; BrokerRefusedError if there is no such user.
        """
        info = user_to_info(name, password, is_super=is_super, enabled=enabled)
        for broker in self._all_brokers():
            await broker.update_user(info)

    async def delete_user(self, name: str) -> None:
        """Delete a user and its ACL, if it exists. Raises what ``users`` raises."""
        for broker in self._all_brokers():
            await broker.delete_user(name)

    async def copy_users(
        self, to: str, names: Sequence[str] = (), *, source: str | None = None
    ) -> list[str]:
        """Create or update users on the broker at ``to``; return their names.

        Args:
            to: ``host:port`` of a broker that accepts the same credentials.
            names: The users; empty: all. Unknown names are left out.
            source: ``host:port`` of the broker to read from; None: as ``users``.

        Raises:
            AccessDeniedError: Secrets are visible to super users only.
            ClientError: As ``users``.
        """
        from_broker, to_broker = self._first_broker(source), self._broker_at(to)
        wanted = [await from_broker.user(name) for name in names] or await from_broker.users("")
        copied = []
        for user in wanted:
            if user is None:
                continue
            if user.password is None:
                remark = f"the secret of user {user.name} is shown to super users only"
                raise AccessDeniedError(ResponseCode.NO_PERMISSION, remark)
            if await to_broker.user(user.name) is None:
                await to_broker.create_user(user)
            else:
                info = user_to_info(
                    user.name, user.password, is_super=user.is_super, enabled=user.enabled
                )
                await to_broker.update_user(info)
            copied.append(user.name)
        return copied

    async def acls(self, subject_contains: str = "", resource_contains: str = "") -> list[Acl]:
        """Return ACLs by subject; with ``resource_contains`` only entries of such resources.

        Raises what ``users`` raises, as do the other methods about ACLs.
        """
        return await self._first_broker().acls(subject_contains, resource_contains)

    async def acl(self, user: str) -> Acl | None:
        """Return the ACL of a user, ``User:NAME`` or ``NAME``; None if it has no entries."""
        return await self._first_broker().acl(subject_of(user))

    async def create_acl(self, user: str, *entries: AclEntry) -> None:
        """Add entries to the ACL of a user; replace those of the same resource."""
        for broker in self._all_brokers():
            await broker.create_acl(subject_of(user), entries)

    async def update_acl(self, user: str, *entries: AclEntry) -> None:
        """Update the ACL of a user, with RocketMQ's update request; like ``create_acl``."""
        for broker in self._all_brokers():
            await broker.update_acl(subject_of(user), entries)

    async def delete_acl(
        self, user: str, resource: str | None = None, policy_type: PolicyType | None = None
    ) -> None:
        """Delete the entry of a resource, or with None all entries of a user.

        Raises:
            BrokerRefusedError: There is no such user, or it has no entries.
        """
        for broker in self._all_brokers():
            await broker.delete_acl(subject_of(user), resource, policy_type)

    async def copy_acls(
        self, to: str, users: Sequence[str] = (), *, source: str | None = None
    ) -> list[str]:
        """Create or update ACLs on the broker at ``to``, as ``copy_users``; return the subjects."""
        from_broker, to_broker = self._first_broker(source), self._broker_at(to)
        wanted = [await from_broker.acl(subject_of(user)) for user in users]
        copied = []
        for acl in wanted or await from_broker.acls("", ""):
            if acl is not None:
                await to_broker.create_acl(acl.subject, acl.entries)
                copied.append(acl.subject)
        return copied

    # -- inside

    def _first_broker(self, address: str | None = None) -> AccessRequests:
        if address is not None:
            return self._broker_at(address)
        session = self._session
        return AccessRequests(session, min(session.routes.brokers.items())[1])

    def _all_topic_requests(self) -> list[TopicRequests]:
        session = self._session
        return [
            TopicRequests(session, address)
            for _name, address in sorted(session.routes.brokers.items())
        ]

    def _brokers_by_name(self) -> list[tuple[str, BrokerRequests]]:
        session = self._session
        return [
            (name, BrokerRequests(session, address))
            for name, address in sorted(session.routes.brokers.items())
        ]

    def _all_brokers(self) -> list[AccessRequests]:
        session = self._session
        return [
            AccessRequests(session, address)
            for _name, address in sorted(session.routes.brokers.items())
        ]

    def _broker_at(self, address: str) -> AccessRequests:
        host, colon, port = address.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigurationError("address", address, "host:port of a broker")
        return AccessRequests(self._session, address)

    async def _decide(self, transaction_id: str, action: Action, reason: str | None) -> str | None:
        check_optional_text("reason", reason)
        address, offset, listed = await self._locate(transaction_id)
        header = DecideTransactionRequestHeader(
            transaction_offset=offset, action=action, reason=reason
        )
        answer = await _call(self._session, address, RequestCode.DECIDE_TRANSACTION, header)
        if answer.code == ResponseCode.ILLEGAL_OPERATION:
            remark = answer.remark or ""
            raise DecisionConflictError(answer.code, remark, transaction_id, action.upper())
        if answer.code != ResponseCode.SUCCESS:
            error = error_from_response(answer)
            unknown = error.code == ResponseCode.SYSTEM_ERROR and not listed
            if unknown and not isinstance(error, AccessDeniedError):
                raise TransactionNotFoundError(transaction_id, error.remark)
            raise error
        return typed(answer, DecideTransactionResponseHeader, address).msg_id

    async def _locate(self, transaction_id: str) -> tuple[str, int, bool]:
        """Return the broker's address, the half's physical offset, and whether it is undecided.

        For a decided transaction only the broker in the offset id is used: on another one the same
        offset may belong to another transaction.
        """
        found = await self.transaction(transaction_id)
        if found is not None:
            return self._session.routes.brokers[found.broker_name], found.offset, True
        address = self._address_in(transaction_id)
        if address is None:
            raise TransactionNotFoundError(transaction_id, "nothing undecided has this id")
        return address, parse_offset_message_id(transaction_id).physical_offset, False

    def _address_in(self, transaction_id: str) -> str | None:
        """Return the address of the broker in an offset id; None if it is not a known broker's."""
        try:
            host, port = unpack_host(parse_offset_message_id(transaction_id).store_host)
        except ValueError:
            return None
        address = join_address(host, port)
        return address if address in self._session.routes.addresses else None

    async def _resume_parked(self, message_id: str) -> None:
        """Resume by the offset id of the parked copy, as RocketMQ's tools do."""
        address = self._address_in(message_id)
        assert address is not None
        header = ResumeCheckHalfMessageRequestHeader(msg_id=message_id)
        code = RequestCode.RESUME_CHECK_HALF_MESSAGE
        answer = await _call(self._session, address, code, header)
        if answer.code != ResponseCode.SUCCESS:
            error = error_from_response(answer)
            if isinstance(error, AccessDeniedError):
                raise error
            raise TransactionNotFoundError(message_id, error.remark)

    def _new_session(self) -> Session:
        return Session(self.config, _make_heartbeat, {}, {})

    async def _start_session(self, session: Session) -> None:
        await session.start(whole_cluster=True)
        if not session.routes.brokers:
            raise ConnectError(";".join(self.config.namesrv_addresses), "it knows no broker")


def _make_heartbeat(client_id: str) -> HeartbeatData:
    return HeartbeatData(client_id=client_id)


async def _query(
    session: Session, address: str, header: QueryTransactionsRequestHeader
) -> tuple[list[TransactionInfo], int | None]:
    """Return a page, and the ``after`` of the next page; None if this is the last one."""
    code = RequestCode.QUERY_TRANSACTIONS
    answer = expect_success(await _call(session, address, code, header))
    following = typed(answer, QueryTransactionsResponseHeader, address).next_after
    try:
        return decode_transactions(answer.body), following
    except ProtocolError as error:
        raise BadAnswerError(address, str(error)) from error


async def _collect(
    session: Session, address: str, header: QueryConsumersRequestHeader, found: GroupCollector
) -> tuple[str, str] | None:
    """Add a page of consumers; return the last member before the next page, or None at the end."""
    answer = expect_success(await _call(session, address, RequestCode.QUERY_CONSUMERS, header))
    try:
        for info in decode_consumers(answer.body):
            found.add(info)
    except ProtocolError as error:
        raise BadAnswerError(address, str(error)) from error
    following = typed(answer, QueryConsumersResponseHeader, address)
    if following.next_group is None:
        return None
    return following.next_group, following.next_client or ""


async def _call(
    session: Session, address: str, code: RequestCode, header: Header | None
) -> RemotingCommand:
    answer = await session.call(address, code, header)
    if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        raise UnsupportedRequestError(address, code)
    return answer
