"""Who may ask what is written down, and a broker does just that."""

from __future__ import annotations

import pytest

from halfmq.broker.access.requirements import requirements_of
from halfmq.remoting.codes import RequestCode
from tests import access_table


def test_the_committed_table_is_what_a_broker_does() -> None:
    """A new request, or a changed rule, shows in `docs/access-table.md`; write it anew and look."""
    measured = "\n".join(access_table.lines(access_table.measure())) + "\n"

    assert measured.splitlines() == access_table.DOCUMENT.read_text("utf-8").splitlines(), (
        "python -m tests.access_table"
    )


def test_nobody_without_a_valid_signature_is_served_at_all() -> None:
    """Neither a request of any code, nor one that names a topic of its own."""
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
def test_an_empty_list_is_not_a_request_for_everybody(code: RequestCode) -> None:
    """It names nothing that a right could be asked on, so it needs one on the cluster."""
    assert requirements_of(code, None, b"{}")
