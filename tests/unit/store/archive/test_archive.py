"""The archive: what is uploaded and when, who may write it, and what is read from it."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from halfmq.store.archive.archive_reader import CACHE_BYTES_MAX
from halfmq.store.archive.objects import Objects
from halfmq.store.errors import ArchiveFailedError
from halfmq.store.files.worker import Round
from halfmq.store.format.record import Record, decode_records
from halfmq.store.message_store import GetStatus, MessageStore
from tests.support.archives import (
    BUCKET,
    S3_ENVIRONMENT,
    content_of_archive,
    files_below,
    s3_server,
)
from tests.support.stepped_worker import SteppedWorker
from tests.support.stores import Clock, crash, draft, everything, maintain, prepare, small_config

LOG_FILE = 16_384
QUEUE_FILE = 200  # bytes: ten entries
FILES = 5


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty archive."""
    if request.param == "file":
        return f"file://{tmp_path / 'archive'}"
    for name, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT", request.getfixturevalue("s3"))
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """Return the URL of an archive in a directory; the rules are those of any object store."""
    return f"file://{tmp_path / 'archive'}"


class Archived:
    """A store with an archive, whose threads run step by step."""

    def __init__(self, root: Path, url: str) -> None:
        self.root, self.url = root, url
        self.clock = Clock()
        self.open()

    def open(self) -> None:
        self.workers: dict[str, SteppedWorker] = {}

        def worker(name: str, work: Round, _pause: float) -> SteppedWorker:
            return self.workers.setdefault(name, SteppedWorker(work))

        config = small_config(self.root, consume_queue_file_size=QUEUE_FILE, archive_url=self.url)
        self.store = MessageStore(config, now_ms=self.clock, worker=worker)
        self.store.open()

    def reopen(self) -> None:
        self.store.close()
        self.open()

    def fill(self, files: int = FILES, topic: str = "%RETRY%a|b") -> None:
        """Append until the log has so many files."""
        number = 0
        while len(list((self.root / "commitlog").iterdir())) < files:
            properties = {"TAGS": "ab"[number % 2], "UNIQ_KEY": f"u{number}"}
            group = [
                draft(topic, number % 3, bytes(1000), properties=properties),
                draft("U", 0, f"{number}".encode()),
            ]
            self.store.append(group)
            self.clock.now += 1000
            number += 1
        self.flush()

    def flush(self) -> None:
        self.store.tick(1000)
        self.workers["store-flush"].step()
        maintain(self.store)

    def archive(self) -> str:
        """Run the archiver once; return why it failed, if it did."""
        assert self.store.archiver is not None
        self.workers["store-archive"].step()
        return self.store.archiver.failure

    def delete(self, end: int) -> None:
        """Delete what retention may delete below an offset."""
        self.store.deletion.delete_before(min(end, self.store.deletable_end))
        for _ in range(100):
            self.flush()
            self.workers["store-deletion"].step()

    def pulled(self, *, tag_codes: frozenset[int] | None = None) -> list[Record]:
        """Return all messages of all queues as consumers get them, in log order."""
        found: list[Record] = []
        for topic, queue_id in self.store.queues.names():
            offset = self.store.queues.first_offset(topic, queue_id)
            end = self.store.queues.bounds(topic, queue_id)[1]
            while offset < end:
                limits: dict[str, Any] = {
                    "max_count": 7,
                    "max_bytes": 100_000,
                    "tag_codes": tag_codes,
                }
                result = self.store.queues.get(topic, queue_id, offset, archived=True, **limits)
                read: Callable[..., bytes] = self.store.reader.read_cold
                if result.status is GetStatus.ARCHIVED:
                    assert self.store.archive is not None
                    result = self.store.archive.get(topic, queue_id, offset, end, **limits)
                    read = self.store.archive.read
                assert result.next_offset > offset, result
                found += decode_records(read(result.ranges))
                offset = result.next_offset
        return sorted(found, key=lambda record: record.physical_offset)


