"""The command `broker`: arguments, exit codes, signals.

Exit codes: 0 ordered stop · 1 unexpected error · 2 usage or configuration · 3 the directory is in
use by another broker · 4 the store cannot be opened or written · 5 an address is taken.
"""

import argparse
import asyncio
import ctypes
import fcntl
import gc
import ipaddress
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from halfmq.store.config import FlushMode
from halfmq.store.errors import DirectoryInUseError, StoreError

from .config import BrokerConfig, NetworkConfig
from .config_file import LoadedConfig, load_config
from .errors import AddressTakenError, BrokerConfigError
from .http.endpoint import DEFAULT_PORT
from .logs import LogLevel, configure_logging
from .loop.services import Periodic
from .members import as_member, check_members, member_names
from .net.registration import parse_addresses
from .service import Broker
from .supervisor import MEMBER_OPTION, Supervisor

logger = logging.getLogger(__name__)

DESCRIPTORS_WANTED: Final = 65_536
"""Open files and sockets: 20,000 connections, 2,048 queues with two files each, and a reserve. Most
systems have a soft limit of 1,024."""


OWN_MAPPING_MIN: Final = 1 << 20
"""Bytes from which a block of memory is a mapping of its own. The page fault for each 4 KiB of it
costs a fraction of writing a message of this size to the disk."""

TRIM_S: Final = 10.0
"""Seconds between two returns of free memory to the system, each of some milliseconds at most."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""Options of mallopt. Source: the header malloc.h of glibc."""


