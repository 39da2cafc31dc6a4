"""All that the broker keeps for its peers is in one account, which operators can read."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

from halfmq.broker.config import BrokerConfig, NetworkConfig, StoreSettings
from halfmq.broker.limits.kept import LIMITS, PENDING, usage
from halfmq.broker.service import Broker
from tests.limits import DOCUMENT, written

BROKER: Final = Path(__file__).parents[2] / "broker"

NOT_KEPT: Final[dict[str, str]] = {
    "work in one pass, one answer, or one request": """
        delay/delivery.COPIES_FOUND_MAX delay/delivery.COPIES_MAX delay/done_file.LOG_BYTES_MAX
        delay/waiting.QUEUES_MAX
        handlers/messages/recall.PAGE_BYTES_MAX
        delay/delivery.BATCH_COUNT_MAX delay/delivery.FETCHES_MAX
        filters/grammar.TOKENS_MAX
        handlers/admin/topics.ENTRIES_MAX handlers/admin/consumption.ROWS_MAX
        handlers/admin/group_offsets.RESET_CLIENTS_MAX handlers/admin/groups.GROUPS_PER_REQUEST_MAX
        handlers/admin/consumer_relays.ANSWER_BYTES_MAX
        handlers/admin/consumer_relays.STATUS_BYTES_MAX
        handlers/admin/consumer_relays.STATUS_CLIENTS_MAX handlers/admin/tables.ANSWER_BYTES_MAX
        handlers/admin/topics.TOPICS_PER_REQUEST_MAX handlers/clients/assignments.QUEUES_MAX
        handlers/clients/clients.HEARTBEAT_GROUPS_MAX
        handlers/messages/pull_replies.BYTES_MAX handlers/messages/pull.COPIED_MAX
        handlers/messages/pull_replies.MESSAGES_MAX handlers/messages/pull.STAGED_BYTES_MAX
        handlers/messages/queries.ANSWER_BYTES_MAX
        handlers/messages/queries.MESSAGES_MAX handlers/messages/queries.UNIQUE_KEY_MESSAGES_MAX
        net/connection.FETCHES_MAX net/group_append.GROUP_MAX net/reply_release.READY_BYTES_MAX
        replication/slave_link.BUFFERED_MAX replication/slave_link.PIECE_MAX
        transaction/decision_lookup.INDEX_HITS_MAX
        transaction/deduplication.REFILL_BYTES_MAX transaction/deduplication.REFILL_COUNT_MAX
        access/tls_listener.READ_MAX
        handlers/messages/pop.MESSAGES_MAX handlers/messages/pop.READS_MAX pop/engine.BATCH_MAX
        handlers/messages/archived_pulls.READS_MAX""",
    "a time or a number": """
        handlers/clients/routes.DRAIN_MS_MAX
        http/app.CONNECTION_S_MAX loop/child_process.RESTART_S_MAX
        delay/levels.DELAY_MS_MAX filters/values.INTEGER_MAX filters/values.LONG_MAX
        handlers/admin/topics._PERM_MAX handlers/admin/consumer_relays._CODE_MAX
        handlers/admin/topics._EXTENSION_MAX handlers/messages/pull.SUSPEND_MS_MAX
        handlers/messages/pop.INVISIBLE_MS_MAX pop/engine.GROUP_MAX
        loop/ticker.EXTRA_PAUSE_S_MAX net/replay_pace.SLICE_S_MAX
        net/reply_release.STALLED_S_MAX transaction/checks/group_queues.REFUSALS_MAX
        transaction/checks/group_queues.REFUSED_RETRY_MS_MAX transaction/half.IMMUNITY_S_MAX""",
    "the size of one thing, whose number has a limit": """
        http/app.HEAD_SIZE_MAX http/app.RECEIVED_MAX http/families.SERIES_MAX
        pop/engine.REPEATS_MAX
        access/plain_acl.FILES_MAX access/plain_acl.FILE_SIZE_MAX access/users.ENTRIES_MAX
        access/users.TEXT_MAX access/users.USERS_MAX delay/levels.LEVELS_MAX
        delay/timer_records._MS_DIGITS_MAX delay/timer_records._DIGITS_MAX
        delay/timer_records._SHOWN_MAX
        filters/expressions.CONTAINS_LENGTH_MAX
        filters/expressions.DEPTH_MAX filters/expressions.OPERATORS_MAX
        filters/expressions.TEXT_MAX filters/values.NUMBER_LENGTH_MAX
        handlers/admin/broker_config.SETTINGS_BYTES_MAX handlers/admin/groups.GROUP_BYTES_MAX
        tables/client_registry.LEFT_GROUPS_MAX tables/group_members.REFUSED_MAX
        tables/client_registry.SUBSCRIPTIONS_MAX tables/group_members.TEXT_MAX
        tables/group_members.VARIANTS_MAX tables/topic_table.QUEUES_MAX
        transaction/half._DIGITS_MAX transaction/half_records._TAIL_MAX
        transaction/state/caches.GENERATION_MAX""",
    "what is logged or shown": """
        net/connection.OTHER_PROTOCOLS_MAX
        access/control.LINES_PER_SECOND_MAX logs.ALIKE_PER_SECOND_MAX logs.LINE_MAX
        tables/table_file.NAMES_LOGGED_MAX transaction/admission._SHOWN_MAX
        transaction/prepares.INVALID_IMMUNITIES_LOGGED_MAX""",
    "another limit of something in the account": """
        filters/filters_in_use.WAITING_MAX handlers/admin/change_queue.CHANGES_WAITING_MAX
        net/reply_release.UNFLUSHED_DECISIONS_MAX tables/awaited_save.WAITING_MAX
        tables/client_registry.CLIENT_IDS_MAX tables/client_registry.REPLACED_MAX""",
    "a few megabytes at most": """
        access/tls_listener.UNDECIDED_MAX access/tls_listener.HANDSHAKES_MAX
        handlers/messages/pull.COLD_READS_MAX tables/message_statistics.COUNTERS_MAX
        tables/message_statistics.PULLED_QUEUES_MAX transaction/checks/checker.COLD_READS_MAX
        transaction/checks/checker.STALE_MAX transaction/state/pending._SHARED_MAX""",
}
"""Constants ``..._MAX`` of the broker that are no limits of the account, by what they limit."""


OF_NO_PEER: Final[dict[str, str]] = {
    "part of what another class has in the account": """
        delay/DoneFile delay/DueTimes handlers/clients/ClientHandlers
        limits/Budget limits/LongAnswers net/ClientConnection net/SharedState
        net/PeerRequestExpiry net/ReplayPace net/Turns
        pop/InFlight pop/OrderLock pop/OrderLocks pop/Retries pop/ReviveLog tables/AwaitedSave
        tables/GroupMembers tables/Variants
        tables/_Variant tables/GroupConfig
        tables/_Broker tables/TopicConfig
        transaction/checks/Checker transaction/checks/Group
        transaction/checks/GroupQueues transaction/checks/OffsetQueue
        transaction/checks/Parking transaction/checks/Timetable
        transaction/OpWriter transaction/state/FinalMessageCache
        transaction/state/Generations transaction/state/PendingTable""",
    "of one request, one answer or one pass": """
        limits/_Progress handlers/messages/SqlSearch
        handlers/transactions/Batch http/Found net/GroupAppend
        pop/Taken transaction/Decisions transaction/replay/LogReplay""",
    "of settings, rules and tables as operators have set them": """
        Supervisor access/AccessSetup access/Principal access/RuleSet access/Users
        BrokerConfig
        net/NameServerRegistration net/_NameServerLink net/Router
        tables/TableFile""",
    "names of topics, or of what is logged, with a number of its own": """
        access/_RefusalLog disk/SendRefusal BoundedHandler
        transaction/CurrentQueues transaction/Prepares""",
    "a few megabytes at most, with a number of its own": """
        access/TlsListener tables/Counter
        tables/Statistics transaction/state/DecisionCache
        transaction/state/LogMap""",
}
"""Classes of the broker with a collection, by folder, that are not in the account, and why."""

COLLECTIONS: Final = frozenset(
    {"Counter", "OrderedDict", "bytearray", "defaultdict", "deque", "dict", "list", "set"}
)


def test_the_document_has_every_limit() -> None:
    """An operator plans memory by it; ``python -m tests.limits`` writes it."""
    document = DOCUMENT.read_text(encoding="utf-8")

    assert written(document) == document


def test_every_limit_has_its_use_in_the_metrics(tmp_path: Path) -> None:
    """What is declared is counted, and what is counted is declared."""
    network = NetworkConfig(listen_port=0, namesrv_listen_port=0, http_listen_port=0)
    broker = Broker(BrokerConfig(network=network, store=StoreSettings(root=tmp_path)))

    shown = usage(broker.keepers)

    assert shown.keys() == LIMITS.keys()
    assert {name: one["most"] for name, one in shown.items()} == {
        name: limit.most for name, limit in LIMITS.items()
    }
    assert all(0 <= one["used"] <= one["most"] for one in shown.values())
    assert PENDING.most == BrokerConfig().transaction.pending_max


def test_a_new_limit_is_declared_or_said_to_keep_nothing() -> None:
    """A new place that keeps something for peers has an entry in the account."""
    found = {
        f"{path.relative_to(BROKER).with_suffix('').as_posix()}.{name}"
        for path in BROKER.rglob("*.py")
        for name in _limits_in(path)
    }

    known = {name for names in NOT_KEPT.values() for name in names.split()}
    assert found == known, f"declare it in broker/limits/kept.py, or list it: {found ^ known}"


def test_a_new_class_that_collects_is_in_the_account_or_named() -> None:
    """Whatever grows with what peers send has ``kept``, or belongs to something that has."""
    found = {
        (path.parent.relative_to(BROKER) / one.name).as_posix()
        for path in BROKER.rglob("*.py")
        for one in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(one, ast.ClassDef) and _collects(one)
    }

    known = {name for names in OF_NO_PEER.values() for name in names.split()}
    assert found == known, f"give it kept(), or name it with the reason: {found ^ known}"


def _collects(one: ast.ClassDef) -> bool:
    """Return whether instances have a collection that begins empty, and no ``kept``."""
    if any(isinstance(part, ast.FunctionDef) and part.name == "kept" for part in one.body):
        return False
    return any(
        _is_collection(part.value)
        for part in ast.walk(one)
        if isinstance(part, ast.AnnAssign)
        and (part in one.body or ast.unparse(part.target).startswith("self."))
    )


def _is_collection(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Dict | ast.List | ast.Set):
        return True
    if not isinstance(value, ast.Call):
        return False
    name = value.func.value if isinstance(value.func, ast.Subscript) else value.func
    is_field = any(one.arg in {"factory", "default_factory"} for one in value.keywords)
    return is_field or (isinstance(name, ast.Name) and name.id in COLLECTIONS)


def _limits_in(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        statement.target.id
        for statement in tree.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and statement.target.id.endswith("_MAX")
    ]
