"""Watches the room that the store has left, and acts on it before there is none.

What is left for messages is what is free, and what the log has reserved ahead of its end, without
the reserve. As it shrinks, the stages of `disk_stages` follow one another; as it grows again, be it
that old files went or that an operator made room, they end by themselves.

The reserve is a file of blocks (`store.space`), held from the first warning on. When an append of
decisions finds no space, a piece of the reserve is given back and the append is made again; until
there is room for the whole reserve again, decisions alone are appended. So is it when next to
nothing is free: queues, tables and snapshots need some as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from halfmq.store.draft import Draft
from halfmq.store.format.topics import OP_TOPIC
from halfmq.store.space import Space, SpaceReserve

from .config import DiskConfig
from .disk_stages import Forecast, Limits, Stage

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Seconds between two looks at a large disk with room: it takes many to fill it."""

LOOK_CLOSELY_S: Final = 0.1
"""The same from the first warning on, when a fast disk takes fifty megabytes meanwhile, and of a
small disk at any time."""

SMALL_DISK: Final = 16 << 30
"""Bytes of a disk that can be filled from the first warning on in about a second."""

TOLD_EVERY_S: Final = 3_600.0
"""Seconds after which a stage that goes on is logged again."""

RELEASE_STEPS: Final = 16
"""Pieces in which the reserve is given back; a decision rarely needs more than one."""

RELEASE_BYTES_MIN: Final = 2 << 20
"""Bytes of the smallest piece: a file of the log grows by one megabyte at once."""

_DECIDES: Final = 0x8
"""The bit of sysFlag that commits (0x8) and rollbacks (0xC) have and halves (0x4) have not."""


class Gate(Protocol):
    """What stands before the handlers of messages."""

    refused: int
    slowed: int

    def open(self) -> None: ...

    def slow(self, rate: int) -> None: ...

    def close(self, reason: str) -> None: ...


def decides(group: Sequence[Draft]) -> bool:
    """Tell whether a group holds nothing but decisions and what goes with them."""
    return all(draft.sys_flag & _DECIDES or draft.topic == OP_TOPIC for draft in group)


