"""The servers that tests of the ledger share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import database_servers


@pytest.fixture(scope="session")
def postgresql() -> Iterator[int]:
    with database_servers.postgresql() as port:
        yield port


@pytest.fixture(scope="session")
def mariadb() -> Iterator[int]:
    with database_servers.mariadb() as port:
        yield port
