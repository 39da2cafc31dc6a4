"""Digests of files: how they are extended, and what they cover."""

import random
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest

from halfmq.store.files.mapped_file_queue import MappedFileQueue
from halfmq.store.format.digest import BLOCK, find_flipped_bit
from halfmq.store.integrity.digests import IndexDigests, LogDigests
from halfmq.store.integrity.file_digest import digest_path, load_digest
from halfmq.store.integrity.scrub import repair_log
from halfmq.store.log.resync import Damage
from tests.support.damage import flip
from tests.support.digests import differing, digest_of

RECORDS = 120
FILE_SIZE = 4 * BLOCK


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file of three blocks and a part of a fourth."""
    made = tmp_path / "file"
    made.write_bytes(random.Random(1).randbytes(3 * BLOCK + 100))
    return made


# -- one digest ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [(3 * BLOCK + 100,), (1, 2, BLOCK, 3 * BLOCK + 100), (BLOCK + 7,)])
def test_a_digest_grows_in_any_steps(path: Path, ends: tuple[int, ...]) -> None:
    """The result of several steps is that of one."""
    digest = digest_of(path, *ends)
    digest.save(path.with_name("digest"))
    loaded = load_digest(path.with_name("digest"))

    assert loaded is not None
    assert loaded.end == ends[-1]
    assert differing(loaded, path) == []
    flip(path, ends[-1] - 1)
    assert differing(loaded, path) == [(ends[-1] - 1) // BLOCK * BLOCK]


def test_a_digest_ignores_bytes_after_its_end(path: Path) -> None:
    """The file is still being written."""
    digest = digest_of(path, BLOCK + 10)
    flip(path, BLOCK + 10)

    assert differing(digest, path) == []


def test_a_digest_is_cut_to_whole_blocks(path: Path) -> None:
    """The rest of the block in which a log was cut will be rewritten."""
    digest = digest_of(path, 3 * BLOCK + 100)
    digest.cut(2 * BLOCK + 5)

    assert digest.end == 2 * BLOCK
    flip(path, 2 * BLOCK)
    assert differing(digest, path) == []


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:5], lambda b: b"", bytes.upper])
def test_a_damaged_digest_counts_as_missing(path: Path, damage: Callable[[bytes], bytes]) -> None:
    """It is not flushed, so a power cut may leave anything."""
    kept = path.with_name("digest")
    digest_of(path, BLOCK).save(kept)
    kept.write_bytes(damage(kept.read_bytes()))

    assert load_digest(kept) is None
    assert load_digest(path.with_name("missing")) is None


def test_a_flipped_bit_is_located() -> None:
    """Each flipped bit of a block gives another CRC-32, as does most other damage."""
    chance = random.Random(7)
    content = chance.randbytes(5000)
    crc = crc32(content)
    for position, bit in [(0, 0), (4999, 7), (1234, 3)]:
        damaged = bytearray(content)
        damaged[position] ^= 1 << bit
        assert find_flipped_bit(bytes(damaged), crc) == (position, bit)

    two = bytearray(content)
    two[17] ^= 1
    two[4017] ^= 64
    assert find_flipped_bit(bytes(two), crc) is None


# -- the log -------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> MappedFileQueue:
    """Return a log of three files with four blocks each."""
    files = MappedFileQueue(tmp_path / "commitlog", FILE_SIZE)
    files.directory.mkdir()
    for number in range(3):
        files.create(number * FILE_SIZE)
        files.path(number * FILE_SIZE).write_bytes(random.Random(number).randbytes(FILE_SIZE))
    return files


def ends(root: Path, log: MappedFileQueue) -> list[int | None]:
    """Return how many bytes of each log file its digest covers."""
    found = [load_digest(digest_path(root, log.path(base))) for base in log.bases]
    return [None if one is None else one.end for one in found]


def test_log_digests_extend_to_the_durable_offset(tmp_path: Path, log: MappedFileQueue) -> None:
    """In limited steps, to the last byte, so that little has no digest after a kill."""
    digests = LogDigests(tmp_path, log)
    digests.start(0)
    digests.advance(FILE_SIZE + BLOCK + 9, BLOCK)
    assert ends(tmp_path, log) == [BLOCK, None, None]
    digests.advance(FILE_SIZE + BLOCK + 9, 9 * BLOCK)
    assert ends(tmp_path, log) == [FILE_SIZE, BLOCK + 9, None]
    digests.advance(FILE_SIZE + BLOCK + 200, 9 * BLOCK)
    assert ends(tmp_path, log) == [FILE_SIZE, BLOCK + 200, None]


def test_the_next_run_continues_the_digests(tmp_path: Path, log: MappedFileQueue) -> None:
    """Also that of a file that became full before its digest was complete."""
    digests = LogDigests(tmp_path, log)
    digests.start(0)
    digests.advance(2 * FILE_SIZE + 10, 2 * BLOCK)
    assert ends(tmp_path, log) == [2 * BLOCK, None, None]

    digests = LogDigests(tmp_path, log)
    digests.start(2 * FILE_SIZE + 10)
    digests.advance(2 * FILE_SIZE + 10, 1 << 30)
    assert ends(tmp_path, log) == [FILE_SIZE, FILE_SIZE, 10]


def test_old_log_files_without_digests_do_not_get_one(tmp_path: Path, log: MappedFileQueue) -> None:
    """They may have been damaged since they were written."""
    digests = LogDigests(tmp_path, log)
    digests.start(2 * FILE_SIZE + 10)
    digests.advance(2 * FILE_SIZE + 10, 1 << 30)

    assert ends(tmp_path, log) == [None, None, 10]


def test_a_cut_log_and_repaired_files_lose_their_digests(
    tmp_path: Path, log: MappedFileQueue
) -> None:
    """A start has changed their content."""
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


def test_a_file_deleted_by_age_is_skipped(tmp_path: Path, log: MappedFileQueue) -> None:
    """Retention does not wait for digests."""
    digests = LogDigests(tmp_path, log)
    digests.start(0)
    log.path(0).unlink()
    log.bases.pop(0)
    digests.advance(2 * FILE_SIZE, 1 << 30)

    assert ends(tmp_path, log) == [FILE_SIZE, None]


def test_digests_confirm_the_log_up_to_the_first_damage_or_gap(
    tmp_path: Path, log: MappedFileQueue
) -> None:
    """After a damaged block, or without digests, records are checked one by one."""
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


def test_only_the_slots_of_an_index_file_are_digested_again(path: Path) -> None:
    """Items do not change after they are added; slots change until the file is closed."""
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


def test_the_digest_of_a_full_index_file_is_computed_in_steps(path: Path) -> None:
    """The file has hundreds of megabytes, and the thread has other work."""
    newest = path.with_name("newest")
    digests = IndexDigests(path.parent, slots_end=0)
    digests.start([(path, 0)], [])
    steps = 0
    while not digest_path(path.parent, path).exists():
        digests.advance([(path, 0), (newest, 0)], BLOCK)
        steps += 1

    assert steps == 4
    digests.advance([(path, 0), (newest, 0)], BLOCK)
