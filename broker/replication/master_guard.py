"""A master looks, before each registration, whether another process has taken its place.

Name servers keep one address for the master of a name. If that is another one, and the epoch with
which it has registered is not below ours, we are replaced: its slave has become the master, and no
slave of ours may be led here again. The epoch is the ``stateVersion`` of the table of topics, which
``halfmq ha promote`` raises. A RocketMQ broker that became the master has the epoch 0.

Source: RocketMQ 5.3.3 ``RouteInfoManager#registerBroker``.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Final

from attrs import define

from halfmq.remoting.admin_headers import GetBrokerMemberGroupRequestHeader
from halfmq.remoting.bodies import decode_member_group
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import BrokerIdentityRequestHeader
from halfmq.remoting.registration_bodies import (
    DataVersion,
    decode_data_version,
    encode_data_version,
)

from ..config import TopicDefaults
from ..disk.send_refusal import SendRefusal

logger = logging.getLogger(__name__)

MASTER_ID: Final = 0
CAUSE: Final = "replaced"

Ask = Callable[..., Awaitable[RemotingCommand]]
"""Sends a request, of code, header and body, to a name server, and returns its answer."""


@define(eq=False, repr=False)
class MasterGuard:
    """Ends this broker when another one is the master of its name."""

    _identity: TopicDefaults
    _epoch: Callable[[], int]
    _refusal: SendRefusal
    _end: Callable[[], None]

    async def replaced_by(self, ask: Ask, own_address: str) -> str:
        """Return the address of the next master that a name server knows; empty if there is none.

        Then messages are refused from now on, and the broker ends.
        """
        name, cluster = self._identity.broker_name, self._identity.cluster_name
        header = GetBrokerMemberGroupRequestHeader(cluster_name=cluster, broker_name=name)
        answer = await ask(RequestCode.GET_BROKER_MEMBER_GROUP, header)
        if answer.code != ResponseCode.SUCCESS:  # a name server before 5.0
            return ""
        other = decode_member_group(answer.body).get(MASTER_ID, own_address)
        if other == own_address:
            return ""
        identity = BrokerIdentityRequestHeader(
            broker_name=name, broker_addr=other, cluster_name=cluster, broker_id=MASTER_ID
        )
        # Unequal to any, or the name server would take this for a sign of life of the other one.
        body = encode_data_version(DataVersion(counter=-1))
        answer = await ask(RequestCode.QUERY_DATA_VERSION, identity, body)
        if not answer.body:  # its registration has ended since
            return ""
        epoch = decode_data_version(answer.body).state_version
        if epoch < self._epoch():
            return ""
        reason = f"{other} is the master of {name} now, with epoch {epoch}: this broker is replaced"
        logger.critical(
            "event=replaced master=%s epoch=%d own_epoch=%d", other, epoch, self._epoch()
        )
        self._refusal.begin(CAUSE, ResponseCode.SERVICE_NOT_AVAILABLE, reason)
        self._end()
        return other
