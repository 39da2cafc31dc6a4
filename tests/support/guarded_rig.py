"""A whole broker that asks who sends, and connections of several accounts to it."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, Final

from halfmq.broker.access.config import AccessConfig
from halfmq.remoting.codes import HeaderType, ResponseCode
from halfmq.remoting.command import RemotingCommand
from tests.support.access import ADMIN, PUBLISHER, STRANGER, SUBSCRIBER, Account, SignedPeer
from tests.support.broker_parts import access_of
from tests.support.race_windows import Rig, windowed

COLLEAGUE: Final = Account("colleague", "secret-of-colleague")
"""Another principal that may publish to the same topic."""

ACCOUNTS: Final = f"""
accounts:
- {{accessKey: {ADMIN.name}, secretKey: {ADMIN.secret}, admin: true}}
- {{accessKey: {PUBLISHER.name}, secretKey: {PUBLISHER.secret},
   topicPerms: [orders=PUB, payments=PUB]}}
- {{accessKey: {COLLEAGUE.name}, secretKey: {COLLEAGUE.secret}, topicPerms: [orders=PUB]}}
- {{accessKey: {SUBSCRIBER.name}, secretKey: {SUBSCRIBER.secret},
   topicPerms: [orders=SUB], groupPerms: [consumers=SUB]}}
- {{accessKey: {STRANGER.name}, secretKey: {STRANGER.secret},
   topicPerms: [payments=PUB|SUB], groupPerms: [theirs=SUB, producers=PUB]}}
"""

REFUSED: Final = ResponseCode.SYSTEM_ERROR  # as plain ACL does


class Guarded:
    """A broker with these accounts, and their connections."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    async def peer(
        self, account: Account, group: str = "producers", *, member: bool = False, ours: bool = True
    ) -> SignedPeer:
        """Connect; a member is asked about transactions of its group."""
        kind = HeaderType.MSGPACK if ours else HeaderType.JSON
        peer = SignedPeer(account, group, kind)
        await self.rig.connect(peer)
        if member:
            await peer.heartbeat()
        return peer

    @property
    def undecided(self) -> int:
        """How many transactions are."""
        return self.rig.metrics["pending"]

    async def refused(self) -> int:
        """Return how many requests were refused for what they asked."""
        return access_of(self.rig.broker).metrics().get("refused_authorization", 0)


def guarded(**settings: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Run a test with a broker that asks who sends."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        async def scenario(rig: Rig, **arguments: Any) -> None:
            file = rig.root.parent / "plain_acl.yml"
            file.write_text(ACCOUNTS)
            file.chmod(0o600)
            rig.access = AccessConfig(acl_enabled=True, plain_acl_file=file)
            await rig.restart()
            await test(Guarded(rig), **arguments)

        functools.update_wrapper(scenario, test)  # with its signature
        return windowed(**settings)(scenario)

    return decorate


def names_the_missing_right(answer: RemotingCommand, right: str) -> bool:
    return answer.code == REFUSED and f"has no permission to {right}" in (answer.remark or "")
