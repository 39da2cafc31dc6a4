"""Digests: what a file held when it was on disk, and what is done when it holds something else."""

import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest

from halfmq.store import integrity, scrub
from halfmq.store.digest import BLOCK, Digest, digest_path, find_flipped_bit, load_digest
from halfmq.store.digests import IndexDigests, LogDigests
from halfmq.store.format.queue_entry import PRE_BLANK, unpack_entry
from halfmq.store.integrity import Integrity
from halfmq.store.log_search import Damage
from halfmq.store.mapped_file_queue import MappedFileQueue
from halfmq.store.message_store import MessageStore
from halfmq.store.scrub import IndexScrub, QueueScrub
from halfmq.store.tools.dump import Dumped, dump
from halfmq.store.tools.verify import verify
from tests.support.damage import extend, fill, filled_store, flip, only
from tests.support.stores import Clock, append_durably, crash, draft, everything, small_config

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
    """At a bounded speed; at the end all of it, the last part of a block included."""
    digests = LogDigests(tmp_path, log)
    digests.start(0)
    digests.advance(FILE_SIZE + BLOCK + 9, BLOCK)
    assert ends(tmp_path, log) == [None, None, None]
    digests.advance(FILE_SIZE + BLOCK + 9, 9 * BLOCK)
    assert ends(tmp_path, log) == [FILE_SIZE, None, None]
    digests.advance(FILE_SIZE + BLOCK + 9, 9 * BLOCK, closing=True)
    assert ends(tmp_path, log) == [FILE_SIZE, BLOCK + 9, None]


def test_the_next_run_goes_on_where_the_last_one_ended(
    tmp_path: Path, log: MappedFileQueue
) -> None:
    """Also in a file that had become full before it was taken in."""
    digests = LogDigests(tmp_path, log)
    digests.start(0)
    digests.advance(2 * FILE_SIZE + 10, 2 * BLOCK, closing=True)
    assert ends(tmp_path, log) == [2 * BLOCK, None, None]

    digests = LogDigests(tmp_path, log)
    digests.start(2 * FILE_SIZE + 10)
    digests.advance(2 * FILE_SIZE + 10, 1 << 30, closing=True)
    assert ends(tmp_path, log) == [FILE_SIZE, FILE_SIZE, 10]


def test_a_log_without_digests_is_not_taken_in_from_its_beginning(
    tmp_path: Path, log: MappedFileQueue
) -> None:
    """It may be large, and who knows what happened to it."""
    digests = LogDigests(tmp_path, log)
    digests.start(2 * FILE_SIZE + 10)
    digests.advance(2 * FILE_SIZE + 10, 1 << 30, closing=True)

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
    digests.advance(FILE_SIZE + BLOCK + 1, 1 << 30, closing=True)

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


