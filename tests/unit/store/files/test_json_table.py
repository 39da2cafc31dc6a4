"""The tables in config/*.json: RocketMQ's are read, and no crash loses one."""

import errno
import gc
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from halfmq.store.errors import DamagedTableError, UnusableFileError
from halfmq.store.files import disk, json_table
from halfmq.store.files.json_table import (
    EntryTexts,
    TableOrigin,
    decode_table,
    encode_table,
    read_table,
    save_table,
    set_aside,
)
from tests.support.golden_store import NAMES, unpack
from tests.support.tables import load_table

OLD = {"offsetTable": {"T@g1": {"0": 1}}}
TABLES = (
    ("topics.json", "topicConfigTable", "topicConfig"),
    ("subscriptionGroup.json", "subscriptionGroupTable", "subscriptionGroups"),
    ("consumerOffset.json", "offsetTable", "consumerOffsets"),
    ("delayOffset.json", "offsetTable", "delayOffsets"),
)
STOPPED = (
    "batchcq",
    "delay-retry-dlq",
    "ipv6",
    "plain-clean",
    "pop-clean",
    "timer",
    "tx-midway-clean",
)
KILLED = ("plain-killed", "pop-killed", "propcrc", "tx-midway-killed", "v4-tx")
NEW = {"offsetTable": {"T@g1": {"0": 2}, "größe": {}}}


class Killed(BaseException):
    """Simulates SIGKILL: no handler of the code under test may catch it."""


class SystemCalls:
    """Records the calls that change the disk, and raises before or after the chosen one."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        die_at: int,
        before: bool,
        error: BaseException | type[BaseException] = Killed,
    ) -> None:
        self.log: list[str] = []
        self._error = error
        self._die_at = die_at
        self._before = before
        for name in ("fsync", "link", "replace", "unlink"):
            monkeypatch.setattr(disk, name, self._counted(name, getattr(disk, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.log.append(name)
            dies = len(self.log) == self._die_at
            if dies and self._before:
                raise self._error
            try:
                return call(*args, **kwargs)
            finally:
                if dies:
                    raise self._error

        return run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "consumerOffset.json"


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def test_a_saved_table_is_read_back(path: Path) -> None:
    """The content is equal, and the directory holds no other file."""
    save_table(path, NEW)

    assert load_table(path) == NEW
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_integer_keys_come_back_as_text(path: Path) -> None:
    """JSON keys are strings; RocketMQ reads the quoted form too."""
    save_table(path, {"offsetTable": {10: 1, 2: 9}})

    assert load_table(path) == {"offsetTable": {"2": 9, "10": 1}}


def test_a_patient_save_pauses_for_other_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is the same, and encoding pauses after half a millisecond at the latest."""
    table = {"offsetTable": {f"t@g{n}": {str(q): n * q for q in range(50)} for n in range(100)}}
    pauses: list[float] = []
    monkeypatch.setattr(json_table, "sleep", pauses.append)

    save_table(tmp_path / "impatient.json", table)
    assert pauses == []
    save_table(tmp_path / "patient.json", table, patient=True)

    patient = (tmp_path / "patient.json").read_bytes()
    assert patient == (tmp_path / "impatient.json").read_bytes()
    assert len(pauses) >= 10


class Perm(NamedTuple):
    """An entry of a table."""

    perm: int

    def to_json(self) -> dict[str, object]:
        return {"perm": self.perm, "attributes": {}}


def test_entries_are_encoded_once_however_often_they_are_saved() -> None:
    """Each new topic rewrites the whole file; cached text gives the same file."""
    encoded: list[Perm] = []

    def to_json(entry: Perm) -> dict[str, object]:
        encoded.append(entry)
        return entry.to_json()

    texts = EntryTexts(to_json)
    entries: dict[str, Perm] = {}
    changes = [("B", Perm(6)), ("A", Perm(4)), ("\u00fc", Perm(2)), ("A", Perm(6))]
    for name, entry in changes:
        entries[name] = entry
        plain = {"topics": {one: value.to_json() for one, value in entries.items()}}
        assert encode_table({"topics": texts.encode(entries)}) == encode_table(plain)
    assert encoded == [entry for _, entry in changes]

    del entries["B"]
    assert json.loads(encode_table({"topics": texts.encode(entries)}))["topics"].keys() == {
        "A",
        "\u00fc",
    }
    assert encode_table({"topics": texts.encode({})}) == encode_table({"topics": {}})


