"""A run: a broker, the clients of its users, and all faults.

It has two phases. In the first, things work and fail as the seed draws them. In the second nothing
fails any more, all processes are started again, and time passes until nothing is left to do. Then
``invariants`` are checked.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final

from halfmq.broker.config import BrokerConfig, NetworkConfig, StoreSettings, TransactionConfig
from halfmq.broker.disk.disk_limits import Space
from halfmq.broker.service import Broker
from halfmq.broker.transaction.state.caches import DecisionCache
from halfmq.store.errors import CorruptRecordError, StoreError
from tests.support.broker_parts import pending_of, store_of

from . import invariants
from .clients import Clients
from .disk import Disk
from .loop import Killed, Process, SimulatedWorker, SimulationLoop
from .network import Network
from .patches import installed
from .poppers import Poppers
from .scenario import HASH_SLOTS, Records, Scenario
from .watch import Watch

BROKER: Final = "10.0.0.1"
PORT: Final = 10_911
NAMESRV: Final = 9_876
SETTLE_S_MAX: Final = 400.0
"""Virtual seconds that may pass until everything has come to rest."""
DISK_SIZE: Final = 1 << 35
"""Bytes, as the broker sees it."""
MESSAGE_SIZE_MAX: Final = 2_048
LOG_SIZE_MAX: Final = 4 << 20
"""Bytes of all files of the log that a run may make: several times what it sends."""
CALM_S: Final = 2.0
"""Virtual seconds after that, in which what must not come has time to come."""

COLD: Final = 0.3
"""Share of the reads of a third of the runs that find nothing in memory."""

CLOCK_STEPS_S: Final = (120.0, 7_200.0, 10 * 86_400.0)
"""By how much a clock steps, forward or back."""

FAULTS: Final = {
    "kill": 1.0,  # the broker, now
    "power": 1.5,  # of the broker's machine, now
    "write": 2.0,  # the broker, at one of its next writes
    "step": 2.0,  # the broker, at one of its next callbacks
    "restart": 1.0,  # the broker, in good order
    "producer": 2.0,
    "consumer": 0.7,
    "cut": 2.0,  # a connection
    "stall": 1.0,  # a connection, for a while
    "stop": 0.7,  # a process, for a while
    "replay": 1.0,  # of requests, by a middle box
    "sync": 1.5,  # one of the broker's next syncs
    "refusal": 0.6,  # one of its next calls that change files: an i/o error
    "space": 0.8,  # of which there is none, for a while
}
"""How often each happens, compared with the others."""


class World:
    """One run."""

    def __init__(self, seed: int, base: Path, *, keep_trace: bool = False) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.loop = SimulationLoop(random.Random(self.chance.random()), keep_trace=keep_trace)
        self.network = Network(self.loop, secret=base)
        self.disk = Disk(self.loop, random.Random(self.chance.random()), base)
        self.scenario = Scenario.drawn(self.chance)
        self._memory = random.Random(f"memory of {seed}")
        self._gone = self._memory.choice((0.0, 0.0, COLD))
        self.records = Records()
        self.clients = Clients(self, f"{BROKER}:{NAMESRV}")
        self.poppers = Poppers(self, seed)
        self.settling = False
        self.broker: Broker | None = None  # while it serves
        self.broker_process: Process | None = None
        self.programs: dict[str, Process] = {}  # of users, by name
        self._brokers: list[Broker] = []  # all that there were
        self._outside = contextvars.copy_context()
        self.watch = Watch(self)
        self.disk.on_fault = self._disk_failed
        self.disk.on_create = self._created
        self.disk.on_unlink = self._unlinked
        self._log_files = 0  # that were made
        self._counts: dict[int, int] = {}  # of checks, that the next broker must know
        self._incarnations = Counter[str]()

    # --- the run

    def run(self) -> None:
        """Run both phases; ``records.violations`` lists the violated invariants."""
        scenario, loop = self.scenario, self.loop
        chance = random.Random(self.chance.random())
        with installed(loop, self.disk, chance, fenced=scenario.fenced, is_gone=self._is_gone):
            self.network.delay_s, self.network.split = scenario.delay_s, scenario.split
            self.network.keep_frames = scenario.middle_box
            self.disk.sync_s = scenario.sync_s
            self.start_broker()
            for number in range(scenario.producers):
                self.start_program(f"producer-{number}")
            for number in range(scenario.consumers):
                self.start_program(f"consumer-{number}")
            self.start_program("operator-0")
            for name in self.poppers.names:
                self.start_program(name)
                self.later(self.poppers.chance.random() * scenario.seconds, self._restart, name)
            self._plan_fault()
            for _ in range(scenario.power_cuts):
                self.later(self.chance.random() * scenario.seconds, self._cut_power)
            for _ in range(scenario.clock_steps):
                self.later(self.chance.random() * scenario.seconds, self._step_clock)
            loop.run_for(scenario.seconds)
            try:
                self._settle()
            except (AssertionError, CorruptRecordError) as error:
                self.violate(f"the log cannot be read: {error!r}")
            self.records.violations.extend(loop.failures)
            self.records.violations.extend(loop.errors)
            self._release_objects()

    def _release_objects(self) -> None:
        """Break cycles of objects that garbage collection does not visit."""
        for broker in self._brokers:
            for entry in pending_of(broker):
                entry.owner = None
            # Records that the collector does not visit would keep dead brokers in memory.
            broker._group._staged.clear()
            broker._release._waiting.clear()
            broker._release._stalled.clear()
            broker._polling.waiting.clear()
        self._brokers.clear()
        self.programs.clear()
        self.clients.under_way.clear()
        self.network.clear()
        self.disk.release_all()

    def _settle(self) -> None:
        self.settling = True
        loop, network = self.loop, self.network
        network.delay_s, network.split, network.keep_frames = 0.000_5, 0.0, False
        self.disk.sync_s = 0.001
        for process in (self.broker_process, *self.programs.values()):
            if process is not None:
                process.die_at_step = -1
        self.disk.stop_faults()
        if self.broker_process is not None and self.broker_process.faulty:
            self.kill_broker(power=False)
        end = loop.now + SETTLE_S_MAX
        while loop.now < end and not loop.halted and self._unsettled():
            loop.run_for(0.5)
        unsettled = self._unsettled()
        loop.run_for(CALM_S)
        if loop.halted:
            return
        if unsettled:
            self.violate(f"it does not come to rest: {unsettled}")
        if self.broker is not None:
            invariants.check_table(self)
        self._stop_everything()
        invariants.check(self)

    def _unsettled(self) -> str:
        """Return what is still to happen; an empty string if nothing is."""
        if self.broker is None:
            return "the broker is down"
        if self.clients.under_way:
            return f"under way: {sorted(self.clients.under_way)}"
        if self.broker.transactions.metrics()["pending"]:
            return f"{self.broker.transactions.metrics()['pending']} transactions undecided"
        missing = invariants.undelivered(self)
        return f"not delivered: {missing}" if missing else ""

    def _stop_everything(self) -> None:
        for process in self.programs.values():
            self._kill(process)
        if self.broker is not None:
            self.stop_broker(restart_after=None)
            self.loop.run_while(lambda: self.broker_process is not None, 60.0)
            if self.broker_process is not None:
                self.violate("the broker does not stop")

    def violate(self, what: str) -> None:
        """Record a violated invariant."""
        self.records.violations.append(f"t={self.loop.now:.6f} {what}")

    def later(self, seconds: float, work: Callable[..., object], *args: Any) -> None:
        """Schedule a call that belongs to no process."""
        self.loop.call_at(self.loop.now + seconds, work, *args, context=self._outside.copy())

    # --- processes

    def _process(self, name: str, address: str) -> Process:
        self._incarnations[name] += 1
        return Process(f"{name}.{self._incarnations[name]}", address, self.loop)

    def _run_main(self, process: Process, main: Coroutine[Any, Any, None]) -> None:
        def done(task: asyncio.Task[None]) -> None:
            if process.dead or task.cancelled():
                return
            error = task.exception()
            if error is None or isinstance(error, Killed):
                return
            if process.faulty and isinstance(error, OSError | StoreError):
                self._on_disk_failure(process)
            else:
                self.violate(f"{process.name} failed: {error!r}")

        process.context.copy().run(process.run(main).add_done_callback, done)

    def start_program(self, name: str) -> None:
        """Start a program of a user: ``producer-0``, ``consumer-1``."""
        kind, number = name.split("-")
        kinds: dict[str, tuple[int, Callable[[Process], Coroutine[Any, Any, None]]]] = {
            "producer": (1, self.clients.produce),
            "consumer": (2, self.clients.consume),
            "operator": (3, self.clients.operate),
            "popper": (5, partial(self.poppers.run, namesrv=f"{BROKER}:{NAMESRV}")),
            "sorter": (6, partial(self.poppers.run, namesrv=f"{BROKER}:{NAMESRV}")),
        }
        net, main = kinds[kind]
        process = self.programs[name] = self._process(name, f"10.0.{net}.{int(number) + 1}")
        skew_s = self.scenario.skew_s * self.chance.uniform(-1, 1)
        self.loop.clocks.setdefault(process.address, skew_s)
        self._run_main(process, main(process))

    def _kill(self, process: Process) -> None:
        """End a process, as kill -9 or an exit does."""
        if process.dead:
            return
        self.loop.record_event("gone", process.name)
        self.loop.mark_dead(process)
        self.network.process_died(process)
        self.clients.forget(process)
        if process is self.broker_process:
            self.watch.forget()
            self.broker = self.broker_process = None
            self.disk.die_at_write = -1
            self.disk.release(process)

    # --- the broker

    def start_broker(self) -> None:
        """Start a broker on the current files."""
        if self.broker_process is not None:
            return
        process = self._process("broker-0", BROKER)
        process.disk = self.disk
        self.broker_process = process
        self.network.power_back(BROKER)
        self.loop.record_event("start", process.name)
        self._run_main(process, self._broker_main(process))
        if not self.settling and self.chance.random() < 0.15:
            self._die_at_write(process)

    def _broker_config(self) -> BrokerConfig:
        scenario = self.scenario
        return BrokerConfig(
            network=NetworkConfig(
                bind_address=BROKER, listen_port=PORT, namesrv_listen_port=NAMESRV
            ),
            store=StoreSettings(
                root=self.disk.root,
                flush_mode=scenario.flush_mode,
                commit_log_file_size=scenario.log_file_size,
                consume_queue_file_size=scenario.queue_file_size,
                max_message_size=scenario.log_file_size if scenario.giants else MESSAGE_SIZE_MAX,
                max_hash_slots=HASH_SLOTS,
                max_index_items=200,
            ),
            transaction=TransactionConfig(
                timeout_ms=scenario.timeout_ms,
                check_interval_ms=scenario.interval_ms,
                check_max=scenario.check_max,
                op_batch_interval_ms=500,
            ),
        )

    async def _broker_main(self, process: Process) -> None:
        broker = Broker(
            self._broker_config(),
            worker=lambda _name, work, pause: SimulatedWorker(self.loop, process, work, pause),
            disk_space=self._space,
        )
        self._brokers.append(broker)
        _make_small(broker, self.scenario)
        await broker.start()
        self.broker = broker
        self.loop.record_event("ready", process.name)
        self._note_start(broker)
        invariants.check_start(self)
        self.watch.check_counts(self._counts)
        self._counts = {}

    def _note_start(self, broker: Broker) -> None:
        records, end = self.records, store_of(broker).write_offset
        records.started_at = self.loop.now
        records.log_starts = [*(start for start in records.log_starts if start < end), end]

    def stop_broker(self, restart_after: float | None) -> None:
        """Stop the broker in order."""
        process, broker = self.broker_process, self.broker
        if process is None or broker is None or not process.may_nest:
            return
        if process.waiting_threads or self.loop.depth:
            self.later(0.001, self.stop_broker, restart_after)
            return
        process.may_nest = False  # from here on its threads do not wait: they are about to end
        self.broker = None
        self.loop.record_event("stop", process.name)
        self._run_main(process, self._stop_main(broker, process, restart_after))

    async def _stop_main(
        self, broker: Broker, process: Process, restart_after: float | None
    ) -> None:
        await broker.stop()
        self.loop.record_event("stopped", process.name)
        self.later(0.0, self._exited, process, restart_after)

    def _exited(self, process: Process, restart_after: float | None) -> None:
        if not process.dead:
            self._kill(process)
            if restart_after is not None:
                self.later(restart_after, self.start_broker)

    def _on_disk_failure(self, process: Process) -> None:
        """Restart a broker later that could not start or stop because the disk failed."""
        self.records.events["gave up"] += 1
        self._counts = {}
        self._kill(process)
        self.later(self.chance.random() * 3.0, self.start_broker)

    def _disk_failed(self, kind: str, process: Process) -> None:
        """Let the operator restart a broker after a disk fault; after a full disk, not always."""
        self.records.events[kind] += 1
        is_first, process.faulty = not process.faulty, True
        if is_first and not self.settling and (kind != "no space" or self.chance.random() < 0.3):
            self.later(self.chance.choice((0.1, 1.0, 4.0)), self._repair, process)

    def _repair(self, process: Process) -> None:
        if process is not self.broker_process:
            return
        way = self.chance.random()
        if way < 0.5 or self.broker is None:
            self.kill_broker(power=False)
            # After a power cut, pages that a failed sync left only in memory are lost.
            self.later(self.chance.random() * 4.0, self._cut_power)
        elif way < 0.6:
            self.kill_broker(power=True)
        else:
            self.stop_broker(restart_after=self.chance.random())

    def _created(self, path: Path) -> None:
        if path.parent == self.disk.root / "commitlog":
            self._log_files += 1
            if self._log_files * self.scenario.log_file_size > LOG_SIZE_MAX:
                self.loop.halt("the log grows without end")

    def _unlinked(self, path: Path) -> None:
        """Archive the oldest log file before it is deleted by age."""
        if path.parent == self.disk.root / "commitlog":
            names = sorted(entry.name for entry in path.parent.iterdir())
            if len(names) > 1 and path.name == names[0]:
                self.records.archive[int(path.name)] = path.read_bytes()
                self.records.events["log file deleted"] += 1

    def _space(self, _path: Path) -> Space:
        full = self.loop.now < self.disk.full_until
        if full and self.loop.process is not None:
            self.loop.process.faulty = True
        return Space(0 if full else DISK_SIZE // 2, DISK_SIZE)

    def kill_broker(self, *, power: bool) -> None:
        """End the broker as kill -9 or a power cut does, and start it again later."""
        process = self.broker_process
        if process is None:
            return
        acting, self.loop.process = self.loop.process, None
        self.broker = self.broker_process = None
        self.records.events["power cut" if power else "killed"] += 1
        self.loop.record_event("power cut" if power else "killed", process.name)
        self.loop.mark_dead(process)
        self.disk.die_at_write = -1
        if power:
            self.network.power_lost(process)
            self.disk.power_cut()
            self.records.power_cuts += 1
            self._counts = {}
        else:
            self._counts = self._counts or ({} if process.faulty else self.watch.surviving_counts())
            self.network.process_died(process)
            self.disk.process_killed()
        self.watch.forget()
        self.loop.process = acting
        # Its stack may still unwind, so its descriptors are closed later.
        self.later(0.0, self.disk.release, process)
        self.later(self.chance.choice((0.02, 0.02, 0.5, 3.0)), self.start_broker)

    def _die_at_write(self, process: Process) -> None:
        power = self.chance.random() < 0.5
        soon = self.chance.choice((20, 150))
        self.disk.die_at_write = self.disk.writes + self.chance.randrange(1, soon)
        self.disk.on_write_of_death = lambda: self._die(process, power=power)

    def _die(self, process: Process, *, power: bool) -> None:
        assert process is self.broker_process
        self.kill_broker(power=power)

    # --- what fails

    def _plan_fault(self) -> None:
        if not self.settling:
            self.later(self.chance.expovariate(self.scenario.faults_per_s), self._fault)

    def _fault(self) -> None:
        if self.settling:
            return
        name = self.chance.choices(list(FAULTS), list(FAULTS.values()))[0]
        self.loop.record_event("fault", name)
        self.records.events[name] += 1
        getattr(self, f"_fault_{name}")()
        self._plan_fault()

    def _fault_kill(self) -> None:
        self.kill_broker(power=False)

    def _fault_power(self) -> None:
        self.kill_broker(power=True)

    def _cut_power(self) -> None:
        if self.settling:
            return
        if self.broker_process is None:
            self.later(0.2, self._cut_power)  # soon after the next start, then
        else:
            self.kill_broker(power=True)

    def _step_clock(self) -> None:
        """Step the clock of a machine, most often the broker's; restarts do not change it back."""
        clocks, chance = self.loop.clocks, self.chance
        address = BROKER if chance.random() < 0.8 else chance.choice(list(clocks))
        ahead_s = clocks.get(address, 0.0)
        if ahead_s and chance.random() < 0.4:
            clocks[address] = 0.0  # it is corrected
        else:
            clocks[address] = ahead_s + chance.choice((-1, 1)) * chance.choice(CLOCK_STEPS_S)
        self.records.events["clock step"] += 1
        if address == BROKER:
            self.records.clock_stepped_at = self.loop.now

    def _fault_sync(self) -> None:
        self.disk.fail_at_sync = self.disk.syncs + self.chance.randrange(1, 10)

    def _fault_refusal(self) -> None:
        soon = self.chance.choice((10, 100))
        self.disk.fail_at_write = self.disk.writes + self.chance.randrange(1, soon)

    def _fault_space(self) -> None:
        self.disk.full_until = self.loop.now + self.chance.choice((0.05, 0.5, 3.0))

    def _fault_write(self) -> None:
        if self.broker_process is not None:
            self._die_at_write(self.broker_process)

    def _fault_step(self) -> None:
        process = self.broker_process
        if process is not None:
            power = self.chance.random() < 0.5
            process.on_step_of_death = lambda: self._die(process, power=power)
            process.die_at_step = process.steps + self.chance.randrange(1, 400)

    def _fault_restart(self) -> None:
        self.stop_broker(restart_after=self.chance.random())

    def _fault_producer(self) -> None:
        name = f"producer-{self.chance.randrange(self.scenario.producers)}"
        process = self.programs[name]
        again = self.chance.choice((0.01, 0.5, 3.0))

        def die() -> None:
            if not process.dead:
                self._kill(process)
                self.later(again, self.start_program, name)

        if self.chance.random() < 0.3:
            die()
        else:
            process.on_step_of_death = die
            process.die_at_step = process.steps + self.chance.randrange(1, 120)

    def _fault_consumer(self) -> None:
        name = f"consumer-{self.chance.randrange(self.scenario.consumers)}"
        self._restart(name, self.chance)

    def _restart(self, name: str, chance: random.Random | None = None) -> None:
        """Kill a consumer, and start it again."""
        process = self.programs[name]
        if not process.dead:
            self._kill(process)
            seconds = (chance or self.poppers.chance).random() * 3.0
            self.later(seconds, self.start_program, name)

    def _is_gone(self) -> bool:
        if self._memory.random() >= self._gone:
            return False
        self.records.events["cold read"] += 1
        return True

    def _fault_cut(self) -> None:
        connections = self.network.connections()
        if connections:
            self.network.cut(self.chance.choice(connections))

    def _fault_stall(self) -> None:
        connections = self.network.connections()
        if connections:
            end = self.chance.choice(connections)
            end = end if self.chance.random() < 0.5 else end.peer
            self.network.stall(end, self.chance.choice((0.1, 1.0, 5.0)))

    def _fault_stop(self) -> None:
        processes = [process for process in self.programs.values() if not process.dead]
        if self.broker_process is not None:
            processes.append(self.broker_process)
        if processes:
            seconds = self.chance.choice((0.05, 0.5, 4.0))
            self.loop.stop_process(self.chance.choice(processes), seconds)

    def _fault_replay(self) -> None:
        if self.network.frames and self.broker_process is not None:
            self.network.replay(self._process("box-0", "10.0.4.1"), BROKER, PORT)


