"""A store repairs flipped bits, and rebuilds queues and index that are damaged otherwise."""

import logging
from pathlib import Path

import pytest

from halfmq.store.files import disk
from halfmq.store.files.mapped_file_queue import MappedFileQueue
from halfmq.store.format.digest import BLOCK
from halfmq.store.integrity import scrub, verification
from halfmq.store.integrity.file_digest import Digest, digest_path, load_digest
from halfmq.store.integrity.scrub import compare, queue_targets
from halfmq.store.integrity.verification import Integrity
from halfmq.store.message_store import MessageStore
from halfmq.store.recovery import recovery
from halfmq.store.tools.dump import Dumped, dump
from halfmq.store.tools.verify import verify
from tests.support.damage import extend, fill, filled_store, flip, only
from tests.support.digests import differing, digest_of, store_digest, stored_digest
from tests.support.stores import (
    Clock,
    append_durably,
    crash,
    draft,
    everything,
    maintain,
    queue_files,
    small_config,
)

RECORDS = 120
FILE_SIZE = 4 * BLOCK


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a store that was filled and closed cleanly."""
    return filled_store(tmp_path / "store", RECORDS)


def reopened(root: Path) -> MessageStore:
    store = MessageStore(small_config(root), now_ms=Clock(1 << 41))
    store.open()
    return store


def ends_of_files(root: Path) -> dict[int, int]:
    """Return how many bytes of each log file are records."""
    ends: dict[int, int] = {}
    for one in dump(root):
        assert isinstance(one, Dumped)
        base = one.record.physical_offset // 16_384 * 16_384
        ends[base] = one.record.end - base
    return ends


def test_a_stopped_store_has_digests_of_all_its_files(root: Path) -> None:
    """Also after another run that appends to it."""
    for _ in range(2):
        report = verify(root)
        assert report.digested == sum(ends_of_files(root).values())
        for name in ("commitlog", "consumequeue", "index"):
            files = [path for path in (root / name).rglob("*") if path.is_file()]
            assert all(stored_digest(root, path) for path in files), name
        store = reopened(root)
        fill(store, 30)
        store.close()


@pytest.mark.parametrize("field", [40, 47, 55, 75, 76])
def test_a_changed_byte_that_no_other_checksum_covers_is_found(root: Path, field: int) -> None:
    """Born and store time, hosts, reconsume times and the link to a half message."""
    path = only(root / "commitlog", 1)
    flip(path, field, 4)
    found = {finding.kind: finding for finding in verify(root).findings.damage}

    assert found["bytes_changed"].position == field
    assert found["bytes_changed"].detail == "bit 4 of this byte is flipped"


def repaired_bits(caplog: pytest.LogCaptureFixture) -> int:
    return caplog.text.count("event=bit_turned_back")


def test_a_start_repairs_a_flipped_bit_of_a_queue_and_logs_it(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All entries are restored, and nothing is rebuilt."""
    paths = [only(root / "consumequeue" / "orders" / name) for name in "01"]
    before = [path.read_bytes() for path in paths]
    flip(paths[0], 3 * 20 + 7)
    flip(paths[1], 4 * 20 + 12, bit=7)
    store = reopened(root)
    found = everything(store)
    store.close()

    assert len(found) == RECORDS + 1
    assert [path.read_bytes() for path in paths] == before
    assert repaired_bits(caplog) == 2
    assert "queues_rebuilt" not in caplog.text