def test_entries_are_encoded_patiently_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save of a large table pauses for other threads; later ones encode nothing."""
    pauses: list[float] = []
    monkeypatch.setattr(json_table, "sleep", pauses.append)
    entries = {f"t{number}": Perm(6) for number in range(1_000)}
    texts = EntryTexts(Perm.to_json)

    texts.encode(entries, patient=True)
    assert len(pauses) >= 10
    pauses.clear()
    texts.encode(entries, patient=True)
    EntryTexts(Perm.to_json).encode(entries)
    assert pauses == []


def test_saving_a_table_leaves_no_reference_cycles() -> None:
    """Those of a thousand topics caused two full garbage collections per save."""
    table = {"topicConfigTable": {f"t{n}": {"perm": 6, "attributes": {}} for n in range(100)}}
    gc.collect()
    gc.disable()
    try:
        encode_table(table, patient=True)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_the_layout_is_rocketmqs() -> None:
    """A person can compare halfmq's file with RocketMQ's."""
    table = {
        "topicConfigTable": {"B": {"perm": 6, "attributes": {}}},
        "dataVersion": {"counter": 3},
    }

    assert encode_table(table).decode() == (
        '{\n\t"dataVersion":{\n\t\t"counter":3\n\t},\n\t"topicConfigTable":{\n\t\t"B":{\n'
        '\t\t\t"attributes":{},\n\t\t\t"perm":6\n\t\t}\n\t}\n}'
    )


def test_bare_integer_keys_are_read() -> None:
    """RocketMQ writes maps with integer keys in this form, which is not JSON."""
    content = (
        b'{\n\t"offsetTable":{\n\t\t"T@g1":{0:100,1:101,-2:7 , 3 :103\n\t\t},'
        b'"U@g1":{0:0\n\t\t}\n\t}\n}'
    )

    assert decode_table(content) == {
        "offsetTable": {"T@g1": {"0": 100, "1": 101, "-2": 7, "3": 103}, "U@g1": {"0": 0}}
    }


def test_text_that_looks_like_a_bare_key_is_not_changed() -> None:
    """An SQL expression may contain anything."""
    content = rb'{"expression":"a in {1:2} \" ,3:4","table":{5:"{6:7"}}'

    assert decode_table(content) == {
        "expression": 'a in {1:2} " ,3:4',
        "table": {"5": "{6:7"},
    }


@pytest.mark.parametrize(
    "content",
    [b"", b" \n", b"{", b'{"a":1', b"[1]", b"null", b"\x00" * 64, b'{"a":"\xff"}', b"{a:1}"],
)
def test_what_is_no_table_is_refused(content: bytes) -> None:
    """A cut file must never be accepted as a smaller table."""
    with pytest.raises(ValueError):  # noqa: PT011 - which of its kinds does not matter
        decode_table(content)


def test_nesting_that_is_too_deep_is_refused() -> None:
    """A damaged file must not crash the reader."""
    with pytest.raises(ValueError, match="nested too deeply"):
        decode_table(b'{"a":' * 100_000)


@pytest.mark.parametrize("name", NAMES)
def test_every_table_of_a_golden_store_is_read(name: str, tmp_path: Path) -> None:
    """Both the table and its backup, of every kind that RocketMQ writes."""
    config = unpack(name, tmp_path).root / "config"
    tables = [path for path in config.iterdir() if ".json" in path.name or "etrics" in path.name]

    assert len(tables) >= 8
    for path in tables:
        assert isinstance(decode_table(path.read_bytes()), dict)


@pytest.mark.parametrize("name", STOPPED)
@pytest.mark.parametrize(("file", "key", "truth_key"), TABLES)
def test_the_tables_of_a_golden_store_match_its_brokers_answers(
    name: str, file: str, key: str, truth_key: str, tmp_path: Path
) -> None:
    """A broker that stopped cleanly saved everything that it reported to its admin client."""
    store = unpack(name, tmp_path)
    table = load_table(store.root / "config" / file)

    assert table is not None
    assert table[key] == store.truth[truth_key]


@pytest.mark.parametrize("name", KILLED)
def test_the_offsets_of_a_killed_golden_store_are_those_of_its_last_save(
    name: str, tmp_path: Path
) -> None:
    """They are saved every 5 s, so they may be lower than the last reported ones, never higher."""
    store = unpack(name, tmp_path)
    table = load_table(store.root / "config" / "consumerOffset.json")

    assert table is not None
    last_reported = store.truth["consumerOffsets"]
    for group, saved in table["offsetTable"].items():
        for queue_id, queue_offset in saved.items():
            assert queue_offset <= last_reported[group][queue_id]


def test_without_files_there_is_no_table(path: Path) -> None:
    """The caller then uses its defaults."""
    assert load_table(path) is None


@pytest.mark.parametrize("damage", [b"", b'{"offsetTable":{"T@g', b"\x00" * 100])
def test_a_damaged_file_is_replaced_by_its_backup_and_kept(
    path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """One save is lost, not the table; the damaged file stays for inspection."""
    save_table(path, OLD)
    save_table(path, NEW)
    path.write_bytes(damage)

    assert load_table(path) == OLD
    assert beside(path, ".bad").read_bytes() == damage
    assert not path.exists()
    assert "consumerOffset.json" in caplog.text


def test_a_missing_file_is_replaced_by_its_backup(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """RocketMQ's own save leaves this state when it is killed."""
    beside(path, ".bak").write_bytes(encode_table(OLD))

    assert load_table(path) == OLD
    assert "missing" in caplog.text