def _make_small(broker: Broker, scenario: Scenario) -> None:
    """Set limits so small that caches evict, snapshots are taken and files expire in a run."""
    # In steps finer than settings have: hours are too long for a seed.
    broker._retention._reserved_ms = int(scenario.reserved_s * 1_000)
    broker._retention._hours = frozenset(range(24 if scenario.deletes else 0))
    # So that most kills find a file that is some deliveries old.
    broker._delays._done._saves._interval_ms = 300
    transactions = broker.transactions
    # So that a short log has snapshots, and a cache forgets.
    transactions._snapshots._log_bytes_min = scenario.snapshot_bytes
    pending_of(broker).decided = DecisionCache(8)
    if not scenario.middle_box:  # which sends again what is any number of prepares old
        recent = transactions.prepares.recent_prepares
        recent.refill = partial(recent.refill, bytes_max=scenario.refill_bytes)  # type: ignore[method-assign]


def run(seed: int, *, keep_trace: bool = False) -> World:
    """Run the world of a seed, and return it with what it found."""
    shared = Path("/dev/shm")
    base = Path(tempfile.mkdtemp(prefix="halfmq-", dir=shared if shared.is_dir() else None))
    gc.collect(1)
    gc.freeze()  # so that collection at the end visits only objects of the run
    try:
        world = World(seed, base, keep_trace=keep_trace)
        world.run()
    finally:
        gc.unfreeze()
        shutil.rmtree(base, ignore_errors=True)
    return world