@pytest.fixture
def archived(tmp_path: Path, directory: str) -> Iterator[Archived]:
    one = Archived(tmp_path / "store", directory)
    one.fill()
    yield one
    one.store.close()


def expected_objects(root: Path, files: int) -> dict[str, bytes]:
    """Return the objects of so many log files, from a store that still has everything."""
    log = dict(sorted(files_below(root, "commitlog").items())[:files])
    queues = {
        name: content
        for name, content in files_below(root, "consumequeue").items()
        if 0 < int.from_bytes(content[-20:-12], "big") < files * LOG_FILE and any(content[-12:-8])
    }
    return {**log, **queues}


def test_full_files_are_uploaded_unchanged(tmp_path: Path, url: str) -> None:
    """Log files, the queue files that are full by then, and a digest of each; nothing else."""
    one = Archived(tmp_path / "store", url)
    one.fill()
    try:
        assert one.archive() == ""
        found = content_of_archive(url)
        expected = expected_objects(one.root, FILES - 1)

        assert len(expected) > 2 * FILES
        assert {name for name in found if not name.startswith(("digests/", "manifest/"))} == {
            *expected
        }
        assert {name: found[name] for name in expected} == expected
        for name in expected:
            local = one.root / "digests" / name
            assert not local.exists() or local.read_bytes() == found[f"digests/{name}"]
            assert f"digests/{name}" in found
    finally:
        one.store.close()


def test_messages_are_pulled_after_their_files_are_gone(tmp_path: Path, url: str) -> None:
    """Each message of each queue, all of them or by a tag, and after a restart."""
    one = Archived(tmp_path / "store", url)
    one.fill()
    try:
        tags = frozenset({ord("b")})
        before, tagged = everything(one.store), one.pulled(tag_codes=tags)
        one.archive()
        one.delete(1 << 60)

        assert one.store.min_offset == (FILES - 2) * LOG_FILE
        assert one.pulled() == before
        assert one.pulled(tag_codes=tags) == tagged
        one.reopen()
        assert one.archive() == ""
        assert one.pulled() == before
        one.fill(4, topic="later")
        assert one.archive() == ""
        one.delete(1 << 60)
        assert one.pulled()[: len(before)] == before
    finally:
        one.store.close()


def test_a_consumer_is_not_sent_past_messages_while_a_deletion_goes_on(archived: Archived) -> None:
    """The log begins later before the queues do; then entries lead to files that are gone."""
    archived.archive()
    before = everything(archived.store)
    archived.store.deletion.delete_before(archived.store.deletable_end)
    archived.flush()

    assert archived.store.min_offset > 0
    assert archived.store.queues.bounds("U", 0)[0] == 0
    assert archived.pulled() == before


def test_an_aged_store_is_archived_from_where_it_begins(tmp_path: Path, directory: str) -> None:
    """Queues begin where they began when the archive was switched on."""
    one = Archived(tmp_path / "store", "")
    one.fill()
    one.store.deletion.delete_before(2 * LOG_FILE)
    for _ in range(100):
        one.flush()
        one.workers["store-deletion"].step()
    before = everything(one.store)
    begins = {key: one.store.queues.bounds(*key)[0] for key in one.store.queues.names()}
    one.url = directory
    one.reopen()
    one.archive()
    one.delete(1 << 60)
    try:
        assert one.store.min_offset > 2 * LOG_FILE
        assert {key: one.store.queues.first_offset(*key) for key in begins} == begins
        assert one.pulled() == before
        first = one.store.queues.get("U", 0, 0, archived=True)
        assert (first.status, first.next_offset) == (GetStatus.OFFSET_TOO_SMALL, begins["U", 0])
    finally:
        one.store.close()


