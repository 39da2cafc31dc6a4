"""The well-behaved client, as a process of its own.

Run as ``python -m tests.hostile.probe ADDRESS``. It says ``ready`` when its first message is
answered. Each line on standard input begins the next phase; at its end it sends once more, reads
everything back and writes its report as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Final

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.store.format.record import decode_records
from tests.support.rocketmq_broker import Wire
from tests.support.usual_headers import pull_header, send_header

TOPIC: Final = "probe"
PERIOD_S: Final = 0.05
LARGE_EACH: Final = 40
"""Every so many messages one has a megabyte, which arrives in many reads."""
LARGE: Final = bytes(1 << 20)
HELD_MS: Final = 15_000


@dataclass
class Phase:
    """What happened to the probe in one phase."""

    waits_ms: list[float] = field(default_factory=list)  # of sends, answered or not
    refused: int = 0
    closed: int = 0  # connections, by the broker
    early: int = 0  # long polls answered without a message, before their time
    refusals: list[str] = field(default_factory=list)  # the first few


@dataclass
class Report:
    """What the probe has to say at its end."""

    phases: list[Phase]
    lost: int  # messages that were answered and not read back
    sent: int


class Probe:
    """Sends and reads until its standard input ends."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.phases = [Phase()]
        self._answered: set[int] = set()
        self._read: set[int] = set()
        self._wire = Wire(address)
        self._ended = threading.Event()  # standard input is
        self._all_sent = threading.Event()
        self._next = 0

    @property
    def _phase(self) -> Phase:
        return self.phases[-1]

    def send(self) -> bool:
        """Send the next message; return whether it was stored."""
        number, self._next = self._next, self._next + 1
        body = b"%d " % number + (LARGE if number % LARGE_EACH == LARGE_EACH // 2 else b"")
        began = time.perf_counter()
        try:
            answer = self._wire.ask(RequestCode.SEND_MESSAGE_V2, send_header(topic=TOPIC), body)
        except (OSError, AssertionError):
            answer = None
            self._phase.closed += 1
            self._wire = Wire(self._address)
        self._phase.waits_ms.append((time.perf_counter() - began) * 1_000)
        if answer is None:
            return False
        if answer.code:
            self._phase.refused += 1
            self._phase.refusals += [f"{answer.code} {answer.remark}"][
                : 3 - len(self._phase.refusals)
            ]
            return False
        self._answered.add(number)
        return True

    def run(self) -> Report:
        """Send until the input ends."""
        assert self.send(), self._phase.refusals
        print("ready", flush=True)
        reader = threading.Thread(target=self._keep_reading, daemon=True)
        reader.start()
        lines = threading.Thread(target=self._follow_input, daemon=True)
        lines.start()
        while not self._ended.wait(PERIOD_S):
            self.send()
        while not self.send():
            time.sleep(PERIOD_S)
        self._all_sent.set()
        reader.join()
        return Report(self.phases, len(self._answered - self._read), self._next)

    def _follow_input(self) -> None:
        for _line in sys.stdin:
            self.phases.append(Phase())
        self._ended.set()

    def _keep_reading(self) -> None:
        """Read with long polls; at the end, until everything that was answered is read."""
        wire, offset = Wire(self._address), 0
        while not self._all_sent.is_set() or self._answered - self._read:
            header = pull_header(
                consumer_group="probes",
                topic=TOPIC,
                queue_offset=offset,
                sys_flag=6,  # to be held, with a subscription
                suspend_timeout_millis=HELD_MS,
            )
            began = time.perf_counter()
            try:
                answer = wire.ask(RequestCode.PULL_MESSAGE, header)
            except (OSError, AssertionError):
                self._phase.closed += 1
                wire = Wire(self._address)
                continue
            if answer.code == ResponseCode.SUCCESS:
                offset = self._take(answer, offset)
            elif time.perf_counter() - began < HELD_MS / 2_000:
                self._phase.early += 1
                time.sleep(PERIOD_S)

    def _take(self, answer: RemotingCommand, offset: int) -> int:
        for record in decode_records(answer.body):
            self._read.add(int(record.body.split(b" ", 1)[0]))
            offset = record.queue_offset + 1
        return offset


if __name__ == "__main__":
    print(json.dumps(asdict(Probe(sys.argv[1]).run())))
