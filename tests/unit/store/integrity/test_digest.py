"""Digests: what a file held when it was on disk, and what is done when it holds something else."""

import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest

from halfmq.store.files.mapped_file_queue import MappedFileQueue
from halfmq.store.format.digest import BLOCK, find_flipped_bit
from halfmq.store.integrity import scrub, verification
from halfmq.store.integrity.digests import IndexDigests, LogDigests
from halfmq.store.integrity.file_digest import Digest, digest_path, load_digest
from halfmq.store.integrity.scrub import compare, queue_targets, repair_log
from halfmq.store.integrity.verification import Integrity
from halfmq.store.log.resync import Damage
from halfmq.store.message_store import MessageStore
from halfmq.store.recovery.recovery import Recovery
from halfmq.store.tools.dump import Dumped, dump
from halfmq.store.tools.verify import verify
from tests.support.damage import extend, fill, filled_store, flip, only
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


def opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY)


def differing(digest: Digest, path: Path) -> list[int]:
    """Return the positions of the blocks that are not as they were."""
    fd = opened(path)
    try:
        return [at for at, content, crc in digest.blocks(fd) if crc32(content) != crc]
    finally:
        os.close(fd)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of three blocks and a bit."""
    made = tmp_path / "file"
    made.write_bytes(random.Random(1).randbytes(3 * BLOCK + 100))
    return made


def digest_of(path: Path, *ends: int) -> Digest:
    made = Digest()
    fd = opened(path)
    for end in ends:
        made.extend(fd, end)
    os.close(fd)
    return made


# -- one digest ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [(3 * BLOCK + 100,), (1, 2, BLOCK, 3 * BLOCK + 100), (BLOCK + 7,)])
def test_a_digest_grows_in_any_steps(path: Path, ends: tuple[int, ...]) -> None:
    """What was taken in piece by piece is what was taken in at once."""
    digest = digest_of(path, *ends)
    digest.save(path.with_name("digest"))
    loaded = load_digest(path.with_name("digest"))

    assert loaded is not None
    assert loaded.end == ends[-1]
    assert differing(loaded, path) == []
    flip(path, ends[-1] - 1)
    assert differing(loaded, path) == [(ends[-1] - 1) // BLOCK * BLOCK]


def test_what_stands_behind_its_end_is_none_of_a_digests_business(path: Path) -> None:
    """The file is written on."""
    digest = digest_of(path, BLOCK + 10)
    flip(path, BLOCK + 10)

    assert differing(digest, path) == []


def test_a_digest_is_cut_to_whole_blocks(path: Path) -> None:
    """Of the block in which a log was cut, the rest will be written anew."""
    digest = digest_of(path, 3 * BLOCK + 100)
    digest.cut(2 * BLOCK + 5)

    assert digest.end == 2 * BLOCK
    flip(path, 2 * BLOCK)
    assert differing(digest, path) == []


@pytest.mark.parametrize("spoil", [lambda b: b[:-1], lambda b: b[:5], lambda b: b"", bytes.upper])
def test_a_digest_that_did_not_arrive_is_none(path: Path, spoil: Callable[[bytes], bytes]) -> None:
    """It is not flushed, so a power cut may leave anything."""
    kept = path.with_name("digest")
    digest_of(path, BLOCK).save(kept)
    kept.write_bytes(spoil(kept.read_bytes()))

    assert load_digest(kept) is None
    assert load_digest(path.with_name("missing")) is None


def test_a_flipped_bit_is_located() -> None:
    """A CRC-32 is different for each bit that may flip in a block, and for most other damage."""
    chance = random.Random(7)
    content = chance.randbytes(5000)
    crc = crc32(content)
    for position, bit in [(0, 0), (4999, 7), (1234, 3)]:
        spoilt = bytearray(content)
        spoilt[position] ^= 1 << bit
        assert find_flipped_bit(bytes(spoilt), crc) == (position, bit)

    two = bytearray(content)
    two[17] ^= 1
    two[4017] ^= 64
    assert find_flipped_bit(bytes(two), crc) is None


# -- the log -------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> MappedFileQueue:
    """Three files of four blocks."""
    files = MappedFileQueue(tmp_path / "commitlog", FILE_SIZE)
    files.directory.mkdir()
    for number in range(3):
        files.create(number * FILE_SIZE)
        files.path(number * FILE_SIZE).write_bytes(random.Random(number).randbytes(FILE_SIZE))
    return files


def ends(root: Path, log: MappedFileQueue) -> list[int | None]:
    """Return up to where each file of the log has a digest."""
    found = [load_digest(digest_path(root, log.path(base))) for base in log.bases]
    return [None if one is None else one.end for one in found]


def test_the_log_is_taken_in_as_far_as_it_is_on_disk(tmp_path: Path, log: MappedFileQueue) -> None:
    """At a bounded speed; to the last byte, so that a kill leaves little without a digest."""
    digests = LogDigests(tmp_path, log)
    digests.start(0)
    digests.advance(FILE_SIZE + BLOCK + 9, BLOCK)
    assert ends(tmp_path, log) == [BLOCK, None, None]
    digests.advance(FILE_SIZE + BLOCK + 9, 9 * BLOCK)
    assert ends(tmp_path, log) == [FILE_SIZE, BLOCK + 9, None]
    digests.advance(FILE_SIZE + BLOCK + 200, 9 * BLOCK)
    assert ends(tmp_path, log) == [FILE_SIZE, BLOCK + 200, None]


def test_the_next_run_goes_on_where_the_last_one_ended(
    tmp_path: Path, log: MappedFileQueue
) -> None:
    """Also in a file that had become full before it was taken in."""
    digests = LogDigests(tmp_path, log)
    digests.start(0)
    digests.advance(2 * FILE_SIZE + 10, 2 * BLOCK)
    assert ends(tmp_path, log) == [2 * BLOCK, None, None]

    digests = LogDigests(tmp_path, log)
    digests.start(2 * FILE_SIZE + 10)
    digests.advance(2 * FILE_SIZE + 10, 1 << 30)
    assert ends(tmp_path, log) == [FILE_SIZE, FILE_SIZE, 10]


def test_a_log_without_digests_is_not_taken_in_from_its_beginning(
    tmp_path: Path, log: MappedFileQueue
) -> None:
    """It may be large, and who knows what happened to it."""
    digests = LogDigests(tmp_path, log)
    digests.start(2 * FILE_SIZE + 10)
    digests.advance(2 * FILE_SIZE + 10, 1 << 30)

    assert ends(tmp_path, log) == [None, None, 10]


def test_a_cut_log_and_repaired_files_lose_their_digests(
    tmp_path: Path, log: MappedFileQueue
) -> None:
    """What a start has written is not what was there."""
    digests = LogDigests(tmp_path, log)
    digests.start(0)
    digests.advance(3 * FILE_SIZE, 1 << 30)
    digests.start(FILE_SIZE + BLOCK + 1, [Damage(5, 5, "")])
    digests.advance(FILE_SIZE + BLOCK + 1, 0)
    log.path(2 * FILE_SIZE).unlink()
    log.bases.pop()
    digests.start(FILE_SIZE + BLOCK + 1)
    digests.advance(FILE_SIZE + BLOCK + 1, 1 << 30)

    assert ends(tmp_path, log) == [None, BLOCK + 1]
    assert len(list((tmp_path / "digests" / "commitlog").iterdir())) == 1


def test_a_file_deleted_by_age_is_passed_over(tmp_path: Path, log: MappedFileQueue) -> None:
    """Retention does not wait for digests."""
    digests = LogDigests(tmp_path, log)
    digests.start(0)
    log.path(0).unlink()
    log.bases.pop(0)
    digests.advance(2 * FILE_SIZE, 1 << 30)

    assert ends(tmp_path, log) == [FILE_SIZE, None]


def test_the_log_is_known_to_be_sound_up_to_the_first_gap(
    tmp_path: Path, log: MappedFileQueue
) -> None:
    """What lies behind a damaged block, or has no digest, is checked record by record."""
    digests = LogDigests(tmp_path, log)
    digests.start(0)
    digests.advance(2 * FILE_SIZE + BLOCK + 9, 1 << 30)
    assert repair_log(tmp_path, log, 10) == 2 * FILE_SIZE + BLOCK + 9
    assert repair_log(tmp_path, log, 2 * FILE_SIZE + BLOCK + 10) == 2 * FILE_SIZE + BLOCK + 10
    for position in (5, 6):
        flip(log.path(FILE_SIZE), 2 * BLOCK + position)
    assert repair_log(tmp_path, log, 10) == FILE_SIZE + 2 * BLOCK
    assert repair_log(tmp_path, log, FILE_SIZE + 3 * BLOCK) == 2 * FILE_SIZE + BLOCK + 9
    digest_path(tmp_path, log.path(0)).unlink()
    assert repair_log(tmp_path, log, 10) == 10


# -- a store -------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store that was filled and closed in order."""
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