class _KilledError(BaseException):
    """The process ends here."""


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that ends the process before the step of an upload with a number."""
    left = -1

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                raise _KilledError
            return step(*arguments)

        return run

    monkeypatch.setattr(Objects, "create", counted(Objects.create))
    monkeypatch.setattr(Objects, "put", counted(Objects.put))

    def end_before(number: int) -> None:
        nonlocal left
        left = number

    return end_before


def test_an_upload_that_is_killed_at_any_step_is_done_again(
    tmp_path: Path, directory: str, steps: Callable[[int], None]
) -> None:
    """In the end the archive has the same objects, and nothing was deleted too early."""
    archive = Path(directory.removeprefix("file://"))
    one = Archived(tmp_path / "store", directory)
    one.fill(3)
    whole = crash(one.root, tmp_path / "killed")
    one.archive()
    expected = content_of_archive(directory)
    one.store.close()
    number = 0
    killed = True
    while killed:
        shutil.rmtree(archive)
        root = shutil.copytree(whole, tmp_path / f"store-{number}")
        again = Archived(root, directory)
        steps(number)
        try:
            again.archive()
            killed = False
        except _KilledError:
            log_files = len(list((archive / "commitlog").glob("*"))) if archive.exists() else 0
            assert again.store.deletable_end <= log_files * LOG_FILE
        again.reopen()
        steps(-1)
        assert again.archive() == ""
        assert content_of_archive(directory) == expected
        again.store.close()
        number += 1
    assert number > 10


def test_files_stay_while_the_archive_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so once, tries again, and then continues."""
    (tmp_path / "archive").touch()  # no directory
    one = Archived(tmp_path / "store", f"file://{tmp_path / 'archive'}/inside")
    one.fill()
    try:
        failure = one.archive()
        assert failure
        assert one.archive() == failure
        assert caplog.text.count("event=archive_failed") == 1
        assert one.store.deletable_end <= 0
        assert one.store.archiver is not None
        lag = (FILES - 1) * LOG_FILE
        assert one.store.archiver.metrics() == {"end_offset": 0, "lag_bytes": lag, "failing": 1}

        (tmp_path / "archive").unlink()
        assert one.archive() == ""
        assert one.store.archiver.metrics() == {"end_offset": lag, "lag_bytes": 0, "failing": 0}
    finally:
        one.store.close()


def test_messages_of_an_archive_that_cannot_be_read_are_not_taken_for_gone(
    archived: Archived,
) -> None:
    """Not at a start, when nobody knows what it has, nor later."""
    archived.archive()
    archived.delete(1 << 60)
    archive = Path(archived.url.removeprefix("file://"))
    away = archive.rename(archive.with_name("away"))
    archive.touch()
    archived.reopen()
    archived.archive()
    limits: dict[str, Any] = {"max_count": 1, "max_bytes": 1, "tag_codes": None}

    assert archived.store.queues.get("U", 0, 0, archived=True).status is GetStatus.ARCHIVED
    assert archived.store.archive is not None
    with pytest.raises(ArchiveFailedError):
        archived.store.archive.get("U", 0, 0, 1, **limits)
    archive.unlink()
    away.rename(archive)
    assert archived.archive() == ""
    assert archived.store.archive.get("U", 0, 0, 1, **limits).count == 1