class DiskGuard:
    """Looks at the disk and sets what is allowed; call `tick` when it asks for it."""

    def __init__(
        self,
        config: DiskConfig,
        reserve: SpaceReserve,
        gate: Gate,
        *,
        path: Path,
        reserved_ahead: Callable[[], int],
        space_of: Callable[[Path], Space],
        clock: Callable[[], float],
        hurry: Callable[[], None] = lambda: None,
    ) -> None:
        """Wire it.

        Args:
            config: Where stages begin.
            reserve: What is held back.
            gate: What is told how messages are to be taken.
            path: Where the log lies.
            reserved_ahead: Says how many bytes the log may still take without asking for more.
            space_of: Looks up the room of a disk.
            clock: Seconds, for the forecast.
            hurry: Has `tick` called soon.
        """
        self._config = config
        self._reserve = reserve
        self._gate = gate
        self._path = path
        self._reserved_ahead = reserved_ahead
        self._space_of = space_of
        self._clock = clock
        self._hurry = hurry
        self._limits = Limits(config, 0)
        self._space = Space(0, 0)
        self._left = 0
        self._forecast = Forecast()
        self._told = 0.0  # when the stage was logged
        self._holding: asyncio.Future[bool] | None = None
        self.stage = Stage.PLENTY
        self.only_decisions = False
        """Whether nothing else may be appended: the rest of the disk is the reserve."""

    # --- looking

    def tick(self) -> float:
        """Look at the disk, and do what follows; return the seconds until the next look."""
        try:
            self._space = self._space_of(self._path)
        except OSError as error:
            logger.warning("event=disk_unknown path=%s error=%r", self._path, str(error))
            return LOOK_S
        self._limits = limits = Limits(self._config, self._space.size)
        held = self._reserve.held
        self._left = self._space.free + self._reserved_ahead() - (limits.reserve - held)
        self._forecast.note(self._clock(), self._left)
        if self._space.free < held // 4 and not self.only_decisions:
            # One piece, for what is small; the rest is for appends of decisions alone.
            self._use_reserve("next to nothing is free")
        if self.only_decisions:
            if self._space.free - (limits.reserve - held) > limits.refuse // 4:
                self._hold_reserve()
        else:
            self._set(limits.stage(self._left, self.stage))
            if self.stage >= Stage.WARN and held < limits.reserve:
                self._hold_reserve()
        is_small = self._space.size < SMALL_DISK
        return LOOK_CLOSELY_S if is_small or self.stage >= Stage.WARN else LOOK_S

    def _set(self, stage: Stage) -> None:
        before, self.stage = self.stage, stage
        if stage is Stage.SLOW:
            self._gate.slow(self._limits.slow_rate(self._left))
        elif stage >= Stage.REFUSE:
            self._gate.close(self._refusal())
        elif before >= Stage.SLOW:
            self._gate.open()
        now = self._clock()
        if stage is not before or (stage and now - self._told >= TOLD_EVERY_S):
            self._told = now
            level = logging.INFO if stage < before else logging.WARNING
            logger.log(level, "event=disk_%s %s", stage.name.lower(), self._in_words())

    def _refusal(self) -> str:
        return (
            f"[DISK]{max(self._left, 0)} bytes are left for messages on the disk of {self._path}, "
            f"and below {self._limits.refuse} none are taken: try another broker, or make room"
        )

    def _in_words(self) -> str:
        seconds = self.forecast_s
        until = "none" if seconds is None else f"{seconds / 3600:.1f}"
        return (
            f"path={self._path} left_bytes={self._left} free_bytes={self._space.free} "
            f"size_bytes={self._space.size} reserve_bytes={self._reserve.held} "
            f"hours_until_refusal={until}"
        )

    @property
    def forecast_s(self) -> int | None:
        """Seconds until messages are refused, at the rate of the last ten minutes; None: never."""
        return self._forecast.seconds_until(self._limits.refuse)

    @property
    def is_scarce(self) -> bool:
        """Whether old files are to be deleted at any hour."""
        return self.stage >= Stage.WARN

    # --- the reserve

    def _hold_reserve(self) -> None:
        """Have the reserve filled up, on a thread: some file systems need long for it."""
        if self._holding is None:
            loop = asyncio.get_running_loop()
            self._holding = loop.run_in_executor(None, self._reserve.hold, self._limits.reserve)
            self._holding.add_done_callback(self._held)

    def _held(self, done: asyncio.Future[bool]) -> None:
        self._holding = None
        if done.cancelled() or done.exception() is not None or not done.result():
            return
        if self.only_decisions:
            self.only_decisions = False
            logger.warning("event=disk_reserve_held bytes=%d", self._reserve.held)
            self.stage = Stage.REFUSE
            self._hurry()

    def _use_reserve(self, reason: str) -> bool:
        """Give back a piece of the reserve; return whether there was one."""
        if self._holding is not None:
            return False  # its file is being written by a thread
        step = max(self._limits.reserve // RELEASE_STEPS, RELEASE_BYTES_MIN)
        try:
            given = self._reserve.release(step)
        except OSError as error:
            logger.error("event=reserve_stuck error=%r", str(error))  # noqa: TRY400
            given = 0
        if not self.only_decisions:
            self.only_decisions = True
            logger.critical("event=disk_full reason=%r %s", reason, self._in_words())
            self._set(Stage.RESERVE)
        return given > 0

    # --- around appends

    def make_room(self, group: Sequence[Draft]) -> bool:
        """Free some space after an append found none; return whether it is worth another try."""
        if not decides(group):
            if self.stage < Stage.REFUSE:  # somebody else was faster than the looks
                self._set(Stage.REFUSE)
            return False
        return self._use_reserve("an append of decisions found no space")

    async def start(self) -> None:
        """Look at the disk before the first message comes."""
        self.tick()

    async def stop(self) -> None:
        """Let the reserve be written to its end; it stays for the next start to use."""
        if self._holding is not None:
            await asyncio.gather(self._holding, return_exceptions=True)

    def metrics(self) -> dict[str, int]:
        """Return gauges and counters by name; -1 where there is no forecast."""
        seconds = self.forecast_s
        return {
            "stage": int(self.stage),
            "left_bytes": self._left,
            "free_bytes": self._space.free,
            "size_bytes": self._space.size,
            "reserve_bytes": self._reserve.held,
            "refuse_below_bytes": self._limits.refuse,
            "shrinking_bytes_per_s": int(self._forecast.rate),
            "seconds_until_refusal": -1 if seconds is None else seconds,
            "messages_refused": self._gate.refused,
            "messages_slowed": self._gate.slowed,
        }
