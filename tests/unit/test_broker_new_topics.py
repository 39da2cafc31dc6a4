"""Topics and groups that are new, and in no file yet."""

from __future__ import annotations

from tests.support.peers import COMMIT
from tests.support.windows import Rig, windowed


@windowed()
async def test_a_topic_that_a_kill_keeps_out_of_the_file_is_there_again(rig: Rig) -> None:
    """Its table is written by a thread within a second; its message was acknowledged before."""
    producer = await rig.peer()
    half = await producer.prepare("0" * 32)
    await producer.end(half, COMMIT)
    table = rig.root / "config" / "topics.json"
    assert b"orders" not in (table.read_bytes() if table.exists() else b"")
    await rig.kill()

    assert "orders" in rig.broker._tables.topics


@windowed()
async def test_a_stop_that_cannot_write_the_topics_is_no_ordered_one(rig: Rig) -> None:
    """The next start looks for what the file lacks, as after a kill."""
    producer = await rig.peer()
    half = await producer.prepare("0" * 32)
    await producer.end(half, COMMIT)
    table = rig.root / "config" / "topics.json"
    blocked = table.with_name("topics.json.tmp")
    blocked.mkdir(parents=True)
    await rig.stop()
    assert (rig.root / "abort").exists()
    blocked.rmdir()
    await rig.start()

    assert "orders" in rig.broker._tables.topics
