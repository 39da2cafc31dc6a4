"""Settings that operators read and change while the broker runs (requests 25 and 26).

A change is first written to the file of ``--conf``, so that it holds after a restart; then the
parts of the broker use it. Without ``--conf`` it is ``config/halfmqSettings.conf`` of the store.
Only the line of the setting changes in the file, which is replaced atomically. A request is refused
if it names

* a setting that takes effect only at a start, or that is a secret
* a setting given by ``--set``, which would win over the file at the next start
* a value that would delete or refuse messages at once: less than ``live_min``, or than the part of
  the disk that is in use. Such a value goes into the file, and takes effect at the next start

RocketMQ accepts every key, silently ignores unknown ones and wrong values, and writes all its
settings to the file without the comments.

Source: RocketMQ 5.3.3 ``Configuration``, ``AdminBrokerProcessor#updateBrokerConfig``.
"""

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import Final

from attrs import define

from halfmq.remoting.codes import ResponseCode
from halfmq.store.files import disk

from .access.config import TlsMode
from .config import BrokerConfig
from .config_file import LoadedConfig, Origin, key_of_line, known_settings, unknown_key, with_value
from .errors import BrokerConfigError, RequestRefusedError, invalid_parameter

logger = logging.getLogger(__name__)

_FIXED: Final[Mapping[str, str]] = {
    "brokerRole": "ASYNC_MASTER",
    "filterServerNums": "0",
    "msgTraceTopicName": "RMQ_SYS_TRACE_TOPIC",
    "slaveReadEnable": "false",
    "traceOn": "true",
}
"""Keys that tools of RocketMQ read and that are not settings here. ``exportConfigs`` of 4.9 fails
without them."""


_DISK_RATIOS: Final = frozenset({"diskMaxUsedSpaceRatio", "diskSpaceWarningLevelRatio"})
_REFUSES_IF_TRUE: Final = frozenset({"rejectTransactionMessage"})
_ZERO_IS_NO_LIMIT: Final = frozenset({"transactionPendingMaxPerGroup"})


