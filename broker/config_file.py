"""Reading `broker.conf`: `key=value` lines → `BrokerConfig`.

Values come from four places, later ones win: the defaults in `config`, changes that a broker
without `--conf` has kept in its store, the file of `--conf`, and `--set KEY=VALUE`. A wrong value
stops the start and names file, line, key, value and what was expected; an unknown key is a warning
with the nearest known one. RocketMQ ignores both silently.
"""

import codecs
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from .access.config import TLS_PROPERTIES
from .config import SECTIONS, BrokerConfig
from .errors import BrokerConfigError
from .settings import HIDDEN, BadValueError, Setting, settings_of

_ROCKETMQ_ONLY: Final = frozenset(
    {
        "abortFile",
        "brokerIP2",
        "brokerRole",
        "destroyMapedFileIntervalForcibly",
        "diskSpaceCleanForciblyRatio",
        "maxTransferCountOnMessageInMemory",
        "pullMessageThreadPoolNums",
        "sendMessageThreadPoolNums",
        "serverWorkerThreads",
        "slaveReadEnable",
        "storeCheckpoint",
        "storePathConsumeQueue",
        "storePathIndex",
        "timerWheelEnable",
        "transientStorePoolEnable",
        "useReentrantLockWhenPutMessage",
        "waitTimeMillsInSendQueue",
        "warmMapedFileEnable",
    }
)
"""Keys of many RocketMQ configurations that have no effect here; a warning says so."""

_REPLACED: Final = {
    "diskReserveBytes": "diskSpaceWarningLevelRatio",
    "diskRefuseFreeBytes": "diskSpaceWarningLevelRatio",
    "diskSlowDownFreeBytes": "diskSpaceWarningLevelRatio",
    "diskSlowDownRatio": "diskSpaceWarningLevelRatio",
    "diskWarnFreeBytes": "diskMaxUsedSpaceRatio",
}
"""Keys of earlier versions → what to set instead."""


