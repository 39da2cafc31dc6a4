"""Files of a store are removed, cut or zeroed while the broker is down; nothing is unreachable.

Of the log nothing may be lost; everything else follows from it. By default a few rounds; as a
campaign as many as fit into `HALFMQ_CAMPAIGN_SECONDS` (60).
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import defaultdict
from pathlib import Path
from typing import Final

import pytest

from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.header_tables import response_header
from halfmq.remoting.headers import SendMessageResponseHeader
from halfmq.store.errors import DamagedTableError
from halfmq.store.format.ids import parse_offset_message_id
from tests.support.peers import COMMIT, ROLLBACK, Half, Peer
from tests.support.race_windows import Rig, windowed
from tests.support.seeds import campaign_seconds, printed_seed
from tests.support.stores import maintain, stop_maintenance

TOPICS: Final = ("orders", "busy", "more")
QUIET: Final = "quiet"  # gets messages in the first round only, in several queue files
QUIET_COUNT: Final = 120
CHECKED: Final = 20  # keys and decisions that each round checks
KEPT: Final = ("commitlog", "lock", "abort")


class Acknowledged:
    """What the broker has acknowledged."""

    def __init__(self) -> None:
        self.bodies: dict[str, list[bytes]] = defaultdict(list)  # by topic, in order
        self.keys: list[tuple[str, str, int]] = []  # topic, key, physical offset
        self.decided: list[tuple[Half, int]] = []
        self.undecided: list[Half] = []

    async def send(self, peer: Peer, topic: str) -> None:
        """Send a message, which gets the next queue offset."""
        number = len(self.bodies[topic])
        body = f"{topic}-{number}".encode()
        answer = await peer.plain(f"K{topic}{number}", body, topic=topic, KEYS=f"k{number}")
        assert answer.code == 0, answer.remark
        stored = response_header(answer, SendMessageResponseHeader)
        assert (stored.queue_id, stored.queue_offset) == (0, number)
        offset = parse_offset_message_id(stored.msg_id).physical_offset
        self.keys.append((topic, f"k{number}", offset))
        self.bodies[topic].append(body)

    async def decide(self, peer: Peer, half: Half, decision: int) -> None:
        answer = await peer.end(half, decision)
        assert answer.code == 0, answer.remark
        self.decided.append((half, decision))
        if decision == COMMIT:
            self.bodies["orders"].append(half.body)

    async def work(self, rig: Rig, peer: Peer, chance: random.Random) -> None:
        """Send, and decide some transactions, also of earlier rounds."""
        for _ in range(chance.randrange(1, 12)):
            await self.send(peer, chance.choice(TOPICS))
        for decision in (COMMIT, ROLLBACK, None):
            number = len(self.decided) + len(self.undecided)
            half = await peer.prepare(f"T{number}", f"row {number}".encode())
            if decision is None:
                self.undecided.append(half)
            else:
                await self.decide(peer, half, decision)
        if len(self.undecided) > 2:
            half = self.undecided.pop(chance.randrange(len(self.undecided)))
            await self.decide(peer, half, chance.choice([COMMIT, ROLLBACK]))
        rig.loop.now_ms += chance.choice([0, 1_000, 10_000])

    async def check(self, rig: Rig, peer: Peer, chance: random.Random) -> None:
        """Read everything back: through queues, by key, by decision."""
        for topic, bodies in self.bodies.items():
            assert rig.bodies(topic) == bodies, topic
        for topic, key, offset in chance.sample(self.keys, min(CHECKED, len(self.keys))):
            assert offset in rig.store.index.query(topic, key, 64, 0, 1 << 60), (topic, key)
        for half, decision in chance.sample(self.decided, min(CHECKED, len(self.decided))):
            opposite = COMMIT if decision == ROLLBACK else ROLLBACK
            refused = await peer.end(half, opposite)
            assert refused.code == ResponseCode.ILLEGAL_OPERATION, refused.remark
            assert len(rig.finals_of(half)) == (decision == COMMIT)
        assert rig.metrics["pending"] == len(self.undecided)


def damage(root: Path, chance: random.Random) -> list[str]:
    """Remove, cut or zero one to three files; return what was done."""
    files = [
        path
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.relative_to(root).parts[0] not in KEPT
    ]
    directories: dict[str, list[Path]] = defaultdict(list)
    for path in files:
        directories[path.relative_to(root).parts[0]].append(path)
    done = []
    for _ in range(chance.randrange(1, 4)):
        path = chance.choice(directories[chance.choice(sorted(directories))])
        ways = ["remove", "cut", "zero"]
        is_queue = path.relative_to(root).parts[0] == "consumequeue"
        how = chance.choice([*ways, "zero a part", "zero a part"] if is_queue else ways)
        size = path.stat().st_size if path.exists() else 0
        if how == "remove":
            path.unlink(missing_ok=True)
        elif how == "cut" and size:
            os.truncate(path, chance.randrange(size))
        elif how == "zero a part" and size:
            start = chance.randrange(size)
            with path.open("r+b") as file:
                file.seek(start)
                file.write(bytes(min(chance.randrange(40, 400), size - start)))
        elif size:
            path.write_bytes(bytes(size))
        done.append(f"{how} {path.relative_to(root)}")
    return done


async def start(rig: Rig) -> None:
    """Start; a table that cannot be rebuilt is removed, as the error says."""
    for _ in range(8):
        try:
            await rig.start()
        except DamagedTableError as error:
            if "remove both" not in str(error):
                raise
            for path in (error.path, error.path.with_name(f"{error.path.name}.bak")):
                path.unlink(missing_ok=True)
        else:
            return
    raise AssertionError("more damaged tables than there are")


async def run_round(rig: Rig, acknowledged: Acknowledged, chance: random.Random) -> None:
    peer = await rig.peer()
    if not acknowledged.bodies:
        for _ in range(QUIET_COUNT):
            await acknowledged.send(peer, QUIET)
    await acknowledged.work(rig, peer, chance)
    if chance.random() < 0.7:  # else the checkpoint is one of the start
        await rig.settle()
        stop_maintenance(rig.store)
        maintain(rig.store)
        await acknowledged.work(rig, peer, chance)
    done: list[str] = []
    if chance.random() < 0.5:
        before = rig.root
        copy = rig.copy_as_killed()
        await rig.stop()
        shutil.rmtree(before)
        rig.root = copy
        done.append("kill")
    else:
        await rig.stop()
    done += damage(rig.root, chance)
    print(done)
    await start(rig)
    peer = await rig.peer()
    await acknowledged.check(rig, peer, chance)
    for topic in [*TOPICS, QUIET]:
        await acknowledged.send(peer, topic)


@windowed(consume_queue_file_size=1_000)
async def test_lost_files_are_rebuilt(rig: Rig) -> None:
    """After kills and ordered stops; queue offsets continue."""
    chance, acknowledged = random.Random(printed_seed()), Acknowledged()
    for _ in range(6):
        await run_round(rig, acknowledged, chance)


@pytest.mark.campaign
@windowed(consume_queue_file_size=1_000)
async def test_many_lost_files_are_rebuilt(rig: Rig) -> None:
    chance, acknowledged = random.Random(printed_seed()), Acknowledged()
    end = time.monotonic() + campaign_seconds()
    rounds = 0
    while time.monotonic() < end:
        await run_round(rig, acknowledged, chance)
        rounds += 1
    print(f"rounds={rounds} messages={sum(map(len, acknowledged.bodies.values()))} lost=0")