def test_a_start_mends_a_queue_and_says_so(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The entry is what it was, to the byte; nothing is rebuilt."""
    path = only(root / "consumequeue" / "orders" / "1")
    before = path.read_bytes()
    flip(path, 3 * 20 + 7)
    flip(path, 4 * 20 + 11)
    store = reopened(root)
    found = everything(store)
    store.close()

    assert len(found) == RECORDS + 1
    assert path.read_bytes() == before
    assert caplog.text.count("event=queue_entry_mended") == 2
    assert "queues_rebuilt" not in caplog.text


def test_a_start_mends_a_code_that_looks_like_an_address(root: Path) -> None:
    """RocketMQ has addresses of an extension in the place of tags codes; there is none here."""
    path = only(root / "consumequeue" / "orders" / "1")
    before = path.read_bytes()
    flip(path, 3 * 20 + 12, bit=7)
    reopened(root).close()

    assert path.read_bytes() == before


def test_a_start_leaves_an_address_that_leads_to_the_code(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The extension is RocketMQ's, which would miss what it wrote there."""
    path = only(root / "consumequeue" / "orders" / "1")
    extend(root, path, 3)
    extended = path.read_bytes()
    reopened(root).close()

    assert path.read_bytes() == extended
    assert "mended" not in caplog.text


def test_a_false_entry_hides_nothing_before_it(root: Path) -> None:
    """A negative offset looks older than the log, so that the queue seems to begin behind it."""
    flip(only(root / "consumequeue" / "orders" / "1"), 2 * 20, bit=7)
    store = reopened(root)

    assert store.queue_bounds("orders", 1)[0] == 0
    assert len(everything(store)) == RECORDS + 1
    store.close()


def test_a_place_without_a_record_becomes_a_blank(root: Path) -> None:
    """Consumers skip it, rather than to be given what is no message."""
    path = only(root / "consumequeue" / "orders" / "1")
    entry = unpack_entry(path.read_bytes(), 3 * 20)
    log_path = root / "commitlog" / f"{entry.physical_offset // 16_384 * 16_384:020}"
    flip(log_path, entry.physical_offset % 16_384 + 23)  # its queue offset
    flip(path, 3 * 20 + 7)
    store = reopened(root)

    assert unpack_entry(path.read_bytes(), 3 * 20) == PRE_BLANK
    assert len(everything(store)) == RECORDS
    store.close()


def test_what_is_true_stays_though_its_digest_does_not_fit(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log decides: a digest may be older than what another broker has written."""
    path = only(root / "consumequeue" / "orders" / "1")
    before = path.read_bytes()
    digest = digest_of(path, 1000)
    digest._crcs[0] ^= 1
    digest.save(digest_path(root, path))
    reopened(root).close()

    assert path.read_bytes() == before
    assert "mended" not in caplog.text


def test_a_digest_that_did_not_fit_is_made_good(root: Path) -> None:
    """Or each start would compare the same entries with the log again."""
    path = only(root / "consumequeue" / "orders" / "1")
    digest = digest_of(path, 1000)
    digest._crcs[0] ^= 1
    digest.save(digest_path(root, path))
    reopened(root).close()
    kept = load_digest(digest_path(root, path))

    assert kept is not None
    assert differing(kept, path) == []


def test_a_run_that_compares_nothing_does_not_bless_what_it_found(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the disk has changed is still found by the run after it."""
    flip(only(root / "consumequeue" / "orders" / "1"), 67)
    with monkeypatch.context() as patch:
        patch.setattr(integrity, "START_STEPS", 0)
        patch.setattr(integrity, "ROUND_STEPS", 0)
        store = reopened(root)
        append_durably(store, *(draft("orders", 1) for _ in range(9)))
        store.close()
    assert not verify(root).sound
    reopened(root).close()

    assert verify(root).sound


def test_of_an_index_file_only_what_may_change_is_taken_in_anew(path: Path) -> None:
    """Items are what they were put as; slots are what they are when the file is closed."""
    digests = IndexDigests(path.parent, slots_end=BLOCK)
    digests.start([(path, 2 * BLOCK + 9)], (path, digest_of(path, 2 * BLOCK + 9)))
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
    digests.start([(path, 0)], None)
    steps = 0
    while not digest_path(path.parent, path).exists():
        digests.advance([(path, 0), (newest, 0)], BLOCK)
        steps += 1

    assert steps == 4
    digests.advance([(path, 0), (newest, 0)], BLOCK)


def test_a_start_puts_the_keys_of_a_changed_index_again(root: Path) -> None:
    """The file is kept for whoever wants to know, as far as it is worth anything."""
    flip(only(root / "index"), 500)
    store = reopened(root)
    hits = store.query_index("orders", "order-4", 9, 0, 1 << 60)
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


def test_an_index_file_that_is_the_newest_again_is_not_compared_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is that of the full file; since a newer one was uncertain, it is written to."""
    names = [f"2023111422300000{number}" for number in range(3)]
    paths = [tmp_path / "index" / name for name in names]
    paths[0].parent.mkdir()
    for path in paths:
        path.write_bytes(bytes(4 * BLOCK))
        digest_of(path, 4 * BLOCK).save(digest_path(tmp_path, path))
    monkeypatch.setattr(scrub, "START_STEPS", 1)
    in_time = IndexScrub(tmp_path, slots_end=0)
    in_time.give_up_changed(clean=False)
    paths[2].unlink()
    flip(paths[1], 3 * BLOCK + 5)
    digests = IndexDigests(tmp_path, slots_end=0)
    files = [(path, 4 * BLOCK) for path in (*paths[:2], tmp_path / "index" / "next")]
    digests.start(files, None, in_time.opened(path for path, _ in files))
    while in_time.run(1):
        pass

    assert digest_path(tmp_path, paths[0]).exists()
    assert not digest_path(tmp_path, paths[1]).exists()
    assert not in_time._suspect(paths[1]).exists()
    digests.advance(files, 4 * BLOCK)
    kept = load_digest(digest_path(tmp_path, paths[1]))
    assert kept is not None
    assert differing(kept, paths[1]) == []


def test_a_pass_is_made_in_steps(root: Path) -> None:
    """A start waits a moment for it, and the rest is done while the broker works."""
    flip(only(root / "consumequeue" / "orders" / "1"), 67)
    config = small_config(root)
    store = MessageStore(config, now_ms=Clock(1 << 41))
    log = MappedFileQueue(root / "commitlog", config.commit_log_file_size)
    log.load()
    store._queues.load()
    found = QueueScrub(root, store._queues, log, config.delay_levels_ms)
    steps = 0
    while found.run(1):
        steps += 1

    assert steps >= 3
    assert found.mended == 1
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
    Integrity(root, log, store._queues, config.delay_levels_ms, 100).start([])

    assert not orphan.exists()
