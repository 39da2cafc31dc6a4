"""Queues of deleted topics: gone, and never back, whatever a start has to rebuild."""

import json
import random
import shutil
from pathlib import Path

import pytest

from halfmq.store.message_store import MessageStore
from halfmq.store.tools.verify import verify
from tests.support.seeds import run_seed
from tests.support.stores import (
    Clock,
    append_durably,
    bounds,
    crash,
    draft,
    everything,
    maintain,
    small_config,
)


def opened(root: Path) -> MessageStore:
    store = MessageStore(small_config(root), now_ms=Clock())
    store.open()
    return store


def note(root: Path, deleted: dict[str, int]) -> None:
    """Write what the broker writes in the moment of a deletion."""
    (root / "config").mkdir(exist_ok=True)
    table = {"topicConfigTable": {}, "halfmqDeletedTopics": deleted}
    (root / "config" / "topics.json").write_text(json.dumps(table))


def send(store: MessageStore, topic: str, *bodies: str) -> list[int]:
    """Return the queue offsets of new messages."""
    done = append_durably(store, *(draft(topic, 0, body.encode()) for body in bodies))
    return [one.queue_offset for one in done]


def bodies(store: MessageStore, topic: str) -> list[str]:
    return [one.body.decode() for one in everything(store) if one.topic == topic]


def test_a_kill_before_the_queues_are_removed(tmp_path: Path) -> None:
    """The next start removes them; the queue of another topic stays."""
    store = opened(tmp_path / "store")
    send(store, "orders", "old-1", "old-2")
    send(store, "bills", "kept")
    maintain(store)
    note(tmp_path / "store", {"orders": store.write_offset})
    root = crash(tmp_path / "store", tmp_path / "killed")
    store.close(clean=False)

    store = opened(root)
    assert bounds(store) == {("bills", 0): (0, 1)}
    assert send(store, "orders", "new") == [0]
    store.close()
    assert verify(root).sound


def test_a_deleted_queue_leaves_no_digest(tmp_path: Path) -> None:
    """It would call the file of the new topic damaged, which has the same name."""
    root = tmp_path / "store"
    store = opened(root)
    send(store, "orders", *(f"old-{number}" for number in range(120)))  # two full files
    maintain(store)
    digests = root / "digests" / "consumequeue" / "orders"
    assert [path for path in digests.rglob("*") if path.is_file()]
    note(root, {"orders": store.write_offset})
    store.delete_topic("orders").result()
    assert not [path for path in digests.rglob("*") if path.is_file()]

    assert send(store, "orders", *(f"new-{number}" for number in range(60)))[0] == 0
    store.close()
    store = opened(root)
    assert bodies(store, "orders") == [f"new-{number}" for number in range(60)]
    store.close()
    assert not (root / "consumequeue.rebuild").exists()


@pytest.mark.parametrize("seed", [run_seed() + number for number in range(4)])
def test_topics_come_and_go(tmp_path: Path, seed: int) -> None:
    """After any deletions, kills, stops and lost queues each topic has what came after the last."""
    print("seed", seed)
    chance = random.Random(seed)
    root, deleted, lives = tmp_path / "store", dict[str, int](), 0
    expected: dict[str, list[str]] = {"a": [], "b": [], "c": []}
    store = opened(root)
    for step in range(60):
        topic = chance.choice("abc")
        action = chance.choice(["send"] * 5 + ["delete", "kill", "stop"])
        if action == "send":
            new = [f"{step}-{number}" for number in range(chance.randint(1, 70))]
            assert send(store, topic, *new)[0] == len(expected[topic])
            expected[topic] += new
        elif action == "delete":
            note(root, deleted := {**deleted, topic: store.write_offset})
            expected[topic] = []
            if chance.random() < 0.7:
                store.delete_topic(topic).result()
            else:
                action = "kill"
        if action == "kill":
            lives += 1
            after = crash(root, tmp_path / f"life-{lives}")
            store.close(clean=False)
            root = after
        elif action == "stop":
            store.close()
        if action in ("kill", "stop"):
            if chance.random() < 0.3:
                shutil.rmtree(root / "consumequeue")
            store = opened(root)
        found = {name: bodies(store, name) for name in expected}
        assert found == expected, f"step {step}: {action}"
    store.close()
    assert verify(root).sound