def test_a_copy_with_another_log_cannot_write_the_archive(
    tmp_path: Path, directory: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the one that comes second, nor one that was stopped in the middle of an upload."""
    one = Archived(tmp_path / "store", directory)
    one.fill(3)
    one.archive()
    one.store.close()
    copy = Archived(shutil.copytree(one.root, tmp_path / "copy"), directory)
    one.open()
    one.fill(5)
    copy.fill(6, topic="other")
    assert copy.archive() == ""  # it is first
    content = content_of_archive(directory)

    assert "not of this log" in one.archive()
    assert "event=archive_refused" in caplog.text
    assert one.store.deletable_end <= 2 * LOG_FILE
    assert content_of_archive(directory) == content
    one.reopen()
    assert "not of this log" in one.archive()
    assert content_of_archive(directory) == content
    one.store.close()
    copy.store.close()


def test_a_store_with_the_same_log_continues_the_archive(archived: Archived) -> None:
    """As a slave's copy does when it is promoted: it has no digests."""
    archived.archive()
    archived.store.close()
    shutil.rmtree(archived.root / "digests")
    archived.open()

    assert archived.archive() == ""
    archived.fill(FILES + 2)
    assert archived.archive() == ""
    assert archived.store.deletable_end == FILES * LOG_FILE


@pytest.mark.parametrize("what", ["empty", "shorter"])
def test_an_archive_of_more_than_the_log_is_refused(
    archived: Archived, tmp_path: Path, what: str
) -> None:
    """Its messages would be mixed with others."""
    archived.archive()
    other = Archived(tmp_path / what, archived.url)
    if what == "shorter":
        other.fill(2)

    assert "not of this log" in other.archive()
    other.store.close()


def test_damage_is_found_on_the_way(archived: Archived) -> None:
    """A block that differs from its digest is neither uploaded nor given to a consumer."""
    path = archived.root / "commitlog" / f"{LOG_FILE:020d}"
    content = path.read_bytes()
    path.write_bytes(content[:5000] + b"?" + content[5001:])
    assert "differs from its digest" in archived.archive()
    assert archived.store.archiver is not None
    assert archived.store.archiver.end == LOG_FILE
    path.write_bytes(content)
    assert archived.archive() == ""

    archived.delete(1 << 60)
    stored = Path(archived.url.removeprefix("file://")) / "commitlog" / path.name
    stored.write_bytes(content[:5000] + b"?" + content[5001:])
    with pytest.raises(ArchiveFailedError, match="damaged"):
        archived.pulled()


def test_a_topic_that_was_deleted_and_created_again_gets_its_own_messages(
    archived: Archived,
) -> None:
    """Its files have the names of those of the former one, which the archive has."""
    archived.archive()
    archived.delete(1 << 60)
    archived.pulled()  # the cache has the entries of the former one
    done = archived.store.delete_topic("U")
    prepare(archived.store)
    done.result(60)
    archived.fill(FILES + 4)
    new = [one for one in everything(archived.store) if one.topic == "U"]
    archived.archive()
    archived.delete(1 << 60)

    assert archived.store.queues.bounds("U", 0)[0] > 0
    assert [one for one in archived.pulled() if one.topic == "U"] == new


def test_entries_that_a_rebuild_lost_are_not_skipped(archived: Archived) -> None:
    """A rebuild of the queues knows the local log only; a consumer gets an error."""
    archived.archive()
    archived.delete(1 << 60)
    before = everything(archived.store)
    archived.store.close()
    shutil.rmtree(archived.root / "consumequeue")
    (archived.root / "consumequeue.rebuild").touch()
    archived.open()
    archived.archive()
    key = next(key for key in archived.store.queues.names() if key[0] != "U")
    first = archived.store.queues.bounds(*key)[0]
    assert archived.store.archive is not None
    limits: dict[str, Any] = {"max_count": 1, "max_bytes": 1, "tag_codes": None}

    assert everything(archived.store) == before
    if first * 20 % QUEUE_FILE:
        with pytest.raises(ArchiveFailedError, match="reset the group"):
            archived.store.archive.get(*key, first - 1, first, **limits)
    assert archived.store.archive.get(*key, 0, first, **limits).count == 1


def test_the_cache_is_bounded(archived: Archived, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest chunk makes room; what is there is not fetched again."""
    archived.archive()
    archived.delete(1 << 60)
    for limit in (CACHE_BYTES_MAX, LOG_FILE):
        monkeypatch.setattr("halfmq.store.archive.archive_reader.CACHE_BYTES_MAX", limit)
        archived.reopen()
        archived.archive()
        archived.pulled()
        reader = archived.store.archive
        assert reader is not None
        fetched = reader.requests
        archived.pulled()

        assert (reader.requests == fetched) == (limit == CACHE_BYTES_MAX)
        assert 0 < reader.cached_bytes <= limit
