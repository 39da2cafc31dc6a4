"""Plain ACL: accounts in ``plain_acl.yml``, as RocketMQ 4.4 to 5.2 read them.

The accounts are in that file and in every ``*.yml`` and ``*.yaml`` of the folder ``acl/`` beside
it. Each account becomes a principal with these rules:

* ``topicPerms`` and ``groupPerms`` name a topic or group; a permission not granted there is denied.
* ``defaultTopicPerm`` and ``defaultGroupPerm`` cover all others, and are DENY if absent.
* ``admin: true`` adds the right to change and read topics, groups and the broker; an admin without
  any ``topicPerms`` and ``groupPerms`` may do everything.

Accounts are changed in the files only. The files are read again when one of them has changed; if
they are invalid then, the accounts stay as they were and the log has the reason.
Source: RocketMQ 4.9.8 ``PlainPermissionManager``, ``Permission``.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn

import yaml

from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.signature import Signer

from .addresses import Address, AddressPattern, AddressPatternError, any_of, parse_address_pattern
from .rules import ALL_ACTIONS, Action, Dialect, Principal, ResourceKind, Rule, RuleSet

logger = logging.getLogger(__name__)

KEY_LENGTH_MIN: Final = 7
"""Characters of an access key and of a secret key. Source: ``AclConstants``, "longer than 6"."""

FILE_SIZE_MAX: Final = 4 << 20
"""Bytes of one file; ten thousand accounts have two million."""

FILES_MAX: Final = 1_000
"""Files of the folder ``acl/``, which is scanned every second."""

PERMISSIONS: Final[Mapping[str, frozenset[Action]]] = MappingProxyType(
    {
        "DENY": frozenset(),
        "PUB": frozenset({Action.PUB}),
        "SUB": frozenset({Action.SUB}),
        "PUB|SUB": frozenset({Action.PUB, Action.SUB}),
        "SUB|PUB": frozenset({Action.PUB, Action.SUB}),
    }
)

_MESSAGING: Final = frozenset({Action.PUB, Action.SUB})
_ADMINISTRATION: Final = ALL_ACTIONS - _MESSAGING
_ACCOUNT_KEYS: Final = frozenset(
    {
        "accessKey",
        "secretKey",
        "whiteRemoteAddress",
        "admin",
        "defaultTopicPerm",
        "defaultGroupPerm",
        "topicPerms",
        "groupPerms",
    }
)
_FILE_KEYS: Final = frozenset({"globalWhiteRemoteAddresses", "accounts", "dataVersion"})


class PlainAclError(Exception):
    """A file of a plain ACL is missing, unreadable or invalid."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(file, reason)
        self.file, self.reason = file, reason

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


class Accounts(NamedTuple):
    """The content of the files."""

    principals: Mapping[str, Principal]
    trusted: tuple[AddressPattern, ...]


class Stamp(NamedTuple):
    """Attributes of a file that differ after a change."""

    path: Path
    mtime_ns: int
    size: int
    inode: int


