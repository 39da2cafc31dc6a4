"""This broker as a name server of others: they register here (103, 104, 217, 322, 901, 904).

The answers of ``routes`` contain what they register. Clients then send to these brokers and consume
from them, so only brokers at the addresses of the setting ``registrationAddresses`` register.

Source: RocketMQ 5.3.3 `DefaultRequestProcessor` of the name server.
"""

from collections.abc import Callable
from typing import Final

from attrs import define

from halfmq.remoting.admin_headers import (
    BrokerHeartbeatRequestHeader,
    GetBrokerMemberGroupRequestHeader,
    TopicRequestHeader,
)
from halfmq.remoting.bodies import BrokerData, decode_route, encode_member_group, encode_table
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import (
    RECOGNITION_FIELD,
    BrokerIdentityRequestHeader,
    QueryDataVersionResponseHeader,
    RegisterBrokerRequestHeader,
    RegisterBrokerResponseHeader,
)
from halfmq.remoting.registration_bodies import (
    QUEUES_MAX,
    decode_data_version,
    decode_registration,
    encode_data_version,
)
from halfmq.remoting.replies import encode_reply
from halfmq.remoting.serialization import ext_fields
from halfmq.store.format.crc import crc32

from ...access.addresses import address_of, any_of, parse_address_pattern
from ...config import TopicDefaults
from ...errors import RequestRefusedError
from ...ports import Connection, Handlers, serves
from ...tables.kv_table import KvConfig
from ...tables.registered_brokers import MASTER_ID, BrokerTable

ORDER_TOPICS: Final = "ORDER_TOPIC_CONFIG"
"""Namespace of the KV configuration that is in the answer to each registration."""

CRC_MASK: Final = 0x7FFFFFFF
"""RocketMQ clears the sign bit of the checksum of a body."""


@define(eq=False, repr=False, slots=False)
class BrokerHandlers(Handlers):
    """Serves the registration of other brokers."""

    _brokers: BrokerTable
    _kv_config: KvConfig
    _identity: TopicDefaults
    _registration_addresses: str
    # Returns from where a slave of this broker copies its log.
    _ha_address: Callable[[Connection], str | None] = lambda _: None

    def __attrs_post_init__(self) -> None:
        self._broker_name = self._identity.broker_name
        self._broker_id = self._identity.broker_id
        text = self._registration_addresses
        self._may_register = parse_address_pattern(text) if text else any_of(())

    @serves(RequestCode.REGISTER_BROKER)
    def register(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Add a broker with its topics; answer with the address of its master."""
        header = request.header_as(RegisterBrokerRequestHeader)
        if header.body_crc32 and header.body_crc32 != crc32(request.body) & CRC_MASK:
            raise RequestRefusedError("crc32 not match")
        master = None
        if header.broker_name != self._broker_name:
            self._check_address(connection)
            self._brokers.register(
                header,
                decode_registration(request.body),
                connection,
                is_halfmq=RECOGNITION_FIELD in ext_fields(request),
            )
            if header.broker_id != MASTER_ID:
                master = self._brokers.master_of(header.broker_name)
        elif header.broker_id != MASTER_ID and (ha_address := self._ha_address(connection)):
            master = connection.broker_address, ha_address
        elif header.broker_addr != connection.broker_address:  # not this broker itself
            raise RequestRefusedError(
                f"the name server is a broker {self._broker_name}, too: each broker needs a "
                "brokerName of its own"
            )
        master_address, master_ha_address = master or (None, None)
        order_topics = self._kv_config.namespace(ORDER_TOPICS)
        return encode_reply(
            request,
            header=RegisterBrokerResponseHeader(
                ha_server_addr=master_ha_address, master_addr=master_address
            ),
            body=b"" if order_topics is None else encode_table(order_topics),
        )

    @serves(RequestCode.UNREGISTER_BROKER)
    def unregister(self, request: RemotingCommand, connection: Connection) -> bytes:
        self._check_address(connection)
        header = request.header_as(BrokerIdentityRequestHeader)
        self._brokers.unregister(header.broker_name, header.broker_id)
        return encode_reply(request)

    @serves(RequestCode.REGISTER_TOPIC_IN_NAMESRV)
    def register_topic(self, request: RemotingCommand, connection: Connection) -> bytes:
        self._check_address(connection)
        header = request.header_as(TopicRequestHeader)
        for queues in decode_route(request.body).queue_datas:
            for count in (queues.read_queue_nums, queues.write_queue_nums):
                if not 0 <= count <= QUEUES_MAX:
                    raise RequestRefusedError(
                        f"topic[{header.topic}] has {count} queues, the limit is {QUEUES_MAX}"
                    )
            self._brokers.add_topic(header.topic, queues)
        return encode_reply(request)

    @serves(RequestCode.QUERY_DATA_VERSION)
    def data_version(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer whether a broker has to register its topics again."""
        self._check_address(connection)
        header = request.header_as(BrokerIdentityRequestHeader)
        known = self._brokers.renew(header.broker_name, header.broker_addr)
        is_changed = known is None or known != decode_data_version(request.body)
        return encode_reply(
            request,
            header=QueryDataVersionResponseHeader(changed=is_changed),
            body=b"" if known is None else encode_data_version(known),
        )

    @serves(RequestCode.BROKER_HEARTBEAT)
    def heartbeat(self, request: RemotingCommand, connection: Connection) -> bytes:
        self._check_address(connection)
        header = request.header_as(BrokerHeartbeatRequestHeader)
        self._brokers.renew(header.broker_name, header.broker_addr)
        return encode_reply(request)

    @serves(RequestCode.GET_BROKER_MEMBER_GROUP)
    def member_group(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer with the master and the replicas of one broker."""
        header = request.header_as(GetBrokerMemberGroupRequestHeader)
        name, addresses = header.broker_name, {}
        if name == self._broker_name:
            addresses = {self._broker_id: connection.broker_address}
        elif (known := self._brokers.get(name)) is not None:
            addresses = known.broker_addrs
        group = BrokerData(broker_addrs=addresses, broker_name=name, cluster=header.cluster_name)
        return encode_reply(request, body=encode_member_group(group))

    def _check_address(self, connection: Connection) -> None:
        if not self._may_register(address_of(connection.remote_host[:-4])):
            raise RequestRefusedError(
                f"a broker at {connection.name} may not register here: its address is not in "
                "registrationAddresses",
                ResponseCode.NO_PERMISSION,
            )