class ExitCode(IntEnum):
    """The exit codes of the process."""

    STOPPED = 0
    UNEXPECTED_ERROR = 1
    CONFIGURATION = 2
    DIRECTORY_IN_USE = 3
    STORE_UNUSABLE = 4
    ADDRESS_TAKEN = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the broker until a signal stops it; return the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(words)
    member, name = options.member, ""
    try:
        level = [f"logLevel={options.log_level}"] if options.log_level else []
        loaded = load_config(options.conf, [*options.set, *level])
    except BrokerConfigError as error:
        print(f"broker: {error}", file=sys.stderr)  # noqa: T201
        return ExitCode.CONFIGURATION
    siblings = member_names(loaded.config)
    if member is not None:
        loaded = as_member(loaded, member[0])
        name = siblings.pop(member[0])
    configure_logging(loaded.config.logs.level, loaded.config.logs.form, name)
    for warning in loaded.warnings if member is None else ():
        logger.warning("event=config_warning warning=%s", warning)
    if options.print_config:
        print("\n".join(loaded.lines()))  # noqa: T201
        return ExitCode.STOPPED
    raise_descriptor_limit()
    reserve_descriptor_table()
    return_large_blocks()
    try:
        if member is not None:
            shared = socket.socket(fileno=member[1])
            return _run(_serve(loaded, (shared, siblings)))
        check_members(loaded.config)
        return _run(
            _serve(loaded)
            if loaded.config.network.brokers == 1
            else _supervise(loaded.config, words)
        )
    except BrokerConfigError as error:
        return _fail(ExitCode.CONFIGURATION, error)
    except DirectoryInUseError as error:
        return _fail(ExitCode.DIRECTORY_IN_USE, error)
    except StoreError as error:
        return _fail(ExitCode.STORE_UNUSABLE, error)
    except AddressTakenError as error:
        return _fail(ExitCode.ADDRESS_TAKEN, error)
    except Exception:
        logger.exception("event=unexpected_error")
        return ExitCode.UNEXPECTED_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="broker",
        description="A RocketMQ-compatible message broker for transactional half messages.",
        epilog="exit codes: 0 ordered stop, 1 unexpected error, 2 usage or configuration, "
        "3 directory in use by another broker, 4 store cannot be opened or written, "
        "5 address taken",
    )
    parser.add_argument(
        "-c", "--conf", type=Path, metavar="FILE", help="configuration, key=value lines"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one setting; wins over the file",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print every key with value, default and source"
    )
    parser.add_argument(
        MEMBER_OPTION,
        nargs=2,
        type=int,
        help=argparse.SUPPRESS,  # how the supervisor starts one
    )
    parser.add_argument(
        "--log-level", choices=[*LogLevel], help="least level logged; as --set logLevel=LEVEL"
    )
    return parser


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to ``DESCRIPTORS_WANTED``, or to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(DESCRIPTORS_WANTED, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # macOS has a limit below its hard limit
        logger.warning("event=descriptor_limit soft=%d error=%r", soft, str(error))


def reserve_descriptor_table() -> None:
    """Make the kernel allocate its full table of descriptors, while the process has one thread.

    The kernel doubles a full table. In a process with several threads, the thread that opens the
    next descriptor then waits for every processor: this blocked the loop for 7 to 26 ms at the
    128th, the 256th, the 512th descriptor. The full table takes half a megabyte of kernel memory.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = DESCRIPTORS_WANTED if soft == resource.RLIM_INFINITY else min(soft, DESCRIPTORS_WANTED)
    with suppress(OSError), Path(os.devnull).open("rb") as some:
        os.close(fcntl.fcntl(some, fcntl.F_DUPFD_CLOEXEC, count - 1))


def return_large_blocks() -> None:
    """Have the C library return large blocks to the system when they are freed.

    By default glibc gives blocks their own mappings only above the size of the largest one that was
    freed, up to 32 MiB. Others lie in its heap, where one small block above them keeps them all:
    what slow readers had not read took tens of megabytes after they had gone.
    """
    with suppress(OSError, TypeError, AttributeError):  # another system, or another C library
        mallopt = ctypes.CDLL(None).mallopt
        for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            mallopt(option, OWN_MAPPING_MIN)


def return_free_pages() -> None:
    """Have the C library return whole pages that are free, wherever they lie in its heap.

    By itself it returns those at the end only: a thousand TLS connections left 30 MB.
    """
    with suppress(OSError, TypeError, AttributeError):  # another system, or another C library
        ctypes.CDLL(None).malloc_trim(0)


def _run(main_coroutine: Coroutine[Any, Any, int]) -> int:
    try:
        import uvloop  # noqa: PLC0415  # absent on Windows and PyPy, which use plain asyncio
    except ImportError:
        return asyncio.run(main_coroutine)
    return uvloop.run(main_coroutine)


def _handle_signals(stop: Callable[[], None]) -> None:
    """Stop in order by the usual signals; no other one ends the process before it has flushed."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            loop.add_signal_handler(number, stop)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        loop.add_signal_handler(number, logger.warning, "event=signal_ignored signal=%s", number)


async def _supervise(config: BrokerConfig, arguments: Sequence[str]) -> int:
    stop_requested = asyncio.Event()
    _handle_signals(stop_requested.set)
    return await Supervisor(config, arguments, stop_requested).run()


def _stop_with_supervisor(stop: Callable[[], None]) -> None:
    """Stop when the pipe to the supervisor ends, to which it never writes."""
    loop, pipe = asyncio.get_running_loop(), sys.stdin.fileno()

    def ended() -> None:
        loop.remove_reader(pipe)
        logger.warning("event=supervisor_lost")
        stop()

    loop.add_reader(pipe, ended)


async def _serve(
    loaded: LoadedConfig, shared_port: tuple[socket.socket, list[str]] | None = None
) -> ExitCode:
    """Run a broker, perhaps one of several, until it is to stop."""
    config = loaded.config
    started = time.monotonic()
    stop_requested = asyncio.Event()
    _handle_signals(stop_requested.set)
    if shared_port is not None:
        _stop_with_supervisor(stop_requested.set)
    broker = Broker(
        loaded, end=stop_requested.set, default_http_port=DEFAULT_PORT, shared_port=shared_port
    )
    # The start creates tables of millions of objects and almost no garbage. Collections would visit
    # all of them repeatedly while the tables grow, and take a fifth of its time.
    gc.disable()
    try:
        report = await broker.start()
    finally:
        gc.enable()
    try:
        gc.collect()
        gc.freeze()  # these objects live as long as the process: later collections skip them
        if config.store.flush_mode is FlushMode.ASYNC_FLUSH:
            logger.warning(
                "event=async_flush interval_ms=%d note='A power cut or a kernel crash loses "
                "acknowledged messages of this interval; flushDiskType=SYNC_FLUSH loses none'",
                config.store.flush_interval_ms,
            )
        warn_of_exposure(config)
        warn_of_wrong_address(config.network)
        unflushed = config.transaction.unflushed_topics
        if unflushed:
            logger.warning(
                "event=async_transactions topics=%s note='A power cut or a kernel crash loses "
                "halves and decisions that were answered, and messages whose rows were written "
                "with them; without transactionAsyncFlushTopics it loses none'",
                ";".join(sorted(unflushed)),
            )
        print(  # noqa: T201
            f"ready listen={broker.address} namesrv={broker.namesrv_address}"
            f" store={config.store.root} flush={config.store.flush_mode.value}"
            f" recovery_ms={report.duration_ms:.0f}"
            f" start_ms={(time.monotonic() - started) * 1_000:.0f}"
            + (f" http={broker.http_address}" if broker.http_address else ""),
            flush=True,
        )
        trimming = Periodic(TRIM_S, [lambda: return_free_pages])
        await trimming.start()
        await stop_requested.wait()
        logger.info("event=stopping")
        await trimming.stop()
    finally:
        await broker.stop()
    logger.info("event=stopped")
    return ExitCode.STOPPED if broker.failure is None else ExitCode.STORE_UNUSABLE


def warn_of_exposure(config: BrokerConfig) -> None:
    """Log a warning if other machines reach the broker without authentication or policies."""
    access, host = config.access, ipaddress.ip_address(config.network.bind_address)
    if host.is_loopback or access.acl_enabled:
        return
    if not access.authentication_enabled:
        logger.warning(
            "event=open_to_everybody bindAddress=%s note='Everyone who reaches it may read, send, "
            "decide and reset; aclEnable or authenticationEnabled requires a signature'",
            host,
        )
    elif not access.authorization_enabled:
        logger.warning(
            "event=open_to_every_user bindAddress=%s note='Every user may do everything; "
            "authorizationEnabled enforces their policies'",
            host,
        )


def warn_of_wrong_address(network: NetworkConfig) -> None:
    """Log a warning if clients are sent to an address on which the broker does not listen."""
    bound = ipaddress.ip_address(network.bind_address)
    if network.advertised_host:
        sent = ipaddress.ip_address(network.advertised_host)
        listens = sent == bound or (bound.is_unspecified and sent.version == bound.version)
        if sent.is_unspecified or not listens:
            logger.warning(
                "event=unreachable_address brokerIP1=%s bindAddress=%s note='Clients are sent "
                "to brokerIP1, where the broker does not listen; unless something forwards from "
                "there, set bindAddress to it, or to 0.0.0.0 or :: for all addresses'",
                sent,
                bound,
            )
    elif bound.is_loopback and not all(
        _is_loopback(host) for host, _ in parse_addresses(network.namesrv_addr)
    ):
        logger.warning(
            "event=unreachable_address namesrvAddr=%s bindAddress=%s note='Name servers send "
            "clients to the address from which the broker registers, where it does not listen; "
            "set bindAddress to it, or to 0.0.0.0 or :: for all addresses'",
            network.namesrv_addr,
            bound,
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _fail(code: ExitCode, error: Exception) -> int:
    logger.error("event=start_failed exit_code=%d error=%s", code, error)
    return code
