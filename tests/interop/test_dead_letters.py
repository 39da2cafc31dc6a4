"""Dead letters are read and sent again, by the client and by the command, at a real broker."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from halfmq.client import (
    AccessDeniedError,
    AclEntry,
    ClientConfig,
    ConfigurationError,
    DeadLetter,
    Decision,
    InvalidMessageError,
    Message,
    RouteNotFoundError,
)
from halfmq.client.administration.browsing import PAGE_SIZE
from halfmq.client.blocking import Admin, Consumer, MessageView, Producer, TransactionProducer
from halfmq.client.testing import BrokerProcess, broker_process
from halfmq.command.main import main
from tests.support.guarded_broker import ADMIN, GuardedBroker, Keys
from tests.support.patience import PATIENCE_S, wait_until

READER: Keys = {"access_key": "letter-reader", "secret_key": "letter-secret"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("dead-letters")) as process:
        yield process


@pytest.fixture(scope="module")
def admin(broker: BrokerProcess) -> Iterator[Admin]:
    with Admin(namesrv=broker.address) as client:
        yield client


@pytest.fixture
def name(admin: Admin) -> str:
    """A topic with one queue, of one test; its group has the same name."""
    found = f"orders-{uuid.uuid4().hex[:8]}"
    admin.create_topic(found, queues=1)
    return found


def consumed(address: str, name: str, count: int = 1, *, dies: bool = False) -> list[MessageView]:
    """Consume messages of the topic for the group of its name; they may become dead letters."""
    found = []
    with Consumer(name, {name: "*"}, namesrv=address, start_from="first", retries_max=0) as group:
        for _ in range(count):
            message = group.receive(PATIENCE_S)
            assert message is not None
            message.retry() if dies else message.ack()
            found.append(message)
    return found


def died(broker: BrokerProcess, name: str, *messages: Message) -> list[MessageView]:
    """Send messages, and have their group give them up."""
    with Producer("senders", namesrv=broker.address) as producer:
        for message in messages:
            producer.send(message)
    return consumed(broker.address, name, len(messages), dies=True)


def stored(admin: Admin, name: str, count: int) -> list[DeadLetter]:
    """Return the letters of the group; RocketMQ shows one a moment after it has taken it."""
    wait_until(lambda: len(list(admin.dead_letters(name))) == count, "letters are missing")
    return list(admin.dead_letters(name))


def numbered(name: str, count: int) -> list[Message]:
    return [Message(name, b"%d" % number, keys=f"o-{number}") for number in range(count)]


def test_a_letter_says_what_it_was_and_nothing_is_consumed(
    broker: BrokerProcess, admin: Admin, name: str
) -> None:
    """Its topic, identity and content are the message's; no group appears at its topic."""
    properties = {"region": "EU"}
    message = Message(name, b"\xff paid", tags="created", keys="o-1", properties=properties)
    (view,) = died(broker, name, message)
    (letter,) = stored(admin, name, 1)

    assert (letter.group, letter.topic, letter.body) == (name, name, message.body)
    assert (letter.message_id, letter.inbox_id) == (view.message_id, view.inbox_id)
    assert (letter.tags, letter.keys, letter.properties["region"]) == ("created", "o-1", "EU")
    assert (letter.attempts, letter.cause) == (1, "1 failed attempt")
    assert view.store_timestamp <= letter.died_at <= datetime.now(UTC)
    for identity in (letter.message_id, letter.offset_message_id):
        found = admin.dead_letter(name, identity)
        assert found is not None
        assert found.offset_message_id == letter.offset_message_id
    assert admin.dead_letter(name, view.offset_message_id) is None  # not a letter
    assert admin.dead_letter_groups()[name] == 1
    assert admin.groups_of(f"%DLQ%{name}") == []
    assert list(admin.dead_letters("nobody")) == []


