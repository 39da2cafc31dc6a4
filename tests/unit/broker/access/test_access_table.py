"""Who may ask what is written down, and a broker does just that."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmq.broker.access.build import AccessSetup
from halfmq.broker.access.config import AccessConfig
from halfmq.broker.access.requirements import LOCAL_ONLY, requirements_of
from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.ports import Connection
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from tests import access_table
from tests.support.broker_doubles import FakeConnection


def test_the_committed_table_is_what_a_broker_does() -> None:
    """After a new request or rule, regenerate `docs/access-table.md` and review it."""
    measured = "\n".join(access_table.lines(access_table.measure())) + "\n"

    assert measured.splitlines() == access_table.DOCUMENT.read_text("utf-8").splitlines(), (
        "python -m tests.access_table"
    )


def test_requests_without_a_valid_signature_are_refused() -> None:
    """No request code is served, not even one that only names a topic of its own."""
    rows = access_table.measure()

    titles = [subject.title for subject in access_table.SUBJECTS]
    for title in ("anonymous", "wrong secret"):
        at = titles.index(title)
        assert not [row.sample for row in rows if row.allowed[at]]


@pytest.mark.parametrize(
    "code",
    [
        RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
    ],
)
def test_an_empty_list_needs_a_right_on_the_cluster(code: RequestCode) -> None:
    """It names no resource, and would otherwise be allowed to every principal."""
    assert requirements_of(code, None, b"{}")


def test_without_access_control_what_belongs_to_all_is_changed_locally_only(tmp_path: Path) -> None:
    """Settings, and files of the log; with access control a right is needed instead."""
    setup = AccessSetup(
        AccessConfig(),
        users_file=tmp_path / "users",
        cluster_name="C",
        belongs_to_other=lambda _client_id, _principal, _connection: False,
    )

    def served(_request: RemotingCommand, _connection: Connection) -> bytes:
        return b"served"

    table = setup.guarded(dict.fromkeys(RequestCode, served))
    for code, handler in table.items():
        for name in ("127.0.0.1:5", "::1:5", "::ffff:127.0.0.1:5"):
            assert handler(RemotingCommand(code, opaque=1), FakeConnection(name)) == b"served"
        if code not in LOCAL_ONLY:
            assert handler is served
            continue
        for name in ("10.0.0.7:5", "fe80::1:5"):
            with pytest.raises(RequestRefusedError, match="broker's own machine") as refused:
                handler(RemotingCommand(code, opaque=1), FakeConnection(name))
            assert refused.value.code == ResponseCode.NO_PERMISSION