@pytest.mark.parametrize("main", [b"{", None])
def test_a_damaged_file_and_backup_are_never_an_empty_table(path: Path, main: bytes | None) -> None:
    """The files stay unchanged, so that each further attempt fails as well."""
    if main is not None:
        path.write_bytes(main)
    beside(path, ".bak").write_bytes(b"")
    before = {entry.name: entry.read_bytes() for entry in path.parent.iterdir()}

    for _ in range(2):
        with pytest.raises(DamagedTableError, match=r"consumerOffset.json and its .bak"):
            load_table(path)
    assert {entry.name: entry.read_bytes() for entry in path.parent.iterdir()} == before


def test_a_table_without_its_required_key_is_damaged(path: Path) -> None:
    """Otherwise one flipped bit in that key would turn it into an empty table."""
    save_table(path, OLD)
    save_table(path, OLD)
    content = path.read_bytes()
    for bit in range(8 * len(b"offsetTable")):
        damaged = bytearray(content)
        damaged[content.index(b"offsetTable") + bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)

        assert read_table(path, "offsetTable") == (OLD, TableOrigin.BACKUP), bit
        save_table(path, OLD)


def test_the_origin_of_a_table_is_returned(path: Path) -> None:
    """A caller may be able to restore the change that a backup lacks."""
    assert read_table(path) == ({}, TableOrigin.NOTHING)
    save_table(path, OLD)
    assert read_table(path) == (OLD, TableOrigin.FILE)
    save_table(path, NEW)
    path.unlink()
    assert read_table(path) == (OLD, TableOrigin.BACKUP)


def test_a_file_that_cannot_be_read_is_not_treated_as_missing(path: Path) -> None:
    """It exists, and a save would replace it."""
    path.mkdir()
    with pytest.raises(UnusableFileError, match=r"consumerOffset\.json"):
        load_table(path)


def test_damaged_files_can_be_set_aside(path: Path) -> None:
    """Both names are free again, and the damaged files stay for inspection."""
    path.write_bytes(b"{")
    beside(path, ".bak").write_bytes(b"[")
    set_aside(path)

    assert load_table(path) is None
    assert beside(path, ".bad").read_bytes() == b"{"
    assert beside(path, ".bak.bad").read_bytes() == b"["
    set_aside(path)


def test_a_sound_table_logs_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A warning at every start would be ignored."""
    save_table(path, OLD)
    with caplog.at_level(logging.DEBUG):
        load_table(path)

    assert not caplog.records


def test_the_previous_table_is_kept_as_backup(path: Path) -> None:
    """RocketMQ falls back to it as halfmq does."""
    save_table(path, OLD)
    save_table(path, NEW)

    assert decode_table(beside(path, ".bak").read_bytes()) == OLD


def test_a_damaged_table_never_becomes_the_backup(path: Path) -> None:
    """It would replace the last good copy."""
    save_table(path, {})
    save_table(path, OLD)
    path.write_bytes(b'{"offs')
    save_table(path, NEW)

    assert load_table(path) == NEW
    assert decode_table(beside(path, ".bak").read_bytes()) == {}


def test_a_table_with_invalid_utf8_never_becomes_the_backup(path: Path) -> None:
    """A flipped bit in a name is damage too."""
    save_table(path, {})
    path.write_bytes(b'{"a":"\xff"}')
    beside(path, ".bak").write_bytes(encode_table(OLD))
    save_table(path, NEW)

    assert decode_table(beside(path, ".bak").read_bytes()) == OLD


def test_a_table_in_rocketmqs_own_form_becomes_the_backup(path: Path) -> None:
    """The first save by halfmq must not drop RocketMQ's table."""
    path.write_bytes(b'{"offsetTable":{"T@g1":{0:5}}}')
    save_table(path, NEW)

    assert decode_table(beside(path, ".bak").read_bytes()) == {"offsetTable": {"T@g1": {"0": 5}}}