class PlainAcl:
    """The accounts of a file and its folder; a `Principals`."""

    dialect: Final = Dialect(
        subject_word="accessKey",
        refusal_code=ResponseCode.SYSTEM_ERROR,
        no_key_remark="No accessKey is configured",
        trace_is_free=True,
    )

    def __init__(
        self, file: Path, *, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    ) -> None:
        """Read the files.

        Raises:
            PlainAclError: One of them is missing, unreadable or invalid.
        """
        self._file = file
        self._now_ms = now_ms
        self._reloads = 0
        self._stamps = _stamps(file)
        self._use(read_accounts(file))

    @property
    def accounts(self) -> Accounts:
        return self._accounts

    @property
    def version(self) -> Mapping[str, int]:
        """RocketMQ's ``DataVersion`` of the accounts, which changes with each reload."""
        return {"counter": self._reloads, "stateVersion": 0, "timestamp": self._read_ms}

    @property
    def files(self) -> list[Path]:
        return [stamp.path for stamp in self._stamps or ()]

    def find(self, name: str) -> Principal | None:
        """Return the account with this access key."""
        return self._accounts.principals.get(name)

    def trusts(self, address: Address) -> bool:
        """Return whether an address is among the ``globalWhiteRemoteAddresses``."""
        return self._trusts(address)

    def _use(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._reloads += 1
        self._read_ms = self._now_ms()
        # Cached, because it is called for each request: testing a few patterns takes as long as the
        # rest of the check, and a look-up in the cache a microsecond.
        trusted = accounts.trusted
        self._trusts = lru_cache(maxsize=4096)(any_of(trusted)) if trusted else _none

    def reload(self) -> bool:
        """Read the files again if one has changed; return whether other accounts are in force.

        Reading blocks: call it on a thread.
        """
        try:
            stamps = _stamps(self._file)
            if stamps == self._stamps:
                return False
            accounts = read_accounts(self._file)
        except PlainAclError as error:
            stamps = _stamps_or_none(self._file)
            if stamps != self._stamps:
                logger.error(  # noqa: TRY400 -- the reason is enough
                    "event=plain_acl_not_reloaded error=%s accounts='as before'", error
                )
            self._stamps = stamps
            return False
        self._stamps = stamps
        self._use(accounts)
        logger.info("event=plain_acl_reloaded accounts=%d", len(accounts.principals))
        return True


def _none(_address: Address) -> bool:
    return False


def files_of(file: Path) -> list[Path]:
    """Return the file and those of the folder ``acl/`` beside it.

    Raises:
        PlainAclError: There is no such file, or there are too many beside it.
    """
    if not file.is_file():
        raise PlainAclError(file, "there is no such file")
    folder = file.parent / "acl"
    beside = sorted(
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.suffix in {".yml", ".yaml"} and path.is_file()
    )
    if len(beside) > FILES_MAX:
        raise PlainAclError(folder, f"more than {FILES_MAX} files")
    return [file, *beside]


def read_accounts(file: Path) -> Accounts:
    """Return the accounts of a file and of those in the folder ``acl/`` beside it.

    Raises:
        PlainAclError: One of them is missing, unreadable or invalid.
    """
    principals: dict[str, Principal] = {}
    trusted: list[AddressPattern] = []
    for path in files_of(file):
        try:
            content = _content(path)
            addresses = _list(content, "globalWhiteRemoteAddresses")
            trusted += [_pattern(text) for text in addresses if text not in (None, "")]
            for principal in _principals(content):
                if principal.name in principals:
                    _fail(f"accessKey {principal.name} is used twice")
                principals[principal.name] = principal
        except _InvalidError as error:
            raise PlainAclError(path, str(error)) from error
    return Accounts(MappingProxyType(principals), tuple(trusted))


def _principals(content: Mapping[str, Any]) -> Iterator[Principal]:
    for number, entry in enumerate(_list(content, "accounts"), 1):
        try:
            principal = _principal(entry)
        except _InvalidError as error:
            raise _InvalidError(f"account {number}: {error}") from error
        yield principal


def _fail(reason: str) -> NoReturn:
    raise _InvalidError(reason)


_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _InvalidError(Exception):
    """What is wrong with a file, as text that follows its name."""


def _content(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > FILE_SIZE_MAX:
            _fail(f"larger than {FILE_SIZE_MAX} bytes")
        content = yaml.load(path.read_bytes(), Loader=_LOADER)  # noqa: S506 -- a safe loader
    except OSError as error:
        raise _InvalidError(f"cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise _InvalidError(_not_yaml(error)) from None  # the error contains lines of the file
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise _InvalidError("expected the keys globalWhiteRemoteAddresses and accounts")
    _refuse_unknown(content, _FILE_KEYS)
    return content


def _not_yaml(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or type(error).__name__
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return f"not YAML: {where}{problem}"


def _list(content: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = content.get(key)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _InvalidError(f"{key}: expected a list")
    return value


def _refuse_unknown(content: Mapping[Any, Any], known: frozenset[str]) -> None:
    for key in content:
        if key not in known:
            raise _InvalidError(f"unknown key {key!r}; known are {', '.join(sorted(known))}")


def _pattern(text: object) -> AddressPattern:
    try:
        return parse_address_pattern(str(text))
    except AddressPatternError as error:
        raise _InvalidError(str(error)) from error


def _principal(entry: object) -> Principal:
    if not isinstance(entry, dict):
        raise _InvalidError("expected keys like accessKey and secretKey")
    _refuse_unknown(entry, _ACCOUNT_KEYS)
    name, secret = _key(entry, "accessKey"), _key(entry, "secretKey")
    admin = entry.get("admin", False)
    if not isinstance(admin, bool):
        raise _InvalidError("admin: expected true or false")
    address = entry.get("whiteRemoteAddress") or ""
    named = [
        *_named_rules(ResourceKind.TOPIC, _list(entry, "topicPerms"), "topicPerms"),
        *_named_rules(ResourceKind.GROUP, _list(entry, "groupPerms"), "groupPerms"),
    ]
    rules = [
        *named,
        Rule(ResourceKind.TOPIC, None, _default(entry, "defaultTopicPerm")),
        Rule(ResourceKind.GROUP, None, _default(entry, "defaultGroupPerm")),
    ]
    if admin:
        rules.append(Rule(None, None, _ADMINISTRATION))
    return Principal(
        name,
        Signer(secret),
        RuleSet(rules),
        is_super=admin and not named,
        trusted_from=(_pattern(address),) if str(address).strip() else (),
    )


def _key(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _InvalidError(f"{key} is missing")
    text = str(value)
    if len(text) < KEY_LENGTH_MIN:
        raise _InvalidError(f"{key} has fewer than {KEY_LENGTH_MIN} characters")
    return text


def _default(entry: Mapping[str, Any], key: str) -> frozenset[Action]:
    value = entry.get(key)
    return frozenset() if value is None else _permission(value, key)


def _named_rules(kind: ResourceKind, entries: Sequence[object], key: str) -> Iterator[Rule]:
    for entry in entries:
        name, equals, permission = str(entry).partition("=")
        if not equals or not name.strip():
            raise _InvalidError(f"{key}: {entry!r}: expected a name, = and a permission")
        granted = _permission(permission, key)
        if granted:
            yield Rule(kind, name.strip(), granted)
        if granted != _MESSAGING:
            yield Rule(kind, name.strip(), _MESSAGING - granted, allow=False)


def _permission(value: object, key: str) -> frozenset[Action]:
    granted = PERMISSIONS.get(str(value).strip())
    if granted is None:
        raise _InvalidError(f"{key}: {value!r}: expected one of {', '.join(PERMISSIONS)}")
    return granted


def _stamps(file: Path) -> tuple[Stamp, ...] | None:
    try:
        return tuple(
            Stamp(path, status.st_mtime_ns, status.st_size, status.st_ino)
            for path in files_of(file)
            for status in (path.stat(),)
        )
    except OSError as error:
        raise PlainAclError(file, f"cannot be read: {error.strerror}") from error


def _stamps_or_none(file: Path) -> tuple[Stamp, ...] | None:
    try:
        return _stamps(file)
    except PlainAclError:
        return None