@pytest.mark.parametrize("at", [7, 8, 11], ids=["offset", "sign of the size", "size"])
def test_the_last_entry_of_a_queue_is_repaired_as_well(root: Path, at: int) -> None:
    """The flipped bit makes the queue look shorter."""
    path = only(root / "consumequeue" / "orders" / "1", -1)
    before = path.read_bytes()
    count = -(-len(before.rstrip(b"\0")) // 20)
    flip(path, (count - 1) * 20 + at, bit=7 if at == 8 else 0)
    store = reopened(root)

    assert len(everything(store)) == RECORDS + 1
    assert path.read_bytes() == before
    store.close()


@pytest.mark.parametrize("at", [22, 15, 30, 95], ids=["queue offset", "queue id", "offset", "body"])
@pytest.mark.parametrize("number", [0, 40, RECORDS])
def test_a_start_after_a_kill_repairs_a_flipped_bit_of_the_log(
    root: Path, at: int, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the scan, so that no message is lost or moved."""
    store = reopened(root)
    records = sorted(everything(store), key=lambda one: one.physical_offset)
    store.close()
    (root / "abort").touch()
    record = records[number]
    base = record.physical_offset // 16_384 * 16_384
    flip(root / "commitlog" / f"{base:020}", record.physical_offset - base + at)
    store = reopened(root)

    assert sorted(everything(store), key=lambda one: one.physical_offset) == records
    assert repaired_bits(caplog) == 1
    store.close()
    assert verify(root).sound


def test_digests_cover_what_was_on_disk_before_a_kill(tmp_path: Path) -> None:
    """The maintenance thread extends them once per second."""
    store = MessageStore(small_config(tmp_path / "store"), now_ms=Clock())
    store.open()
    fill(store, RECORDS)
    maintain(store)
    copy = crash(tmp_path / "store", tmp_path / "copy")
    store.close()

    assert verify(copy).digested == sum(ends_of_files(copy).values())


@pytest.mark.parametrize("killed", [False, True])
def test_a_queue_with_several_flipped_bits_is_logged_and_rebuilt(
    root: Path, *, killed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """From the log; its old digests are deleted."""
    path = only(root / "consumequeue" / "orders" / "1")
    before = path.read_bytes()
    if killed:
        (root / "abort").touch()
    flip(path, 3 * 20 + 7)
    flip(path, 4 * 20 + 11)
    store = reopened(root)
    found = everything(store)

    assert len(found) == RECORDS + 1
    assert path.read_bytes() == before
    assert f"event=block_damaged path={path} position=0" in caplog.text
    assert "event=queues_rebuilt" in caplog.text
    assert stored_digest(root, path) is None
    store.close()
    assert stored_digest(root, path)
    assert verify(root).sound


def test_queues_that_a_run_finds_damaged_are_rebuilt_by_the_next_start(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, even if that start compares nothing itself."""
    path = only(root / "consumequeue" / "orders" / "1")
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(scrub, "START_BYTES", 0)
        store = reopened(root)
        flip(path, 3 * 20 + 7)
        flip(path, 4 * 20 + 11)
        maintain(store)
        store.close()
        assert path.read_bytes() != before
        reopened(root).close()
        assert path.read_bytes() == before
    store = MessageStore(small_config(root), now_ms=Clock(1 << 41))

    assert not store.open().queues_rebuilt
    store.close()


def test_after_a_kill_entries_beyond_the_end_of_a_queue_are_not_compared(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A killed start may have cut queues whose digests are longer."""
    path, *later = sorted((root / "consumequeue" / "orders" / "1").iterdir())
    before = path.read_bytes()
    path.write_bytes(before[:200].ljust(len(before), b"\0"))
    for other in later:
        other.unlink()
    (root / "abort").touch()
    store = reopened(root)

    assert len(everything(store)) == RECORDS + 1
    assert "block_damaged" not in caplog.text
    store.close()
    assert path.read_bytes() == before


@pytest.mark.parametrize("kind", ["commitlog", "consumequeue/orders/1"])
def test_a_wrong_digest_changes_nothing(
    root: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It may look like one flipped bit, but flipping it would make a record invalid."""
    path = only(root / kind)
    before = path.read_bytes()
    damaged = path.with_name("damaged")
    damaged.write_bytes(before)
    flip(damaged, 103)
    store_digest(root, path, digest_of(damaged, 1000))
    damaged.unlink()
    (root / "abort").touch()
    store = reopened(root)

    assert len(everything(store)) == RECORDS + 1
    assert path.read_bytes() == before
    assert repaired_bits(caplog) == 0
    store.close()
    reopened(root).close()
    assert verify(root).sound == (kind != "commitlog"), "a wrong digest looks like damage"


def test_digests_are_ignored_after_another_broker_used_the_store(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """RocketMQ may have rewritten entries, such as those that refer to its extension."""
    path = only(root / "consumequeue" / "orders" / "1")
    extend(root, path, 3)
    extended = path.read_bytes()
    with (root / "checkpoint").open("r+b") as file:
        file.write(b"\0\1")
    store = reopened(root)

    assert path.read_bytes() == extended
    assert stored_digest(root, path) is None
    assert repaired_bits(caplog) == 0
    store.close()


def test_a_wrong_entry_does_not_hide_entries_before_it(root: Path) -> None:
    """A negative offset looks older than the log, as if the queue began after it."""
    flip(only(root / "consumequeue" / "orders" / "1"), 2 * 20, bit=7)
    store = reopened(root)

    assert store.queues.bounds("orders", 1)[0] == 0
    assert len(everything(store)) == RECORDS + 1
    store.close()


def test_a_run_that_compares_nothing_keeps_the_old_digests(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run still finds the change."""
    flip(only(root / "consumequeue" / "orders" / "1"), 67)
    with monkeypatch.context() as patch:
        patch.setattr(scrub, "START_BYTES", 0)
        patch.setattr(verification, "ROUND_BLOCKS", 0)
        store = reopened(root)
        append_durably(store, *(draft("orders", 1) for _ in range(9)))
        store.close()
    assert not verify(root).sound
    reopened(root).close()

    assert verify(root).sound


def test_a_start_rebuilds_a_damaged_index(root: Path) -> None:
    """All keys are indexed again from the log."""
    flip(only(root / "index"), 500)
    flip(only(root / "index"), 600)
    store = reopened(root)
    hits = store.index.query("orders", "order-4", 9, 0, 1 << 60)
    store.close()

    assert len(hits) == 1
    assert verify(root).sound


def test_after_a_kill_no_file_is_reported_as_changed(tmp_path: Path) -> None:
    """Files that were being written have no digest, or one of their unchanged part."""
    store = MessageStore(small_config(tmp_path / "store"), now_ms=Clock())
    store.open()
    fill(store, RECORDS)
    store.close()
    store = reopened(tmp_path / "store")
    fill(store, RECORDS)
    copy = crash(tmp_path / "store", tmp_path / "copy")
    store.close()
    store = reopened(copy)
    found = everything(store)
    store.close()

    assert len(found) == 2 * (RECORDS + 1)
    assert verify(copy).sound


@pytest.fixture
def index_files(tmp_path: Path) -> list[Path]:
    """Return three index files of four blocks, each with a digest."""
    paths = [tmp_path / "index" / f"2023111422300000{number}" for number in range(3)]
    paths[0].parent.mkdir()
    for path in paths:
        path.write_bytes(bytes(4 * BLOCK))
        digest_of(path, 4 * BLOCK).save(digest_path(tmp_path, path))
    return paths


def integrity_of(root: Path, *, clean: bool) -> Integrity:
    """Return the digests of a store with an empty log, before its index is opened."""
    config = small_config(root)
    log = MappedFileQueue(root / "commitlog", config.commit_log_file_size)
    queues = queue_files(MessageStore(config, now_ms=Clock()))
    made = Integrity(root, log, queues, config.max_hash_slots)
    made.before_index(0, (), clean=clean, queues_rebuilt=False)
    return made


def test_an_index_file_that_is_written_again_is_not_compared(
    tmp_path: Path, index_files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """It becomes the newest file because a newer one was uncertain and deleted."""
    older, written, deleted = index_files
    digests = integrity_of(tmp_path, clean=False)
    deleted.unlink()
    flip(written, 3 * BLOCK + 5)
    extents = [(path, 4 * BLOCK) for path in (older, written, tmp_path / "index" / "next")]
    digests.start(extents)
    assert not digest_path(tmp_path, written).exists()
    digests.work(0, extents)

    assert digest_path(tmp_path, older).exists()
    assert repaired_bits(caplog) == 0
    kept = load_digest(digest_path(tmp_path, written))
    assert kept is not None
    assert differing(kept, written) == []


def test_a_start_repairs_flipped_bits_of_all_index_files(
    tmp_path: Path, index_files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Before the index is opened; otherwise keys would be missing until the scrub."""
    for number, path in enumerate(index_files):
        flip(path, number * BLOCK + 5)
    integrity_of(tmp_path, clean=True)

    assert repaired_bits(caplog) == 3
    assert [path.read_bytes() for path in index_files] == [bytes(4 * BLOCK)] * 3


@pytest.mark.parametrize("number", [0, 2])
def test_an_index_in_which_a_run_finds_damage_is_deleted_by_the_next_start(
    tmp_path: Path,
    index_files: list[Path],
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With its digests, even if that start compares nothing itself."""
    monkeypatch.setattr(verification, "START_BYTES", BLOCK)
    monkeypatch.setattr(scrub, "START_BYTES", 0)
    extents = [(path, 4 * BLOCK) for path in index_files]
    digests = integrity_of(tmp_path, clean=True)
    digests.start(extents)
    for position in (5, 6):
        flip(index_files[number], 3 * BLOCK + position)
    digests.work(0, extents)
    assert f"event=block_damaged path={index_files[number]} position={3 * BLOCK}" in caplog.text
    digests.close(0, extents)
    integrity_of(tmp_path, clean=True)

    assert "event=index_deleted files=3" in caplog.text
    assert not any(path.exists() or digest_path(tmp_path, path).exists() for path in index_files)
    assert not [*tmp_path.glob("*.rebuild")]


def test_queues_that_a_start_finds_damaged_are_rebuilt_by_the_next_one_if_it_is_killed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if that start compares nothing itself."""
    path = only(root / "consumequeue" / "orders" / "1")
    before = path.read_bytes()
    flip(path, 3 * 20 + 7)
    flip(path, 4 * 20 + 11)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(recovery, "LogScan", killed)
        with pytest.raises(KeyboardInterrupt):
            reopened(root)
    monkeypatch.setattr(scrub, "START_BYTES", 0)
    store = reopened(root)

    assert path.read_bytes() == before
    assert len(everything(store)) == RECORDS + 1
    store.close()
    assert verify(root).sound


@pytest.mark.parametrize("number", [0, RECORDS])
def test_a_flipped_bit_of_the_log_is_repaired_while_the_broker_runs(
    root: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A start after a clean stop reads little of the log."""
    store = reopened(root)
    records = sorted(everything(store), key=lambda one: one.physical_offset)
    store.close()
    record = records[number]
    base = record.physical_offset // 16_384 * 16_384
    flip(root / "commitlog" / f"{base:020}", record.physical_offset - base + 95)
    store = reopened(root)

    maintain(store)

    assert sorted(everything(store), key=lambda one: one.physical_offset) == records
    assert caplog.text.count("event=bit_turned_back") == 1
    store.close()
    assert verify(root).sound


def test_a_log_that_was_cut_below_its_digest_is_not_reported_as_damaged(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The digest is cut with the log, before anything else is written there."""
    store = reopened(root)
    end = store.write_offset
    last = max(one.physical_offset for one in everything(store))
    store.close()
    (root / "abort").touch()
    base = last // 16_384 * 16_384
    with (root / "commitlog" / f"{base:020}").open("r+b") as file:
        file.seek(last - base)
        file.write(bytes(end - last))
    store = reopened(root)
    append_durably(store, draft("other"))
    caplog.clear()

    maintain(store)

    assert "event=block_damaged" not in caplog.text
    store.close()
    assert verify(root).sound


def test_files_are_compared_block_by_block(root: Path) -> None:
    """A start compares some blocks, and the rest is compared while the broker runs."""
    flip(only(root / "consumequeue" / "orders" / "1"), 67)
    config = small_config(root)
    store = MessageStore(config, now_ms=Clock(1 << 41))
    log = MappedFileQueue(root / "commitlog", config.commit_log_file_size)
    log.load()
    queue_files(store).load()
    compared = [*compare(queue_targets(root, queue_files(store), log))]

    assert len(compared) >= 3
    assert [block.is_sound for block, _ in compared].count(False) == 1
    assert all(sound for _, sound in compared)
    assert verify(root).sound


def test_an_error_of_digests_fails_nothing_else(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a full disk there are no digests, and the store is closed cleanly."""
    store = reopened(root)
    append_durably(store, draft())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Digest, "save", full)
    with caplog.at_level(logging.WARNING):
        store.close()

    assert caplog.text.count("event=digests_stopped") == 1
    assert not (root / "abort").exists()
    monkeypatch.undo()
    assert verify(root).sound


def test_an_index_is_not_damaged_because_its_old_digest_could_not_be_deleted(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the disk during a start leaves the digest, and then the index changes."""
    old = digest_path(root, only(root / "index", -1))

    def refuse(path: Path) -> None:
        if path == old:
            raise OSError(5, "Input/output error")
        path.unlink(missing_ok=True)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "remove", refuse)
        store = reopened(root)
    fill(store, 1)
    store.close()
    reopened(root).close()

    assert "event=digests_stopped" in caplog.text
    assert "event=block_damaged" not in caplog.text


def test_digests_of_deleted_files_are_deleted(root: Path) -> None:
    """Otherwise one would be left for each file deleted by age."""
    orphan = root / "digests" / "consumequeue" / "gone" / "0" / f"{0:020}"
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"x")
    config = small_config(root)
    store = MessageStore(config, now_ms=Clock())
    log = MappedFileQueue(root / "commitlog", config.commit_log_file_size)
    Integrity(root, log, queue_files(store), 100).start([])

    assert not orphan.exists()
