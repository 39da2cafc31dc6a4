"""The topic table: which topics exist, with how many queues and which permissions.

There are four sources of topics. Every broker has the built-in ones, and `topics.json` overrides
them. The first message to an unknown topic creates it, if the setting allows. The broker creates
the topics that it needs itself (retry topics, dead letters, parked transactions). A change is on
disk before its request is answered: if a crash lost a topic, consumers could not find its messages.

The messages of a deleted topic stay in the log. How far they reach is saved with the topics, so
that a start leaves them out of the queues (`store/queue/deleted_topics.py`).

Source: RocketMQ `TopicConfigManager`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from attrs import define

from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.registration_bodies import RegisteredTopic
from halfmq.store.files.json_table import EntryTexts
from halfmq.store.format.topics import (
    DEAD_LETTER_PREFIX,
    DEFAULT_TOPIC,
    RETRY_PREFIX,
    SYSTEM_PREFIX,
    SYSTEM_TOPICS,
    dead_letter_topic,
    is_broker_only,
    is_system_topic,
    retry_topic,
    validate_group,
    validate_topic,
)
from halfmq.store.queue.deleted_topics import DELETED_KEY, deleted_topics_of

from ..config import TopicDefaults
from ..errors import NotYetError, RequestRefusedError, UnfinishedError, invalid_parameter
from ..limits.kept import NEW_TOPIC_BYTES, RESERVE, TOPICS, Kept
from .awaited_save import AwaitedSave
from .table_file import (
    NAMES_LOGGED_MAX,
    CreatedNames,
    JsonObject,
    PeriodicSave,
    TableFile,
    as_object,
)
from .topic_config import (
    PERM_ALL,
    PERM_INHERIT,
    PERM_READ,
    PERM_WRITE,
    TopicConfig,
    built_in_topics,
    simple_topic,
)

logger = logging.getLogger(__name__)

QUEUES_MAX: Final = 1_024
"""Queues of one topic that a request may create; each costs a file when it is first used."""


@define(eq=False, repr=False, slots=False)
class TopicTable:
    """All topics by name, kept in `topics.json`."""

    _path: Path
    _identity: TopicDefaults
    _now_ms: Callable[[], int]
    _delay_levels: int = 18
    _topics_max: int = TOPICS.most
    # With it, a thread saves new topics while the requests that need them wait; otherwise the
    # save blocks.
    _saves_on_thread: bool = False
    # Retry topics and dead letters do not count if it knows their group.
    _is_group: Callable[[str], bool] = lambda _name: False

    def __attrs_post_init__(self) -> None:
        self._file = TableFile(
            self._path,
            self._now_ms,
            derived=[DELETED_KEY, CreatedNames.KEY],
            table_key="topicConfigTable",
        )
        self._own = (-1, 0)  # topics of groups, by the version at which they were counted
        self.unused = CreatedNames()
        self._auto_create = self._identity.auto_create
        self.default_queue_nums = self._identity.default_queue_nums
        """Most queues of a topic that is created automatically."""
        self._topics = built_in_topics(self._identity, self._delay_levels)
        self._built_in = frozenset(self._topics)
        self._deleted: dict[str, int] = {}  # see DELETED_KEY
        self._deleting: set[str] = set()  # no topic of that name may be created
        self._texts = EntryTexts(TopicConfig.to_json)
        self._saves = PeriodicSave(0, self._now_ms)  # whenever it is dirty
        self._version = 0
        self._created_hooks: list[Callable[[str], None]] = []
        # Topics that are not visible yet: to be saved, and being saved or just saved.
        self._new: dict[str, TopicConfig] = {}
        self._being_saved: dict[str, TopicConfig] = {}
        self._changing: dict[str, TopicConfig] = {}  # being saved by `change`
        self._awaited = (
            AwaitedSave(self._begin_save, self._end_save, self._publish_saved)
            if self._saves_on_thread
            else None
        )

    def configure(self, identity: TopicDefaults) -> None:
        """Set whether, and with how many queues, topics are created automatically."""
        self._auto_create = identity.auto_create
        self.default_queue_nums = identity.default_queue_nums
        if self._auto_create and DEFAULT_TOPIC not in self._topics:
            self._topics[DEFAULT_TOPIC] = simple_topic(
                DEFAULT_TOPIC, self.default_queue_nums, PERM_ALL
            )

    def on_created(self, hook: Callable[[str], None]) -> None:
        """Call `hook` with the name of each topic that is created, once it is in effect."""
        self._created_hooks.append(hook)

    def load(self) -> None:
        """Read the file; its entries override the built-in topics."""
        content = self._file.load()
        self.unused.load(content)
        self._deleted = deleted_topics_of(content)
        for name, entry in as_object(content.get("topicConfigTable")).items():
            if isinstance(entry, dict):
                self._topics[name] = TopicConfig.from_json(name, entry)
            else:
                logger.warning("event=topic_not_readable topic=%s entry=%r", name, entry)
                self._file.is_complete = False
        self._version = self._file.counter

    def complete(self, queues: Iterable[tuple[str, int]]) -> None:
        """Add missing topics and queues that have messages, if part of the file was lost.

        Permissions, and queues without messages, cannot be restored.
        """
        if self._file.is_complete:
            return
        counts: dict[str, int] = {}
        for topic, queue_id in queues:
            counts[topic] = max(counts.get(topic, 0), queue_id + 1)
        made = [
            self._completed(topic, count)
            for topic, count in sorted(counts.items())
            if validate_topic(topic) is None and not topic.startswith(SYSTEM_PREFIX)
        ]
        lost = [topic for topic in made if self._topics.get(topic.name) != topic]
        if not lost:
            return
        self._publish({topic.name: topic for topic in lost})
        self._file.next_version()
        self._saves.dirty = True
        names = [topic.name for topic in lost]
        logger.error("event=topics_rebuilt count=%d topics=%r", len(lost), names[:NAMES_LOGGED_MAX])

    def _completed(self, name: str, count: int) -> TopicConfig:
        """Return the topic with at least `count` queues."""
        known = self._topics.get(name)
        if known is None:
            of_group = name.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX))
            queues = count if of_group else max(count, self.default_queue_nums)
            return simple_topic(name, queues, PERM_READ | PERM_WRITE)
        return replace(
            known,
            read_queue_nums=max(known.read_queue_nums, count),
            write_queue_nums=max(known.write_queue_nums, count),
        )

    def settle_deleted(self, log_start: int, log_end: int) -> list[str]:
        """Forget deletions that the log has outlived; for a start. Return the deleted topics.

        Raises:
            OSError: The log has lost its end, and that cannot be saved.
        """
        before = self._deleted
        self._deleted = {name: min(end, log_end) for name, end in before.items() if end > log_start}
        if any(end < before[name] for name, end in self._deleted.items()):
            self.save()  # the next start must not leave out messages of a new topic of that name
        return [name for name in self._deleted if name not in self._topics]

    @property
    def is_created_automatically(self) -> bool:
        return self._auto_create

    def groups(self) -> list[str]:
        retry_topics = (name for name in self._topics if name.startswith(RETRY_PREFIX))
        return [name.removeprefix(RETRY_PREFIX) for name in retry_topics]

    def get(self, name: str) -> TopicConfig | None:
        return self._topics.get(name)

    def existing(self, name: str, remark: str = "topic[{}] not exist") -> TopicConfig:
        """Return the topic of this name.

        Raises:
            RequestRefusedError: There is none; ``remark`` says so with the name.
        """
        topic = self._topics.get(name)
        if topic is None:
            raise RequestRefusedError(remark.format(name), ResponseCode.TOPIC_NOT_EXIST)
        return topic

    def offered(self, name: str) -> TopicConfig | None:
        """Return the topic as clients see it; None for the template `TBW102` if it is not in use.

        The table may have the template although topics are no longer created automatically. A
        client that got it would send to a new topic and be refused.
        """
        if name == DEFAULT_TOPIC and not self._auto_create:
            return None
        return self._topics.get(name)

    def why_not_offered(self, name: str) -> str:
        """Return the reason why clients find no such topic, and how to create it."""
        reason = validate_topic(name)
        if reason is not None:
            return reason
        if name.startswith(RETRY_PREFIX):
            return "It does not exist; the first consumer of its group creates it."
        if name.startswith(DEAD_LETTER_PREFIX):
            return "It does not exist; the first dead letter of its group creates it."
        if self._auto_create:
            return "It does not exist; the first message that is sent to it creates it."
        return (
            "It does not exist, and autoCreateTopicEnable is false: create it with mqadmin "
            "updateTopic or Admin.create_topic."
        )

    def is_system(self, name: str) -> bool:
        """Return whether this is a system topic, which operators cannot change or delete.

        Source: `TopicValidator#isSystemTopic`, with what `TopicConfigManager#init` adds.
        """
        return name in self._built_in or is_system_topic(name)

    @property
    def system_names(self) -> list[str]:
        return sorted(self._built_in | SYSTEM_TOPICS)

    @property
    def data_version(self) -> dict[str, int]:
        """The version of the table as RocketMQ writes it."""
        return self._file.data_version

    def __contains__(self, name: str) -> bool:
        return name in self._topics

    def __iter__(self) -> Iterator[TopicConfig]:
        return iter(self._topics.values())

    def __len__(self) -> int:
        return len(self._topics)

    @property
    def version(self) -> int:
        """Number of changes so far; a copy with the same number is up to date."""
        return self._version

    def create_on_send(
        self, topic: str, default_topic: str, queue_nums: int, remote: str
    ) -> TopicConfig | None:
        """Return the topic of a message, created with the template `default_topic` if it is new.

        None if it does not exist and must not be created. `remote` is the producer, for the log.

        Raises:
            RequestRefusedError: The name is invalid or reserved, or the table is full or cannot
                be saved.
            NotYetError: It is new, and not in the file yet.
        """
        known = self._topics.get(topic)
        if known is not None:
            return known
        _check_name(topic)
        if topic.startswith(RETRY_PREFIX):
            if validate_group(topic.removeprefix(RETRY_PREFIX)) is not None:
                return None
            made = simple_topic(topic, 1, PERM_READ | PERM_WRITE)
        else:
            template = self.offered(default_topic)
            if template is None or not template.perm & PERM_INHERIT:
                return None
            queues = max(1, min(queue_nums, template.write_queue_nums, QUEUES_MAX))
            made = TopicConfig(
                name=topic,
                read_queue_nums=queues,
                write_queue_nums=queues,
                perm=template.perm & ~PERM_INHERIT,
                filter_type=template.filter_type,
            )
        if topic not in self._new and topic not in self._being_saved:
            self._check_room(made, reserve=self._topics_max // RESERVE)
        return self._requested(made, f"send from {remote}")

    def ensure(self, name: str, queues: int = 1, perm: int = PERM_READ | PERM_WRITE) -> TopicConfig:
        """Return the topic, created for the broker's own use if it is missing.

        Creation, which is rare, blocks on the disk. If the save fails, it is repeated later, so
        that no decision fails because of it.

        Raises:
            RequestRefusedError: The table is full.
        """
        known = self._topics.get(name)
        if known is not None:
            return known
        made = simple_topic(name, queues, perm)
        self._check_room(made)
        self._publish({name: made})
        self._file.next_version()
        try:
            self.save()
        except OSError as error:
            self._saves.dirty = True
            self._file.log_failure(error)
        _log_created(made, "broker")
        return made

    def adopt(self, name: str, entry: RegisteredTopic, broker: str) -> None:
        """Create a topic that another broker has created, unless it is the broker's own.

        If it cannot be created, the other broker alone has it.
        """
        if name in self._topics or self.is_system(name) or group_of(name) is not None:
            return
        made = TopicConfig(
            name=name,
            read_queue_nums=entry.read_queue_nums,
            write_queue_nums=entry.write_queue_nums,
            perm=entry.perm,
            sys_flag=entry.topic_sys_flag,
        )
        try:
            self._requested(made, f"broker {broker}")
        except NotYetError as error:
            error.wait(lambda _refusal: None, 0)
        except (RequestRefusedError, UnfinishedError) as error:
            logger.warning("event=topic_not_adopted topic=%s error=%r", name, str(error))

    def ensure_retry(self, group: str, queues: int = 1) -> TopicConfig:
        """Return the retry topic of a group, created if it is missing.

        Raises:
            RequestRefusedError: The table is full or cannot be saved.
            NotYetError: It is new, and not in the file yet.
        """
        return self._of_group(retry_topic(group), max(1, queues))

    def ensure_retries(self, queues: Mapping[str, int]) -> None:
        """Create the missing retry topics of these groups with so many queues; all in one save.

        Raises:
            RequestRefusedError: The table is full or cannot be saved.
            NotYetError: Some are new, and not in the file yet.
        """
        made = [
            simple_topic(retry_topic(group), max(1, count), PERM_READ | PERM_WRITE)
            for group, count in queues.items()
            if retry_topic(group) not in self._topics
        ]
        if made:
            self._request(made, "their groups")

    def ensure_dead_letter(self, group: str) -> TopicConfig:
        """Return the dead-letter topic of a group; otherwise the same as `ensure_retry`."""
        return self._of_group(dead_letter_topic(group), 1)

    def _of_group(self, name: str, queues: int) -> TopicConfig:
        known = self._topics.get(name)
        if known is not None:
            return known
        return self._requested(simple_topic(name, queues, PERM_READ | PERM_WRITE), "its group")

    async def change(self, made: TopicConfig) -> None:
        """Add or replace a topic; return when it is on disk and in effect.

        Changes of one topic must be made one after the other.

        Raises:
            RequestRefusedError: The table is full or cannot be saved.
        """
        name = made.name
        if name not in self._topics:
            self._check_room(made)
        self._changing[name] = made
        self._file.next_version()
        try:
            await self._save_on_thread()
        finally:
            del self._changing[name]
        # A message may have requested the same topic meanwhile; its request uses this one.
        self._new.pop(name, None)
        self._being_saved.pop(name, None)
        self.unused.used(name)
        self._publish({name: made})

    async def delete(self, name: str, end: int) -> None:
        """Remove a topic at once; return when that is on disk, with ``end`` of its records' part.

        ``end`` is the physical offset below which its records lie. No topic of that name can be
        created until ``end_deletion``.

        Raises:
            RequestRefusedError: It cannot be saved, and the topic still exists.
        """
        self._check_deletions(name)
        removed, before = self._topics.pop(name, None), self._deleted.get(name)
        # A message may have requested the same topic meanwhile; its request is refused.
        self._new.pop(name, None)
        self._being_saved.pop(name, None)
        self._deleting.add(name)
        self.unused.used(name)
        self._deleted[name] = end
        self._file.next_version()
        self._version += 1
        try:
            await self._save_on_thread()
        except RequestRefusedError:
            self._deleted.pop(name)
            self._deleted |= {} if before is None else {name: before}
            if removed is not None:
                self._topics.setdefault(name, removed)
            self._version += 1
            self.end_deletion(name)
            raise

    def expire(self, name: str) -> None:
        """Remove a topic that never had a message."""
        self.unused.used(name)
        self._topics.pop(name, None)
        self._file.next_version()
        self._version += 1
        self._saves.dirty = True
        logger.info("event=unused_topic_removed topic=%s", name)

    def is_deleting(self, name: str) -> bool:
        return name in self._deleting

    def end_deletion(self, name: str) -> None:
        """Let a topic of that name be created: nothing is left of the deleted one."""
        self._deleting.discard(name)

    def save(self) -> None:
        """Write the file; block on the disk.

        Raises:
            OSError: It could not be written; the old file is still there.
        """
        self._file.save(self._content())

    def persist_job(self) -> Callable[[], None] | None:
        """Return a function that repeats a failed save, for any thread; None if none is due."""
        if not self._saves.is_due():
            return None
        return self._saves.job(self._file.prepare(self._content(patient=True)), self._file)

    def _content(self, *, patient: bool = False) -> Callable[[], JsonObject]:
        topics = self._topics | self._being_saved | self._changing
        kept: dict[str, object] = {DELETED_KEY: dict(self._deleted)} if self._deleted else {}
        kept |= self.unused.content()
        return lambda: {"topicConfigTable": self._texts.encode(topics, patient=patient), **kept}

    async def _save_on_thread(self) -> None:
        try:
            await self._file.save_on_thread(self._content(patient=True))
        except RequestRefusedError:
            self._saves.dirty = True  # another save may have written the change that is undone here
            raise

    def _check_deletions(self, name: str) -> None:
        if len(self._deleted) >= self._topics_max and name not in self._deleted:
            raise RequestRefusedError(
                f"topic[{name}] cannot be deleted: the log still has messages of "
                f"{len(self._deleted)} deleted topics, the limit is {self._topics_max}",
                ResponseCode.NO_PERMISSION,
            )

    def _requested(self, made: TopicConfig, reason: str) -> TopicConfig:
        """Return a new topic that a request needs, once it is in the file."""
        self._request([made], reason)
        return self._topics[made.name]

    def _request(self, wanted: Sequence[TopicConfig], reason: str) -> None:
        """Return when new topics that a request needs are in the file."""
        if self._awaited is not None and self._awaited.is_full:
            raise UnfinishedError(self._awaited.when_room)
        new = [
            made
            for made in wanted
            if made.name not in self._new and made.name not in self._being_saved
        ]
        for made in new:
            self._check_room(made, len(new))
        for made in new:
            self._new[made.name] = made
            self.unused[made.name] = self._now_ms()
            _log_created(made, reason)
        if self._awaited is not None:
            raise NotYetError(partial(self._awaited.wait, [made.name for made in wanted]))
        error = None
        try:
            self._begin_save()()
        except OSError as failure:
            error = failure
        refusal = self._end_save(error)
        if refusal is not None:
            raise refusal from error
        for name in list(self._being_saved):
            self._publish_saved(name)

    def _check_room(self, made: TopicConfig, count: int = 1, *, reserve: int = 0) -> None:
        if made.name in self._deleting:
            raise RequestRefusedError(
                f"topic[{made.name}] is being deleted: try again; if this stays, delete it again",
                ResponseCode.SYSTEM_BUSY,
            )
        limit = self._topics_max - reserve
        total = len(self._topics) + len(self._new) + len(self._being_saved) + count
        if total > limit and not self._is_own(made.name) and total - self._own_count() > limit:
            rest = f" for topics that messages create, of {self._topics_max}" if reserve else ""
            raise RequestRefusedError(
                f"topic[{made.name}] cannot be created: the broker has {len(self._topics)} topics, "
                f"the limit is {limit}{rest}",
                ResponseCode.NO_PERMISSION,
            )

    def _is_own(self, name: str) -> bool:
        group = group_of(name)
        return group is not None and self._is_group(group)

    def _own_count(self) -> int:
        if self._own[0] != self._version:  # twenty thousand names take milliseconds
            self._own = self._version, sum(map(self._is_own, self._topics))
        return self._own[1]

    def _begin_save(self) -> Callable[[], None]:
        for _ in self._new:
            self._file.next_version()
        self._being_saved |= self._new
        self._new = {}
        return self._file.prepare(self._content(patient=self._awaited is not None))

    def _end_save(self, error: OSError | None) -> RequestRefusedError | None:
        if error is None:
            return None
        lost, self._being_saved = [*self._being_saved], {}
        logger.error(
            "event=table_not_saved table=%s lost=%r error=%r", self._file.name, lost, str(error)
        )
        return self._file.refusal(error)

    def _publish_saved(self, name: str) -> None:
        made = self._being_saved.pop(name, None)
        if made is not None:
            self._publish({name: made})

    def _publish(self, made: dict[str, TopicConfig]) -> None:
        new = made.keys() - self._topics.keys()
        self._topics |= made
        self._version += 1
        for hook in self._created_hooks:
            for name in new:
                hook(name)

    def kept(self) -> Kept:
        return {
            TOPICS: len(self._topics) - self._own_count(),
            NEW_TOPIC_BYTES: self._awaited.bytes if self._awaited else 0,
        }


def group_of(topic: str) -> str | None:
    """Return the group whose retry topic or dead letters a topic is; None for another topic."""
    for prefix in (RETRY_PREFIX, DEAD_LETTER_PREFIX):
        if topic.startswith(prefix):
            return topic.removeprefix(prefix)
    return None


def _log_created(made: TopicConfig, reason: str) -> None:
    logger.info(
        "event=topic_created topic=%s queues=%d perm=%d by=%r",
        made.name,
        made.write_queue_nums,
        made.perm,
        reason,
    )


def _check_name(topic: str) -> None:
    reason = validate_topic(topic)
    if reason is not None:
        raise invalid_parameter(reason)
    if is_broker_only(topic):
        raise RequestRefusedError(
            f"Sending message to topic[{topic}] is forbidden.", ResponseCode.NO_PERMISSION
        )