def test_letters_are_chosen_by_time_and_cause_over_pages(
    broker: BrokerProcess, admin: Admin, name: str
) -> None:
    """All of them, in their order, however many; a loop may end before."""
    count = PAGE_SIZE + 3
    died(broker, name, *numbered(name, count))
    letters = list(admin.dead_letters(name))
    middle = letters[count // 2].died_at
    later = [one for one in letters if one.died_at >= middle]
    with Producer("senders", namesrv=broker.address) as producer:
        producer.send(Message(name, b"rejected"))
    with Consumer(name, {name: "*"}, namesrv=broker.address) as consumer:
        consumer.receive().reject("card expired")

    def ids(found: Iterator[DeadLetter] | list[DeadLetter]) -> list[str]:
        return [one.offset_message_id for one in found]

    assert [one.body for one in letters] == [b"%d" % number for number in range(count)]
    (rejected,) = admin.dead_letters(name, cause="card expired")
    later.append(rejected)
    assert ids(admin.dead_letters(name, since=middle)) == ids(later)
    assert ids(admin.dead_letters(name, until=middle)) == ids(letters)[: count + 1 - len(later)]
    assert ids(admin.dead_letters(name, cause="1 failed attempt")) == ids(letters)
    assert ids(admin.dead_letters(name, cause="1 failed")) == []
    cause, other = admin.dead_letter_causes(name, since=middle)
    assert (cause.cause, cause.count) == ("1 failed attempt", len(later) - 1)
    assert (other.cause, other.count) == ("card expired", 1)
    assert (cause.first, cause.last) == (middle, letters[-1].died_at)
    assert next(admin.dead_letters(name)).body == b"0"
    assert admin.redrive(name, cause="card expired", dry_run=True).sent == 1
    with pytest.raises(ConfigurationError, match="expected a datetime with a time zone"):
        list(admin.dead_letters(name, since=datetime(2026, 1, 1)))  # noqa: DTZ001


def test_what_is_sent_again_is_the_message_and_nothing_else(
    broker: BrokerProcess, admin: Admin, name: str
) -> None:
    """An inbox knows it; of retries, dead letters and transactions it has no trace."""
    properties = {"region": "EU"}
    message = Message(name, b"x" * 9000, tags="t", keys="a b", properties=properties, flag=7)
    config = ClientConfig(namesrv=broker.address, compress_over=100)
    with (
        TransactionProducer("senders-tx", checker=lambda _: Decision.UNKNOWN, config=config) as tx,
        tx.transaction(message),
    ):
        pass
    (before,) = consumed(broker.address, name, dies=True)
    (letter,) = stored(admin, name, 1)
    seen: list[DeadLetter] = []
    dry = admin.redrive(name, dry_run=True)
    sent = admin.redrive(name, on_progress=seen.append)
    (after,) = consumed(broker.address, name)

    assert before.transaction_id == letter.transaction_id == before.message_id
    assert (dry.topics, dry.failures, dry.sent) == ({name: 1}, (), 1)
    assert (sent.topics, sent.failures) == ({name: 1}, ())
    assert [one.message_id for one in seen] == [before.message_id]
    assert (after.message_id, after.inbox_id) == (before.message_id, before.inbox_id)
    assert (after.body, after.flag, after.delivery_attempt) == (message.body, 7, 1)
    assert (after.tags, after.keys) == ("t", "a b")
    assert after.record.sys_flag & 1  # compressed as before
    assert (after.transaction_id, after.half_message_id) == (None, None)
    own = set(after.properties) - {"UNIQ_KEY", "TAGS", "KEYS", "region"}
    with Producer("senders", namesrv=broker.address) as plain:
        plain.send(Message(name, b"plain"))
    (other,) = consumed(broker.address, name)
    assert own == set(other.properties) - {"UNIQ_KEY"}  # what the broker adds to every message
    assert len(list(admin.dead_letters(name))) == 1
    assert admin.redrive(name, since=sent.begun).sent == 0


def test_each_letter_that_cannot_be_sent_says_why(
    broker: BrokerProcess, admin: Admin, name: str
) -> None:
    """Also in a dry run; the others are sent, at the rate that was asked for."""
    died(broker, name, *numbered(name, 2))
    with Producer("senders", namesrv=broker.address) as producer:
        producer.send(Message(f"%DLQ%{name}", b"not of this group"))
    assert len(stored(admin, name, 3)) == 3
    started = time.monotonic()
    result = admin.redrive(name, rate=20)
    took = time.monotonic() - started
    admin.delete_topic(name)
    dry = admin.redrive(name, dry_run=True)

    assert (result.topics, result.complete) == ({name: 2}, True)
    assert [type(error) for _letter, error in result.failures] == [InvalidMessageError]
    assert took > 0.09  # two pauses, which a slow machine can only make longer
    assert dry.sent == 0
    errors = [type(error) for _letter, error in dry.failures]
    assert errors == [RouteNotFoundError, RouteNotFoundError, InvalidMessageError]
    with pytest.raises(ConfigurationError, match="message_id is 'nope'"):
        admin.redrive(name, "nope")
    with pytest.raises(ConfigurationError, match="rate is 0, expected a number above 0"):
        admin.redrive(name, rate=0)


def test_a_broker_that_vanishes_ends_it(tmp_path: Path) -> None:
    """What was sent is told, and that others were not tried; all can be sent again."""
    with broker_process(tmp_path) as mortal:
        died(mortal, "orders", *numbered("orders", 3))
        config = ClientConfig(namesrv=mortal.address, send_timeout=0.5)
        with Admin(config=config) as admin:
            ended = admin.redrive("orders", on_progress=lambda _: mortal.kill())
        mortal.restart()
        with Admin(namesrv=mortal.address) as admin:
            again = admin.redrive("orders")

    assert (ended.sent, len(ended.failures), ended.complete) == (1, 1, False)
    assert ended.failures[0][1].retriable
    assert (again.sent, again.complete) == (3, True)


def test_rights_on_the_two_topics_suffice(tmp_path: Path) -> None:
    """GET on the dead letters to read them, PUB on their topic to send them again."""
    guarded = GuardedBroker(tmp_path, "users")
    try:
        address = guarded.address
        with Consumer(
            "billing", {"orders": "*"}, namesrv=address, start_from="first", retries_max=0, **ADMIN
        ) as consumer:
            consumer.receive().retry()
        with Admin(namesrv=address, **ADMIN) as root:
            root.create_user(READER["access_key"], READER["secret_key"])
            with Admin(namesrv=address, **READER) as reader:
                with pytest.raises(AccessDeniedError):
                    list(reader.dead_letters("billing"))
                entry = AclEntry(resource="Topic:%DLQ%billing", actions=["Get"])
                root.create_acl("letter-reader", entry)
                (letter,) = reader.dead_letters("billing")
                ((_, error),) = reader.redrive("billing").failures
                entry = AclEntry(resource="Topic:orders", actions=["Pub"])
                root.update_acl("letter-reader", entry)
                assert reader.redrive("billing", letter.message_id).topics == {"orders": 1}
            assert isinstance(error, AccessDeniedError)
            assert sum(one.end - one.first for one in root.queues("orders")) == 2
    finally:
        guarded.close()


def test_the_command_lists_shows_and_sends_again(
    broker: BrokerProcess, admin: Admin, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables for people, JSON for programs, and an exit code that tells."""
    hostile = Message(name, b"caf\xc3\xa9", keys="o-\x1b[2J")
    died(broker, name, *numbered(name, 2), hostile)
    letters = list(admin.dead_letters(name))

    def halfmq(*words: str) -> tuple[int, str, str]:
        code = main(["dlq", *words, "--namesrv", broker.address])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    code, out, _ = halfmq("list")
    assert code == 0
    assert f"{name}  3" in out
    assert json.loads(halfmq("list", "--json")[1])[name] == 3
    code, out, _ = halfmq("list", name)
    assert (code, out.split()[:4]) == (0, ["LETTERS", "FIRST", "LAST", "CAUSE"])
    assert out.splitlines()[1].endswith("1 failed attempt")
    (cause,) = json.loads(halfmq("list", name, "--json")[1])
    assert (cause["count"], cause["last"]) == (3, letters[-1].died_at.isoformat())

    code, out, err = halfmq("show", name, "--limit", "2")
    assert [line.split()[0] for line in out.splitlines()[1:]] == [
        one.message_id for one in letters[:2]
    ]
    assert (code, "only the first 2 are shown" in err) == (0, True)
    assert "\x1b" not in halfmq("show", name)[1]
    one = json.loads(halfmq("show", name, "--id", letters[2].message_id, "--json")[1])
    assert (one["body"], one["attempts"], one["inbox_id"]) == ("café", 1, letters[2].inbox_id)
    assert "café" in halfmq("show", name, "--id", letters[2].message_id)[1]

    code, out, _ = halfmq("redrive", name, "--dry-run", "--since", letters[2].died_at.isoformat())
    assert (code, out.startswith("would send ")) == (0, True)
    code, out, _ = halfmq("redrive", name, "--id", letters[0].message_id, "--rate", "100")
    assert (code, out) == (0, f"sent 1 to {name}\n")
    code, out, _ = halfmq("redrive", name)
    assert (code, out.startswith(f"sent 3 to {name}; they stay in the queue: ")) == (0, True)
    since = out.split("--since ")[1].split()[0]
    done = json.loads(halfmq("redrive", name, "--since", since, "--json")[1])
    assert (done["sent"], done["failures"], done["dry_run"]) == (0, [], False)
    again = [one.message_id for one in consumed(broker.address, name, 4)]
    assert again == [one.message_id for one in (letters[0], *letters)]

    for verb in ("show", "redrive"):
        code, out, err = halfmq(verb, name, "--id", "nope")
        assert (code, out, err) == (1, "", f"halfmq: group {name} has no dead letter nope\n")
    admin.delete_topic(name)
    code, out, err = halfmq("redrive", name, "--json")
    assert (code, len(json.loads(out)["failures"]), "is not sent: " in err) == (1, 3, True)
    assert halfmq("redrive", name, "--since", "yesterday")[0] == 2