_OTHER_ENCODINGS: Final = {
    codecs.BOM_UTF32_LE: "UTF-32",  # begins with the mark of UTF-16
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Byte-order marks of encodings that editors write and that are not read."""


class Origin(NamedTuple):
    """Where a value came from: `--set` or `FILE:LINE`."""

    value: str
    source: str


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The configuration, the origin of each value, and warnings."""

    config: BrokerConfig
    origins: dict[str, Origin]
    warnings: list[str]
    file: Path | None = None
    """The file of `--conf`."""
    kept_file: Path | None = None
    """The file that keeps changes if there is none; None: that of the store."""

    @property
    def changes_file(self) -> Path:
        """The file that keeps changes of settings while the broker runs."""
        return self.file or self.kept_file or _kept_file(self.config.store.root)

    def lines(self) -> Iterator[str]:
        """Yield a line per setting with value, default and source, for `--print-config`."""
        for name, section in SECTIONS.items():
            values = getattr(self.config, name)
            for item in settings_of(section):
                origin = self.origins.get(item.key)
                shown = item.kind.show(getattr(values, item.attribute))
                source = origin.source if origin else "default"
                yield f"{item.key}={shown} default={item.kind.show(item.default)} source={source}"


def load_config(file: Path | None, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Return the defaults, changed by the store's kept settings, the file and the overrides.

    Raises:
        BrokerConfigError: The file cannot be read, a line is not `key=value`, or a value is wrong.
    """
    known = known_settings()
    own = [*(_read_file(file) if file else ()), *_read_overrides(overrides)]
    entries = [*_kept_settings(own), *_tls_properties(own), *own]
    warnings: list[str] = []
    origins: dict[str, Origin] = {}
    chosen: dict[str, dict[str, object]] = {name: {} for name in SECTIONS}
    for key, value, source in entries:
        if key not in known:
            warnings.append(f"{source}: {unknown_key(key, known)}; ignored")
            continue
        file_of_key = _file_of(origins[key].source) if key in origins else None
        if file_of_key is not None and file_of_key == _file_of(source):
            warnings.append(f"{source}: {key} is set twice; this one counts")
        section, item = known[key]
        chosen[section][item.attribute] = _parse(item, value, source)
        origins[key] = Origin(HIDDEN if item.kind.is_secret else value, source)
    parts = {name: SECTIONS[name](**values) for name, values in chosen.items()}
    config = BrokerConfig(**parts)
    contradiction = config.contradiction()
    if contradiction is not None:
        key, expected = contradiction
        _, item = known[key]
        value, source = origins.get(key) or Origin(item.kind.show(item.default), "default")
        raise BrokerConfigError(source, key, value, expected)
    if config.access.acl_enabled and config.access.plain_acl_file is None:
        folder = file.parent if file else config.store.root / "config"
        access = replace(config.access, plain_acl_file=folder / "plain_acl.yml")
        config = replace(config, access=access)
    return LoadedConfig(config, origins, warnings, file, _kept_file(config.store.root))


@cache
def known_settings() -> Mapping[str, tuple[str, Setting]]:
    """Return section and declaration of each setting by key."""
    return {item.key: (name, item) for name, part in SECTIONS.items() for item in settings_of(part)}


def with_value(config: BrokerConfig, key: str, value: str) -> BrokerConfig:
    """Return a configuration with another value of one setting.

    Raises:
        BrokerConfigError: The value is wrong.
    """
    section, item = known_settings()[key]
    parsed = _parse(item, value, "")
    changed = replace(getattr(config, section), **{item.attribute: parsed})
    return replace(config, **{section: changed})


def decode_settings(body: bytes) -> dict[str, str]:
    """Return the settings in a body of ``key=value`` lines, which tools of RocketMQ send.

    Raises:
        BrokerConfigError: A line has another form, or is not UTF-8.
    """
    return {key: value for key, value, _source in _parse_lines(body, "line")}


def key_of_line(line: bytes) -> bytes | None:
    """Return the key that a line of a file sets; None for a comment."""
    stripped = line.removeprefix(codecs.BOM_UTF8).strip()
    return None if stripped[:1] in (b"", b"#", b"!") else stripped.partition(b"=")[0].strip()


def _kept_file(root: Path) -> Path:
    return root / "config" / "halfmqSettings.conf"


def _kept_settings(entries: Iterable[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """Yield the changes that a broker without `--conf` has kept in the store of these entries."""
    known = known_settings()
    _, root = known["storePathRootDir"]
    roots = [_parse(root, value, source) for key, value, source in entries if key == root.key]
    file = _kept_file(Path(str(roots[-1] if roots else root.default)))
    for key, value, source in _read_file(file) if file.exists() else ():
        if key in known and not known[key][1].is_live:
            expected = "only settings that can be changed live; --conf and --set take this one"
            raise BrokerConfigError(source, key, value, expected)
        yield key, value, source


def _tls_properties(entries: Iterable[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """Yield the settings in the file that `tlsConfigFile` names, if one of these entries is it."""
    files = [value for key, value, _source in entries if key == "tlsConfigFile" and value]
    for key, value, source in _read_file(Path(files[-1]).expanduser()) if files else ():
        if key in TLS_PROPERTIES:
            yield TLS_PROPERTIES[key], value, source


def _file_of(source: str) -> str | None:
    """Return the file of a `FILE:LINE`; None for `--set`, which may set a key repeatedly."""
    return source.rpartition(":")[0] or None


def _parse(item: Setting, value: str, source: str) -> object:
    if not value and item.default is None:
        return None  # `storePathCommitLog=` in a file means: not set
    try:
        return item.kind.parse(value)
    except BadValueError as error:
        shown = HIDDEN if item.kind.is_secret else value
        cause = None if item.kind.is_secret else error
        raise BrokerConfigError(source, item.key, shown, item.kind.expected) from cause


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return a warning about a key that is no setting."""
    if key in _ROCKETMQ_ONLY:
        return f"{key} is a RocketMQ setting without effect here"
    if key in _REPLACED:
        return f"{key} is a setting of earlier versions; {_REPLACED[key]} alone counts"
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"unknown key {key}{hint}"


def _read_file(file: Path) -> Iterator[tuple[str, str, str]]:
    try:
        content = file.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise BrokerConfigError(
            str(file), "--conf", str(file), f"a readable file ({reason})"
        ) from error
    for mark, encoding in _OTHER_ENCODINGS.items():
        if content.startswith(mark):
            raise BrokerConfigError(f"{file}:1", "", "", f"text in UTF-8; the file is {encoding}")
    yield from _parse_lines(content, str(file))


def _parse_lines(content: bytes, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield key, value and place of each setting; comments may hold any bytes."""
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        if key_of_line(line) is None:
            continue
        source = f"{name}:{number}"
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            wrong = f"byte 0x{line[error.start]:02x} is not; ISO-8859-1 or Windows-1252?"
            raise BrokerConfigError(source, "", "", f"text in UTF-8; {wrong}") from error
        if "\0" in text:
            raise BrokerConfigError(source, "", "", "text in UTF-8; NUL bytes are not; UTF-16?")
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise BrokerConfigError(source, text, "", "a line of the form key=value")
        yield key.strip(), value.strip(), source


def _read_overrides(overrides: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or not key.strip():
            raise BrokerConfigError("--set", override, "", "KEY=VALUE")
        yield key.strip(), value.strip(), "--set"