def test_a_stopped_store_has_digests_of_all_it_holds(root: Path) -> None:
    """And a run that adds to it leaves it so."""
    for _ in range(2):
        report = verify(root)
        assert report.digested == sum(ends_of_files(root).values())
        for name in ("commitlog", "consumequeue", "index"):
            files = [path for path in (root / name).rglob("*") if path.is_file()]
            assert all(digest_path(root, path).exists() for path in files), name
        store = reopened(root)
        fill(store, 30)
        store.close()


@pytest.mark.parametrize("field", [40, 47, 55, 75, 76])
def test_a_change_that_no_other_checksum_covers_is_found(root: Path, field: int) -> None:
    """Born and store time, hosts, reconsume times, the link to a half: they stand there once."""
    path = only(root / "commitlog", 1)
    flip(path, field, 4)
    found = {finding.kind: finding for finding in verify(root).findings.damage}

    assert found["bytes_changed"].position == field
    assert found["bytes_changed"].detail == "bit 4 of this byte is flipped"


def turned_back(caplog: pytest.LogCaptureFixture) -> int:
    return caplog.text.count("event=bit_turned_back")


def test_a_start_turns_a_bit_of_a_queue_back_and_says_so(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The entries are what they were, to the byte; nothing is rebuilt."""
    paths = [only(root / "consumequeue" / "orders" / name) for name in "01"]
    before = [path.read_bytes() for path in paths]
    flip(paths[0], 3 * 20 + 7)
    flip(paths[1], 4 * 20 + 12, bit=7)
    store = reopened(root)
    found = everything(store)
    store.close()

    assert len(found) == RECORDS + 1
    assert [path.read_bytes() for path in paths] == before
    assert turned_back(caplog) == 2
    assert "queues_rebuilt" not in caplog.text


@pytest.mark.parametrize("at", [7, 8, 11], ids=["offset", "sign of the size", "size"])
def test_the_last_entry_of_a_queue_is_mended_as_well(root: Path, at: int) -> None:
    """Although the queue seems to be shorter."""
    path = only(root / "consumequeue" / "orders" / "1", -1)
    before = path.read_bytes()
    count = len(before.rstrip(b"\0")) // 20 + 1
    flip(path, (count - 1) * 20 + at, bit=7 if at == 8 else 0)
    store = reopened(root)

    assert len(everything(store)) == RECORDS + 1
    assert path.read_bytes() == before
    store.close()


@pytest.mark.parametrize("at", [22, 15, 30, 95], ids=["queue offset", "queue id", "place", "body"])
@pytest.mark.parametrize("number", [0, 40, RECORDS])
def test_a_start_after_a_kill_turns_a_bit_of_the_log_back(
    root: Path, at: int, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it scans, so that every message is where it was."""
    store = reopened(root)
    records = sorted(everything(store), key=lambda one: one.physical_offset)
    store.close()
    (root / "abort").touch()
    record = records[number]
    base = record.physical_offset // 16_384 * 16_384
    flip(root / "commitlog" / f"{base:020}", record.physical_offset - base + at)
    store = reopened(root)

    assert sorted(everything(store), key=lambda one: one.physical_offset) == records
    assert turned_back(caplog) == 1
    store.close()
    assert verify(root).sound


def test_what_was_on_disk_before_a_kill_has_a_digest(tmp_path: Path) -> None:
    """A helper takes it in once per second."""
    store = MessageStore(small_config(tmp_path / "store"), now_ms=Clock())
    store.open()
    fill(store, RECORDS)
    maintain(store)
    copy = crash(tmp_path / "store", tmp_path / "copy")
    store.close()

    assert verify(copy).digested == sum(ends_of_files(copy).values())


@pytest.mark.parametrize("killed", [False, True])
def test_a_queue_with_more_than_a_flipped_bit_is_told_and_made_anew(
    root: Path, *, killed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """From the log; what its digests said counts no more."""
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
    assert not digest_path(root, path).exists()
    store.close()
    assert digest_path(root, path).exists()
    assert verify(root).sound


def test_what_a_run_finds_damaged_the_next_start_makes_anew(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, even if that one has no time to look."""
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


def test_after_a_kill_only_what_a_start_relies_on_is_made_anew(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A start that was killed has cut queues, and their digests tell of more."""
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
def test_a_digest_that_is_wrong_changes_nothing(
    root: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It may seem that one bit was flipped, but with that nothing would be whole."""
    path = only(root / kind)
    before = path.read_bytes()
    spoilt = path.with_name("spoilt")
    spoilt.write_bytes(before)
    flip(spoilt, 103)
    digest_of(spoilt, 1000).save(digest_path(root, path))
    spoilt.unlink()
    (root / "abort").touch()
    store = reopened(root)

    assert len(everything(store)) == RECORDS + 1
    assert path.read_bytes() == before
    assert turned_back(caplog) == 0
    store.close()
    reopened(root).close()
    assert verify(root).sound == (kind != "commitlog"), "nobody knows what the log should be"


def test_where_rocketmq_was_at_work_digests_say_nothing(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have rewritten entries, as those that lead to its extension."""
    path = only(root / "consumequeue" / "orders" / "1")
    extend(root, path, 3)
    extended = path.read_bytes()
    with (root / "checkpoint").open("r+b") as file:
        file.write(b"\0\1")
    store = reopened(root)

    assert path.read_bytes() == extended
    assert not digest_path(root, path).exists()
    assert turned_back(caplog) == 0
    store.close()


def test_a_false_entry_hides_nothing_before_it(root: Path) -> None:
    """A negative offset looks older than the log, so that the queue seems to begin behind it."""
    flip(only(root / "consumequeue" / "orders" / "1"), 2 * 20, bit=7)
    store = reopened(root)

    assert store.queues.bounds("orders", 1)[0] == 0
    assert len(everything(store)) == RECORDS + 1
    store.close()


def test_a_run_that_compares_nothing_does_not_bless_what_it_found(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the disk has changed is still found by the run after it."""
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


def test_of_an_index_file_only_what_may_change_is_taken_in_anew(path: Path) -> None:
    """Items are what they were put as; slots are what they are when the file is closed."""
    digests = IndexDigests(path.parent, slots_end=BLOCK)
    digest_of(path, 2 * BLOCK + 9).save(digest_path(path.parent, path))
    digests.write_to(path, keep=True)
    assert not digest_path(path.parent, path).exists()
    digests.start([(path, 2 * BLOCK + 9)], [path])
    flip(path, 10)
    flip(path, BLOCK + 10)
    digests.close([(path, 3 * BLOCK + 9)])
    kept = load_digest(digest_path(path.parent, path))

    assert kept is not None
    assert kept.end == 3 * BLOCK + 9
    assert differing(kept, path) == [BLOCK]


def test_a_full_index_file_is_taken_in_step_by_step(path: Path) -> None:
    """It has hundreds of megabytes, and the helper thread has other work."""
    newest = path.with_name("newest")
    digests = IndexDigests(path.parent, slots_end=0)
    digests.start([(path, 0)], [])
    steps = 0
    while not digest_path(path.parent, path).exists():
        digests.advance([(path, 0), (newest, 0)], BLOCK)
        steps += 1

    assert steps == 4
    digests.advance([(path, 0), (newest, 0)], BLOCK)


def test_a_start_turns_a_bit_of_the_index_back(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And puts no key again."""
    flip(only(root / "index"), 500)
    store = reopened(root)
    hits = store.index.query("orders", "order-4", 9, 0, 1 << 60)
    store.close()

    assert len(hits) == 1
    assert turned_back(caplog) == 1
    assert "index_recovered" not in caplog.text
    assert verify(root).sound


def test_a_start_puts_the_keys_of_a_damaged_index_again(root: Path) -> None:
    """The file is kept for whoever wants to know, as far as it is worth anything."""
    flip(only(root / "index"), 500)
    flip(only(root / "index"), 600)
    store = reopened(root)
    hits = store.index.query("orders", "order-4", 9, 0, 1 << 60)
    store.close()

    assert len(hits) == 1
    assert verify(root).sound


def test_after_a_kill_nothing_counts_as_changed(tmp_path: Path) -> None:
    """Files that were written to have no digest, or one of what they began with."""
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
    """Three index files of four blocks, each with a digest."""
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


def test_an_index_file_that_is_the_newest_again_is_not_compared_any_more(
    tmp_path: Path, index_files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Its digest is that of the full file; since a newer one was uncertain, it is written to."""
    older, written, gone = index_files
    digests = integrity_of(tmp_path, clean=False)
    gone.unlink()
    flip(written, 3 * BLOCK + 5)
    extents = [(path, 4 * BLOCK) for path in (older, written, tmp_path / "index" / "next")]
    digests.start(extents)
    assert not digest_path(tmp_path, written).exists()
    digests.work(0, extents)

    assert digest_path(tmp_path, older).exists()
    assert turned_back(caplog) == 0
    kept = load_digest(digest_path(tmp_path, written))
    assert kept is not None
    assert differing(kept, written) == []


def test_a_start_turns_bits_of_older_index_files_back(
    tmp_path: Path, index_files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Before the index is opened, or a key would not be found until the pass has come by."""
    for number, path in enumerate(index_files):
        flip(path, number * BLOCK + 5)
    integrity_of(tmp_path, clean=True)

    assert turned_back(caplog) == 3
    assert [path.read_bytes() for path in index_files] == [bytes(4 * BLOCK)] * 3


@pytest.mark.parametrize("number", [0, 2])
def test_an_index_in_which_a_run_finds_damage_is_deleted_by_the_next_start(
    tmp_path: Path,
    index_files: list[Path],
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With its digests, also where that start does not look; and the one after it goes on."""
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


@pytest.mark.parametrize("name", ["consumequeue.doubtful", "digests/consumequeue.suspect"])
def test_what_an_earlier_version_left_to_be_rebuilt_is_rebuilt(root: Path, name: str) -> None:
    """Its marker has another name, or another place."""
    (root / name).touch()
    store = MessageStore(small_config(root), now_ms=Clock(1 << 41))

    assert store.open().queues_rebuilt
    store.close()
    assert not (root / name).exists()
    store = MessageStore(small_config(root), now_ms=Clock(1 << 41))
    assert not store.open().queues_rebuilt
    store.close()


def test_queues_that_a_start_finds_damaged_are_rebuilt_by_the_next_one_if_it_is_killed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that one has no time to look."""
    path = only(root / "consumequeue" / "orders" / "1")
    before = path.read_bytes()
    flip(path, 3 * 20 + 7)
    flip(path, 4 * 20 + 11)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # A start is killed between these two steps.
        patch.setattr(Recovery, "_scan_from", killed)
        with pytest.raises(KeyboardInterrupt):
            reopened(root)
    monkeypatch.setattr(scrub, "START_BYTES", 0)
    store = reopened(root)

    assert path.read_bytes() == before
    assert len(everything(store)) == RECORDS + 1
    store.close()
    assert verify(root).sound


@pytest.mark.parametrize("number", [0, RECORDS])
def test_a_bit_of_the_log_that_flipped_after_an_ordered_stop_is_turned_back(
    root: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """While the broker works, since a start after an ordered stop reads little of the log."""
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


def test_a_log_that_was_cut_below_its_digest_is_not_called_damaged(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The digest then ends where the log does, before anything else is written there."""
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


def test_a_pass_is_made_in_steps(root: Path) -> None:
    """A start waits a moment for it, and the rest is done while the broker works."""
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


def test_digests_are_never_worth_a_failure(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that has no room for them gets none, and the store is closed in order."""
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


def test_digests_of_files_that_are_gone_go_too(root: Path) -> None:
    """They would pile up, one for each file that age has deleted."""
    orphan = root / "digests" / "consumequeue" / "gone" / "0" / f"{0:020}"
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"x")
    config = small_config(root)
    store = MessageStore(config, now_ms=Clock())
    log = MappedFileQueue(root / "commitlog", config.commit_log_file_size)
    Integrity(root, log, queue_files(store), 100).start([])

    assert not orphan.exists()
