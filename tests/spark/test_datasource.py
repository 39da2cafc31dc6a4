"""The commit log as a DataFrame."""

from __future__ import annotations

import base64
import shutil
import struct
import zlib
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from halfmq.spark_jobs.datasource import FORMAT
from halfmq.spark_jobs.log.transaction_parts import Part
from halfmq.spark_jobs.source.columns import COLUMNS
from halfmq.spark_jobs.source.schema import ddl
from tests.support import golden_store
from tests.support.log_writer import HALF, HOST_V6, OP, START, Apache, LogWriter, Ours
from tests.support.spark import load, rows

SEGMENT = 1 << 12
MOST = ddl(*(name for name in COLUMNS if name not in {"value", "headers"}))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> golden_store.GoldenStore:
    return golden_store.unpack("plain-clean", tmp_path_factory.mktemp("golden"))


def timestamp(ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)


def test_a_store_of_rocketmq_is_a_table_of_its_messages(
    spark: SparkSession, plain: golden_store.GoldenStore
) -> None:
    """Every message, in the columns that Spark's Kafka source has, and in ours."""
    found = load(spark, plain.root, includeValue="true", includeHeaders="true", verifyCrc="true")
    seconds = {name: F.unix_millis(name) for name in ("timestamp", "bornTimestamp")}
    messages = rows(found.withColumns(seconds).where("recordType = 'message'"))

    assert [row["physicalOffset"] for row in messages] == [
        message["commitLogOffset"] for message in plain.messages
    ]
    for row, message in zip(messages, plain.messages, strict=True):
        properties = message["properties"]
        assert row["topic"] == message["topic"]
        assert (row["partition"], row["offset"]) == (message["queueId"], message["queueOffset"])
        assert bytes(row["value"]) == base64.b64decode(message["body"])
        assert (row["bodyCrc"], row["crcOk"]) == (message["bodyCRC"], True)
        assert row["timestamp"] == message["storeTimestamp"]
        assert row["bornTimestamp"] == message["bornTimestamp"]
        assert row["bornHost"] == message["bornHost"].replace("|", ":")
        assert row["storeHost"] == message["storeHost"].replace("|", ":")
        assert {name: bytes(value).decode() for name, value in row["headers"]} == properties
        assert row["uniqKey"] == properties.get("UNIQ_KEY")
        assert row["tags"] == properties.get("TAGS")
        assert row["key"] == (properties["KEYS"].encode() if "KEYS" in properties else None)
        assert (row["size"], row["flag"]) == (message["storeSize"], message["flag"])


def test_the_columns_are_as_documented(
    spark: SparkSession, plain: golden_store.GoldenStore
) -> None:
    """Without options there is neither a body nor a header column."""
    assert load(spark, plain.root).dtypes == [
        (name, column.spark_type)
        for name, column in COLUMNS.items()
        if name not in {"value", "headers"}
    ]


def test_a_schema_chooses_columns_and_their_order(
    spark: SparkSession, plain: golden_store.GoldenStore
) -> None:
    """What is not asked for is not decoded."""
    frame = load(spark, plain.root, "topic string, physicalOffset long")

    assert frame.columns == ["topic", "physicalOffset"]
    assert rows(frame)[0] == (plain.messages[0]["topic"], 0)


def test_columns_are_named_in_any_case(
    spark: SparkSession, plain: golden_store.GoldenStore
) -> None:
    """As everywhere in Spark; the names stay as they were asked for."""
    frame = load(spark, plain.root, "TOPIC string, physicaloffset long")

    assert frame.columns == ["TOPIC", "physicaloffset"]
    assert rows(frame)[0] == (plain.messages[0]["topic"], 0)
    queues = spark.read.format("rocketmq-consumequeue").schema("Topic string").load(str(plain.root))
    assert queues.where("topic = 'plain'").columns == ["Topic"]
    events = spark.read.format("rocketmq-transactions").schema("PART tinyint").load(str(plain.root))
    assert events.columns == ["PART"]
    assert sorted(row[0] for row in events.collect()) == [Part.DELAYED, Part.ARRIVED]


@pytest.mark.parametrize("partition_bytes", ["100", "20k", "1g"])
def test_rows_do_not_depend_on_how_the_log_is_cut(
    spark: SparkSession, plain: golden_store.GoldenStore, partition_bytes: str
) -> None:
    """Splits inside segments neither lose nor repeat a record."""
    if partition_bytes == "100":  # a task for every few records: a part of the log will do
        options = {"endingOffsets": "2000"}
        expected = [m["commitLogOffset"] for m in plain.messages if m["commitLogOffset"] < 2000]
    else:
        options = {}
        expected = [message["commitLogOffset"] for message in plain.messages]

    frame = load(
        spark,
        plain.root,
        "physicalOffset long, recordType string, crcOk boolean",
        maxPartitionBytes=partition_bytes,
        batchRows="7",
        verifyCrc="true",
        **options,
    )

    found = rows(frame)
    assert [row[0] for row in found if row[1] == "message"] == expected
    assert all(row[2] for row in found if row[1] == "message")
    assert not [row for row in found if row[1] == "corrupt"]


