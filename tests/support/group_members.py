"""Which queues each member of a group has, as the members say themselves."""

from __future__ import annotations

from halfmq.client import BrokerRefusedError, MessageQueue
from halfmq.client.blocking import Admin
from tests.support.patience import wait_until

Shares = dict[str, list[MessageQueue]]
"""The queues of each member, by client id."""


def shares(admin: Admin, group: str, topic: str) -> Shares:
    """Ask each connected member of a group for its queues of a topic.

    Raises:
        BrokerRefusedError: One has gone, or does not answer.
    """
    members = [member for one in admin.groups(group) for member in one.members]
    return {
        member.client_id: [
            one.queue
            for one in admin.running_consumer(group, member.client_id).queues
            if one.queue.topic == topic
        ]
        for member in members
    }


def wait_for_shares(admin: Admin, group: str, topic: str, sizes: list[int]) -> Shares:
    """Wait until the members have so many queues, in ascending order; return which."""
    found: Shares = {}

    def shared_out() -> bool:
        nonlocal found
        try:
            found = shares(admin, group, topic)
        except BrokerRefusedError:
            return False
        return sorted(len(queues) for queues in found.values()) == sizes

    wait_until(shared_out, f"the members of {group} have {sizes} queues")
    return found
