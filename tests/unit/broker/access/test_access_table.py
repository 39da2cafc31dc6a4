"""Who may ask what is written down, and a broker does just that."""

from __future__ import annotations

import pytest

from halfmq.broker.access.requirements import requirements_of
from halfmq.remoting.codes import RequestCode
from tests import access_table


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