def write_mixed(folder: Path) -> LogWriter:
    """A transaction in each dialect, a returned copy of a final message, IPv6, and a delay."""
    log = LogWriter(folder, segment_size=SEGMENT)
    apache, ours = Apache(log), Ours(log)
    committed = apache.half(apache.key())
    apache.commit(committed)
    apache.check(apache.half(apache.key()), 3)
    ours.rollback(ours.half(apache.key()))
    ours.write_ops()
    apache.write_ops()
    apache.discard(committed)
    for topic in ("%RETRY%g", "%DLQ%g", "SCHEDULE_TOPIC_XXXX"):
        log.append(topic, b"again", committed.properties, sys_flag=8, reconsume_times=1)
    log.append(OP, b"0,", {"TAGS": "other"})
    log.append("six", b"", {}, born_host=HOST_V6, reconsume_times=4)
    log.append("nonsense", b"", {"TRANSACTION_CHECK_TIMES": "x"})
    log.close()
    return log


def test_records_of_transactions_say_which_part_they_are(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A copy that a consumer returned is no decision, though it has the flags of one."""
    write_mixed(tmp_path)

    found = rows(load(spark, tmp_path).where("recordType = 'message'"))

    assert [row["transactionType"] for row in found] == [
        *("half", "commit", "half", "half", "half", "rollback", "op", "op", "discard"),
        *("none", "none", "none", "none", "none", "none"),
    ]
    assert [row["checkTimes"] for row in found][:4] == [None, None, None, 3]
    assert found[1]["realTopic"] == "orders"
    assert (found[1]["realPartition"], found[1]["partition"]) == (3, 3)
    assert found[1]["producerGroup"] == "pg"
    assert found[1]["preparedTransactionOffset"] == found[0]["physicalOffset"]
    assert (found[-2]["bornHost"], found[-2]["reconsumeTimes"]) == ("[::1]:54321", 4)
    assert found[-1]["checkTimes"] is None


def test_topics_and_bodies_can_be_chosen(spark: SparkSession, tmp_path: Path) -> None:
    """Subscribe chooses records, valueTopics the bodies worth their bytes."""
    log = write_mixed(tmp_path)

    chosen = load(spark, tmp_path, "topic string", subscribe=f"orders, {HALF}").collect()
    bodies = load(spark, tmp_path, "topic string, value binary", valueTopics=OP).collect()

    wanted = [record.topic for record in log.written if record.topic in {"orders", HALF}]
    assert Counter(row[0] for row in chosen) == Counter(wanted)
    assert {row["topic"] for row in bodies if row["value"] is not None} == {OP}


def test_offsets_bound_what_is_read(spark: SparkSession, tmp_path: Path) -> None:
    """From the first record at or behind the start, to the last that starts before the end."""
    written = write_mixed(tmp_path).written

    found = rows(
        load(
            spark,
            tmp_path,
            "physicalOffset long",
            startingOffsets=str(written[2].offset + 1),
            endingOffsets=str(written[5].offset + 1),
        )
    )

    assert [row[0] for row in found] == [record.offset for record in written[3:6]]


def damage(folder: Path, offset: int) -> None:
    with (folder / f"{0:020}").open("r+b") as file:
        file.seek(offset + 4)
        file.write(b"????")


def test_damage_is_a_row_or_an_error_as_asked(spark: SparkSession, tmp_path: Path) -> None:
    """PERMISSIVE goes on behind it, FAILFAST says where it is."""
    victim = write_mixed(tmp_path).written[4]
    damage(tmp_path, victim.offset)

    frame = load(spark, tmp_path, MOST).where("recordType = 'corrupt'")
    (row,) = frame.collect()

    assert (row["physicalOffset"], row["size"]) == (victim.offset, victim.size)
    assert (row["topic"], row["segment"]) == (None, 0)
    assert row["error"]
    with pytest.raises(PySparkException, match=f"{victim.size} bytes at offset {victim.offset}"):
        load(spark, tmp_path, mode="FAILFAST").collect()


def test_segments_without_their_store_are_a_log(spark: SparkSession, tmp_path: Path) -> None:
    """A folder of copied segments, from whichever offset on."""
    log = LogWriter(tmp_path / "store", segment_size=SEGMENT, first=SEGMENT * 9)
    for _ in range(80):
        log.append("t", b"body")
    log.close()
    copied = tmp_path / "copied"
    copied.mkdir()
    for path in sorted((tmp_path / "store").iterdir())[1:]:
        shutil.copy(path, copied)

    found = rows(load(spark, copied, "physicalOffset long, recordType string"))

    assert [row[0] for row in found if row[1] == "message"] == [
        record.offset for record in log.written if record.offset >= SEGMENT * 10
    ]


def test_a_log_that_is_being_written_is_read_up_to_its_last_whole_record(
    spark: SparkSession, tmp_path: Path
) -> None:
    """What is half there is no damage; when it is whole the next query has it."""
    log = LogWriter(tmp_path, segment_size=SEGMENT)
    for _ in range(5):
        log.append("t", b"body", {"KEYS": "k"})
    path = log.close() / f"{0:020}"
    (tmp_path / f"{SEGMENT:020}").write_bytes(bytes(SEGMENT))
    content = path.read_bytes()
    path.write_bytes(content[: log.end - 9].ljust(SEGMENT, b"\0"))

    before = load(spark, tmp_path, "recordType string").collect()
    path.write_bytes(content)
    after = load(spark, tmp_path, "recordType string").collect()

    assert [row[0] for row in before] == ["message"] * 4
    assert [row[0] for row in after] == ["message"] * 5


def test_compressed_bodies_are_unpacked_where_that_is_asked_for(
    spark: SparkSession, tmp_path: Path
) -> None:
    """One that cannot be is null and says why, or ends the query, as asked."""
    log = LogWriter(tmp_path, segment_size=SEGMENT)
    log.append("t", zlib.compress(b"packed" * 99), sys_flag=0x301)
    log.append("t", b"plain")
    log.append("t", b"no zlib", sys_flag=0x301)
    log.close()
    columns = "physicalOffset long, value binary, error string"

    def read(**options: str) -> list[Row]:
        return rows(load(spark, tmp_path, columns, includeValue="true", **options))

    stored, unpacked = read(), read(decompress="true")

    assert [bytes(row["value"])[:2] for row in stored] == [b"x\x9c", b"pl", b"no"]
    assert [row["value"] for row in unpacked] == [b"packed" * 99, b"plain", None]
    assert [row["error"] and row["error"][:20] for row in unpacked] == [
        *(None, None),
        "the body is not ZLIB",
    ]
    with pytest.raises(PySparkException, match=f"offset {log.written[2].offset}: the body is not"):
        read(decompress="true", mode="FAILFAST")


def test_a_log_reads_the_same_without_mapping_it(
    spark: SparkSession, plain: golden_store.GoldenStore
) -> None:
    """As for a network mount: in windows, by workers that got nothing but the path."""
    columns = "physicalOffset long, crcOk boolean, topic string, uniqKey string"
    options = {"verifyCrc": "true", "maxPartitionBytes": "50k"}

    mapped = rows(load(spark, plain.root, columns, **options))
    read = rows(load(spark, plain.root, columns, memoryMap="false", **options))

    assert read == mapped


def test_an_empty_log_has_no_rows(spark: SparkSession, tmp_path: Path) -> None:
    """A broker that has just been started for the first time."""
    LogWriter(tmp_path / "commitlog").close()

    assert load(spark, tmp_path).collect() == []


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        (None, {"verifyCRCs": "true"}, "did you mean verifyCrc"),
        ("physicalOfset long", {}, "did you mean physicalOffset"),
        ("physicalOffset string", {}, "column physicalOffset is bigint, not string"),
    ],
)
def test_wrong_names_are_answered_with_the_right_ones(
    spark: SparkSession, tmp_path: Path, columns: str | None, options: dict[str, str], said: str
) -> None:
    """Whether of an option or of a column."""
    LogWriter(tmp_path).close()

    with pytest.raises(PySparkException, match=said):
        load(spark, tmp_path, columns, **options).collect()


def test_a_strange_clock_does_not_fail_the_read(spark: SparkSession, tmp_path: Path) -> None:
    """A producer may send any time; it is shown as the nearest that has a name."""
    log = LogWriter(tmp_path, segment_size=SEGMENT)
    log.append("t", b"", {}, born=2**62)
    log.append("t", b"", {}, born=-(2**62))
    log.append("t", "é".encode("latin-1"), {"TAGS": "ä"})
    properties = log.written[-1].properties
    log.close()
    path = tmp_path / f"{0:020}"
    content = path.read_bytes().replace("ä".encode(), struct.pack(">H", 0xFFFE))
    path.write_bytes(content)

    frame = load(spark, tmp_path, "physicalOffset long, bornTimestamp timestamp, tags string")
    years = rows(frame.withColumn("bornTimestamp", F.year("bornTimestamp")))

    assert [row[1] for row in years] == [9999, 1, timestamp(START).year]
    assert years[-1]["tags"] != properties["TAGS"]
    assert years[-1]["tags"] == "\ufffd\ufffd"


def test_a_wrong_option_is_told_without_the_way_that_it_took(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Also in a session of a user's, which shows tracebacks of workers."""
    hide = "spark.sql.execution.pyspark.udf.hideTraceback.enabled"
    spark.conf.set(hide, "false")
    try:
        for reader in (spark.read, spark.readStream):
            with pytest.raises(PySparkException) as raised:
                reader.format(FORMAT).option("startingOffsets", "x").load(str(tmp_path))
            said = str(raised.value).splitlines()
            assert len([line for line in said if line.startswith("  File ")]) == 1
            assert "OptionError: startingOffsets=x: expected earliest or" in said[-2]
    finally:
        spark.conf.set(hide, "true")


# --- as Spark's users name and limit what they read


def two_stores(folder: Path) -> tuple[LogWriter, LogWriter]:
    first = LogWriter(folder / "a" / "commitlog", segment_size=1 << 11)
    second = LogWriter(folder / "b" / "commitlog", segment_size=1 << 11)
    for log in (first, second):
        for number in range(60):
            log.append("orders", b"%d" % number * 20)
        log.close()
    return first, second


def test_files_patterns_and_several_paths_can_be_read(spark: SparkSession, tmp_path: Path) -> None:
    """One segment, some of them, and two logs in one DataFrame."""
    first, _ = two_stores(tmp_path)
    files = sorted((tmp_path / "a" / "commitlog").iterdir())
    reader = spark.read.format(FORMAT).schema("physicalOffset long, recordType string")

    def messages(*paths: Path | str) -> int:
        names = [str(path) for path in paths]
        found = reader.load(names if len(names) > 1 else names[0])
        return found.where("recordType = 'message'").count()

    in_file = [sum(w.offset >> 11 == place for w in first.written) for place in range(len(files))]
    assert messages(files[1]) == in_file[1]
    assert messages(files[0], files[2]) == in_file[0] + in_file[2]
    assert messages(tmp_path / "a" / "commitlog" / "*2048") == in_file[1]
    assert messages(tmp_path / "*") == messages(tmp_path / "a", tmp_path / "b") == 120
    with pytest.raises(PySparkException, match="nothing has such a name"):
        messages(tmp_path / "c*")


def test_sql_reads_a_log_by_a_view_and_is_told_why_not_by_a_table(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Spark keeps the options of a table from a source in Python."""
    two_stores(tmp_path)
    options = f"using `{FORMAT}` options (path '{tmp_path / 'a'}', subscribe 'orders')"

    spark.sql(f"create or replace temporary view orders {options}")

    assert spark.sql("select count(*) from orders").collect() == [(60,)]
    with pytest.raises(PySparkException, match="create a temporary view instead of a table"):
        spark.sql(f"create table orders_table {options}")


@pytest.mark.parametrize(
    "condition",
    [
        "physicalOffset >= {start} and physicalOffset < {end}",
        "physicalOffset between {start} and {end} - 1 and topic in ('orders', 'bills')",
        "timestamp >= timestamp_millis({first}) and timestamp <= timestamp_millis({last})",
    ],
)
def test_what_a_condition_excludes_is_not_read(
    condition: str, spark: SparkSession, tmp_path: Path
) -> None:
    """Garbage in all other files would end the query."""
    size = 8 << 20  # a damaged range belongs to the record before it, which may have 4 MiB
    log = LogWriter(tmp_path / "commitlog", segment_size=size)
    for number in range(80):
        log.now = START + number * 3_600_000
        log.append(("orders", "bills")[number % 2], bytes(600_000))
    log.close()
    files = sorted((tmp_path / "commitlog").iterdir())
    for place, file in enumerate(files):
        if place not in {2, 3}:  # but for the first record, which tells the time of a file
            kept = file.read_bytes()[: 700 << 10]
            file.write_bytes(kept.ljust(size, b"\x55"))
    wanted = [w for w in log.written if w.offset // size == 3]
    names = {"start": 3 * size, "end": 4 * size}
    names |= {"first": wanted[0].stored, "last": wanted[-1].stored}

    found = load(spark, tmp_path, mode="FAILFAST").where(condition.format(**names))

    offsets = [row["physicalOffset"] for row in rows(found.where("recordType = 'message'"))]
    assert offsets == [w.offset for w in wanted]
