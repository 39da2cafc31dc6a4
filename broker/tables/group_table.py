"""The table of consumer groups and their permissions.

A group is created at its first use if the setting allows it, with RocketMQ's defaults.

Source: RocketMQ `SubscriptionGroupManager`, `SubscriptionGroupConfig`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from attrs import define

from halfmq.remoting.codes import ResponseCode
from halfmq.store.files.json_table import EntryTexts
from halfmq.store.format.topics import BUILT_IN_GROUPS, SYSTEM_GROUP_PREFIX, validate_group

from ..errors import RequestRefusedError
from ..limits.kept import GROUPS, RESERVE, Kept
from .table_file import (
    NAMES_LOGGED_MAX,
    CreatedNames,
    JsonFields,
    JsonObject,
    PeriodicSave,
    TableFile,
    as_integer,
    as_object,
)

logger = logging.getLogger(__name__)

_READ_FORBIDDEN: Final = 1 << 2  # RocketMQ keeps the bit at PermName.INDEX_PERM_READ


_UNINTERPRETED: Final = {"attributes": {}, "groupRetryPolicy": {"type": "CUSTOMIZED"}}
"""The fields of a new group in RocketMQ 5 that halfmq does not interpret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """One consumer group; `unknown` keeps the fields that are not interpreted."""

    name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_message_orderly: bool = False
    retry_queue_nums: int = 1
    retry_max_times: int = 16
    broker_id: int = 0
    which_broker_when_consume_slowly: int = 1
    notify_consumer_ids_changed_enable: bool = True
    group_sys_flag: int = 0
    consume_timeout_minute: int = 15
    unknown: Mapping[str, object] = field(default_factory=lambda: _UNINTERPRETED)

    def to_json(self) -> dict[str, object]:
        """Return the entry as `subscriptionGroup.json` holds it."""
        return _FIELDS.entry(self, self.unknown)

    @classmethod
    def from_json(cls, name: str, entry: JsonObject) -> GroupConfig:
        """Read an entry; a missing field has its default."""
        made = cls(name=name)
        found = _FIELDS.read(entry, made)
        if (unknown := {**made.unknown, **found["unknown"]}) == made.unknown:
            unknown = _UNINTERPRETED  # shared, as by new groups
        return replace(made, **{**found, "unknown": unknown})


_FIELDS: Final = JsonFields(GroupConfig, name="groupName")