@pytest.mark.parametrize(
    ("table", "error"),
    [({"a": {1, 2}}, TypeError), ({"a": "\ud800"}, ValueError), ({"a": float("nan")}, ValueError)],
)
def test_a_table_that_cannot_be_written_leaves_the_old_one(
    path: Path, table: dict[str, Any], error: type[Exception]
) -> None:
    """A bug in the caller must not destroy the file."""
    save_table(path, OLD)
    with pytest.raises(error):
        save_table(path, table)

    assert load_table(path) == OLD
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_the_content_is_on_disk_before_it_gets_its_name(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a name must not refer to content that was not written."""
    save_table(path, OLD)
    calls = SystemCalls(monkeypatch, die_at=0, before=True)
    save_table(path, NEW)

    assert calls.log == ["unlink", "fsync", "unlink", "link", "replace", "replace", "fsync"]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("die_at", range(1, 7))
@pytest.mark.parametrize("links", [True, False])
def test_a_kill_between_any_two_steps_leaves_a_readable_table(
    path: Path, monkeypatch: pytest.MonkeyPatch, die_at: int, before: bool, links: bool
) -> None:
    """Every reader finds the old or the new one, and the next save works."""
    save_table(path, {})
    save_table(path, OLD)
    with monkeypatch.context() as patch:
        if not links:
            patch.setattr(disk, "link", refuse_links)
        SystemCalls(patch, die_at=die_at, before=before)
        with pytest.raises(Killed):
            save_table(path, NEW)

    if links:
        assert decode_table(path.read_bytes()) in (OLD, NEW)
    assert load_table(path) in (OLD, NEW)
    assert not beside(path, ".bad").exists()

    save_table(path, NEW)
    assert load_table(path) == NEW


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("fail_at", range(1, 7))
def test_a_step_that_fails_leaves_a_readable_table(
    path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int, error: int
) -> None:
    """The caller gets the error, the old or the new table is there, and the next save works."""
    save_table(path, {})
    save_table(path, OLD)
    raised = False
    with monkeypatch.context() as patch:
        calls = SystemCalls(patch, die_at=fail_at, before=True, error=OSError(error, "refused"))
        try:
            save_table(path, NEW)
        except OSError:
            raised = True

    # Without a link the backup is made in another way; every other error is raised.
    assert raised or calls.log[fail_at - 1] == "link"
    assert load_table(path) in ((OLD, NEW) if raised else (NEW,))
    assert not beside(path, ".bad").exists()
    save_table(path, NEW)
    assert load_table(path) == NEW
    assert isinstance(decode_table(beside(path, ".bak").read_bytes()), dict)


def refuse_links(*_: object, **__: object) -> None:
    raise OSError("this file system has no hard links")


def test_without_hard_links_a_backup_is_kept_as_well(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems have no hard links."""
    monkeypatch.setattr(disk, "link", refuse_links)
    save_table(path, OLD)
    save_table(path, NEW)

    assert load_table(path) == NEW
    assert decode_table(beside(path, ".bak").read_bytes()) == OLD


def test_encoding_in_pieces_gives_the_text_of_the_standard_encoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With and without pauses for other threads."""
    rows = {f"T@{number}\n": {"n": {3: 1, 11: 2}, "x": [1, {"y": {}}]} for number in range(50)}
    table: dict[str, Any] = {
        "b": rows,
        "a": {},
        "c": [1, 2],
        "": None,
        "d": {"one": {"two": {"three": [[]]}}},
    }
    others: list[dict[str, Any]] = [{}, {"only": {}}]
    for one in (table, *others):
        text = json.dumps(one, indent="\t", separators=(",", ":"), sort_keys=True)
        assert encode_table(one, patient=True) == encode_table(one) == text.encode()

    # A table above the real limit takes a second to write.
    monkeypatch.setattr(json_table, "SORTED_MAX", 10)  # larger tables keep their own order
    assert decode_table(encode_table(table, patient=True)) == decode_table(encode_table(table))


def test_a_link_in_place_of_the_new_file_is_not_followed(tmp_path: Path) -> None:
    """Whoever can write to the directory could have a foreign file overwritten."""
    foreign = tmp_path / "foreign"
    foreign.write_text("theirs")
    path = tmp_path / "topics.json"
    path.with_name("topics.json.tmp").symlink_to(foreign)

    save_table(path, {"a": {}})

    assert foreign.read_text() == "theirs"
    assert not path.is_symlink()
    with pytest.raises(OSError, match="symbolic links"):
        disk.write_file(_link(tmp_path / "link", foreign), b"ours")


def _link(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path
