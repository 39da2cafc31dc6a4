"""What the import of the client library loads."""

from __future__ import annotations

import pytest

from halfmq import client
from tests.support.python import python

HEAVY = (
    "halfmq.client.admin",  # for operators' programs
    "halfmq.client.blocking",
    "importlib.metadata",
    "numpy",
    "opentelemetry",
    "pydantic",
    "sqlalchemy",
)


def test_the_import_loads_only_what_producers_and_consumers_need() -> None:
    """A web application pays for the import at each start of each worker."""
    program = f"import sys, halfmq.client; print(*(m for m in {HEAVY!r} if m in sys.modules))"

    loaded = python("-c", program, check=True)

    assert loaded.stdout.split() == []


@pytest.mark.parametrize("name", client.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    """Also those that are loaded on first use."""
    assert getattr(client, name) is not None


def test_other_names_do_not_exist() -> None:
    """A typing mistake is an ImportError that names it."""
    with pytest.raises(AttributeError, match="no attribute 'Konsumer'"):
        client.Konsumer  # noqa: B018