@define(eq=False, repr=False, slots=False)
class GroupTable:
    """All consumer groups by name, kept in `subscriptionGroup.json`."""

    _path: Path
    auto_create: bool
    _now_ms: Callable[[], int]
    _groups_max: int = GROUPS.most

    def __attrs_post_init__(self) -> None:
        self._file = TableFile(
            self._path, self._now_ms, derived=[CreatedNames.KEY], table_key="subscriptionGroupTable"
        )
        self.unused = CreatedNames()
        """Whether a group is created at its first use."""
        self._groups = {name: GroupConfig(name=name) for name in BUILT_IN_GROUPS}
        self._forbidden: JsonObject = {}
        self._texts = EntryTexts(GroupConfig.to_json)
        self._saves = PeriodicSave(0, self._now_ms)  # at each save

    def load(self) -> None:
        """Read the file; its entries override the built-in groups."""
        content = self._file.load()
        self.unused.load(content)
        self._forbidden = as_object(content.get("forbiddenTable"))
        for name, entry in as_object(content.get("subscriptionGroupTable")).items():
            if isinstance(entry, dict):
                self._groups[name] = GroupConfig.from_json(name, entry)
            else:
                logger.warning("event=group_not_readable group=%s entry=%r", name, entry)
                self._file.is_complete = False

    def complete(self, names: Iterable[str], *, after_kill: bool) -> None:
        """Add groups by name that are missing from the file, if it may be incomplete.

        It may be incomplete if part of it was lost, or after a kill before a new group was written.
        The settings of these groups are lost; they get those of a new group.
        """
        if self._file.is_complete and not after_kill:
            return
        lost = sorted(
            name for name in names if name not in self._groups and validate_group(name) is None
        )
        if not lost:
            return
        self._groups |= {name: GroupConfig(name=name) for name in lost}
        self._file.next_version()
        self._saves.dirty = True
        level = logging.INFO if after_kill else logging.ERROR
        logger.log(
            level, "event=groups_rebuilt count=%d groups=%r", len(lost), lost[:NAMES_LOGGED_MAX]
        )

    def get(self, name: str) -> GroupConfig | None:
        return self._groups.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._groups

    def __iter__(self) -> Iterator[GroupConfig]:
        return iter(self._groups.values())

    def ensure(self, name: str) -> GroupConfig | None:
        """Return the group, created if it is new; None if it must not be created.

        Raises:
            RequestRefusedError: The table is full.
        """
        known = self._groups.get(name)
        if known is not None:
            return known
        if not (self.auto_create or name.startswith(SYSTEM_GROUP_PREFIX)):
            return None
        if validate_group(name) is not None:
            return None
        return self._add(GroupConfig(name=name))

    def admit(self, name: str) -> bool | None:
        """Return whether the group may consume; None if it cannot be created either."""
        group = self.ensure(name)
        return None if group is None else group.consume_enable

    def may_broadcast(self, group: str) -> bool:
        """Return whether every consumer of the group may get every message."""
        known = self._groups.get(group)
        return known is None or known.consume_broadcast_enable

    def may_read(self, group: str, topic: str) -> bool:
        """Return whether the group is allowed to consume the topic."""
        mask = as_integer(as_object(self._forbidden.get(group)).get(topic), 0)
        return not mask & _READ_FORBIDDEN

    @property
    def forbidden(self) -> JsonObject:
        """Forbidden actions by group and topic, as `subscriptionGroup.json` holds them."""
        return self._forbidden

    @property
    def data_version(self) -> dict[str, int]:
        """The version of the table as RocketMQ writes it."""
        return self._file.data_version

    async def change(self, made: GroupConfig) -> None:
        """Add or replace a group, at once; return when that is on disk.

        Raises:
            RequestRefusedError: The table is full, or cannot be saved and is as it was.
        """
        before = self._groups.get(made.name)
        if before is None:
            self._check_room(made)
        self._groups[made.name] = made
        self.unused.used(made.name)
        await self._save_on_thread(made.name, before)

    async def forbid_reading(self, group: str, topic: str, *, forbidden: bool) -> None:
        """Forbid or allow a group to consume a topic, at once; return when that is on disk.

        Raises:
            RequestRefusedError: It cannot be saved, and is as it was.
        """
        before = self._forbidden
        self.unused.used(group)
        topics = dict(as_object(before.get(group)))
        mask = as_integer(topics.get(topic), 0)
        topics[topic] = mask | _READ_FORBIDDEN if forbidden else mask & ~_READ_FORBIDDEN
        left = {name: mask for name, mask in topics.items() if mask}
        others = {name: entry for name, entry in before.items() if name != group}
        self._forbidden = {**others, group: left} if left else others
        try:
            await self._save_on_thread(group, self._groups.get(group))
        except RequestRefusedError:
            self._forbidden = before
            raise

    async def delete(self, name: str) -> None:
        """Remove a group, at once; return when that is on disk. An unknown one is no error.

        Raises:
            RequestRefusedError: It cannot be saved, and the group is back.
        """
        before = self._groups.pop(name, None)
        self.unused.used(name)
        forbidden = self._forbidden
        if before is None and name not in forbidden:
            return
        self._forbidden = {key: value for key, value in forbidden.items() if key != name}
        try:
            await self._save_on_thread(name, before)
        except RequestRefusedError:
            self._forbidden = forbidden
            raise

    def expire(self, name: str) -> None:
        """Remove a group that nobody has used."""
        self.unused.used(name)
        self._groups.pop(name, None)
        self._file.next_version()
        self._saves.dirty = True
        logger.info("event=unused_group_removed group=%s", name)

    async def _save_on_thread(self, name: str, before: GroupConfig | None) -> None:
        """Save on a thread; if that fails, put back what the group was before."""
        self._file.next_version()
        try:
            await self._file.save_on_thread(self._content(patient=True))
        except RequestRefusedError:
            self._saves.dirty = True  # another save may have written the change that is undone here
            if before is None:
                self._groups.pop(name, None)
            else:
                self._groups[name] = before
            raise

    def save(self) -> None:
        """Write the file now, for a stop; blocks on the disk.

        Raises:
            OSError: It could not be written; the old file is still there.
        """
        self._file.save(self._content())

    def persist_job(self) -> Callable[[], None] | None:
        """Return a function that writes new groups, on any thread; None if nothing is due.

        No consumer waits for that: if a crash loses a new group, the heartbeats of its consumers
        create it again.
        """
        if not self._saves.is_due():
            return None
        return self._saves.job(self._file.prepare(self._content(patient=True)), self._file)

    def _content(self, *, patient: bool = False) -> Callable[[], JsonObject]:
        groups, forbidden = dict(self._groups), self._forbidden
        unused = self.unused.content()
        return lambda: {
            "forbiddenTable": forbidden,
            "subscriptionGroupTable": self._texts.encode(groups, patient=patient),
            **unused,
        }

    def _add(self, made: GroupConfig) -> GroupConfig:
        self._check_room(made, reserve=self._groups_max // RESERVE)
        self._groups[made.name] = made
        self.unused[made.name] = self._now_ms()
        self._file.next_version()
        self._saves.dirty = True
        logger.info("event=group_created group=%s", made.name)
        return made

    def _check_room(self, made: GroupConfig, *, reserve: int = 0) -> None:
        limit = self._groups_max - reserve
        if len(self._groups) >= limit:
            rest = f" for groups that consumers create, of {self._groups_max}" if reserve else ""
            raise RequestRefusedError(
                f"group[{made.name}] cannot be created: the broker has {len(self._groups)} groups, "
                f"the limit is {limit}{rest}",
                ResponseCode.NO_PERMISSION,
            )

    def kept(self) -> Kept:
        return {GROUPS: len(self._groups)}