@define(eq=False, repr=False, slots=False)
class LiveSettings:
    """The settings in force."""

    _loaded: LoadedConfig
    # Passes a changed configuration to the parts of the broker.
    _apply: Callable[[BrokerConfig], None]
    _now_ms: Callable[[], int]
    _disk_used: Callable[[], int]  # percentage of the log's disk that is in use

    def __attrs_post_init__(self) -> None:
        self._config = self._loaded.config
        self._origins = dict(self._loaded.origins)
        self._file = self._loaded.changes_file
        self._may_create = self._loaded.file is None
        self.data_version = {"counter": 0, "stateVersion": 0, "timestamp": self._now_ms()}
        """Counts the changes of this run, as RocketMQ does."""

    def text(self) -> str:
        """Return ``key=value`` lines of all settings by name; secrets are hidden.

        A comment after each, ``#key=live|restart SOURCE``, says when a change takes effect, and
        where the value is from: Java's reader of properties ignores it.
        """
        shown = {
            key: item.kind.show(getattr(getattr(self._config, section), item.attribute))
            for key, (section, item) in known_settings().items()
        }
        tls = {"useTLS": str(self._config.tls.mode is not TlsMode.DISABLED).lower()}
        lines = sorted({**_FIXED, **tls, **shown}.items())
        return "".join(f"{key}={value}\n{self._described(key)}" for key, value in lines)

    def _described(self, key: str) -> str:
        if key not in known_settings():
            return ""
        origin = self._origins.get(key)
        source = "default" if origin is None else origin.source
        return f"#{key}={'live' if known_settings()[key][1].is_live else 'restart'} {source}\n"

    def check(self, wanted: Mapping[str, str]) -> BrokerConfig:
        """Return the configuration with the wanted values.

        Raises:
            RequestRefusedError: One of the settings cannot be changed, or has an invalid value.
        """
        config = self._config
        for key, value in wanted.items():
            self._check_changeable(key)
            try:
                config = with_value(config, key, value)
            except BrokerConfigError as error:
                remark = f"{key}={error.value}: expected {error.expected}"
                raise invalid_parameter(remark) from error
            self._check_bound(key, config)
        return config

    def _check_changeable(self, key: str) -> None:
        known = known_settings()
        if key not in known:
            raise invalid_parameter(unknown_key(key, known))
        if not known[key][1].is_live:
            raise _forbidden(
                f"{key} takes effect at a start only: set it in the file of --conf and restart"
            )
        origin = self._origins.get(key)
        if origin is not None and origin.source == "--set":
            raise _forbidden(
                f"{key} cannot be changed: --set gives it, and wins over the file at the next start"
            )

    def _check_bound(self, key: str, config: BrokerConfig) -> None:
        section, item = known_settings()[key]
        if key in _REFUSES_IF_TRUE and getattr(getattr(config, section), item.attribute):
            raise _forbidden(
                f"{key}=true would refuse messages at once: set it in the file and restart"
            )
        lowest = min(self._disk_used() + 1, 100) if key in _DISK_RATIOS else item.live_min
        if not lowest:
            return
        old, new = (
            getattr(getattr(one, section), item.attribute) for one in (self._config, config)
        )
        if key in _ZERO_IS_NO_LIMIT:
            old, new = old or inf, new or inf
        if new < min(old, lowest):
            raise _forbidden(
                f"{key}={new} would delete or refuse messages at once: expected {lowest} or more "
                "while the broker runs; set a lower value in the file and restart"
            )

    async def change(self, wanted: Mapping[str, str], peer: str) -> None:
        """Write the wanted values to the file, then use them.

        ``peer`` is the address from which the change comes, for the log.

        Raises:
            RequestRefusedError: As ``check`` does, or because the file cannot be written.
        """
        config = self.check(wanted)
        if not wanted:
            return
        file = self._file.resolve()  # so that a symbolic link is not replaced
        try:
            await asyncio.to_thread(_rewrite, file, wanted, may_create=self._may_create)
        except OSError as error:
            raise RequestRefusedError(f"{file} cannot be written: {error}") from error
        for key, value in wanted.items():
            self._origins[key] = Origin(value, str(file))
            section, item = known_settings()[key]
            old = item.kind.show(getattr(getattr(self._config, section), item.attribute))
            logger.warning(
                "event=setting_changed key=%s old=%s new=%s peer=%s file=%s",
                key,
                old,
                value,
                peer,
                file,
            )
        self._config = config
        self.data_version = {
            "counter": self.data_version["counter"] + 1,
            "stateVersion": 0,
            "timestamp": self._now_ms(),
        }
        self._apply(config)


def _rewrite(file: Path, wanted: Mapping[str, str], *, may_create: bool) -> None:
    """Replace the lines of settings in a file durably; append the missing ones.

    Several brokers of one command have one file: they change it one after the other.
    """
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        _replace(file, wanted, may_create=may_create)
    finally:
        os.close(directory)


def _replace(file: Path, wanted: Mapping[str, str], *, may_create: bool) -> None:
    if may_create and not file.exists():
        content, mode = b"", disk.MODE
    else:
        content, mode = disk.read_bytes(file), file.stat().st_mode & 0o7777  # it may hold secrets
    lines = content.splitlines(keepends=True)
    left = {key.encode(): f"{key}={value}".encode() for key, value in wanted.items()}
    for number in reversed(range(len(lines))):  # of two lines of a key, the last counts
        key = key_of_line(lines[number])
        if key in left:
            ending = lines[number][len(lines[number].rstrip(b"\r\n")) :]
            lines[number] = left.pop(key) + ending
    if left and lines and not lines[-1].endswith((b"\n", b"\r")):
        lines[-1] += b"\n"
    lines += [line + b"\n" for line in left.values()]
    new = file.with_name(f"{file.name}.tmp")
    disk.write_file(new, b"".join(lines), sync=True, mode=mode)
    new.chmod(mode)  # despite the umask
    disk.replace(new, file)
    disk.sync_directory(file.parent)


def _forbidden(remark: str) -> RequestRefusedError:
    return RequestRefusedError(remark, ResponseCode.NO_PERMISSION)
